"""What leaves the trainer's devices while the engines' weights wake and the update runs.

    link to host memory   | copies of others | copies of weights |
    this process          | engines wake, update |  free others  |  free weights

The update only reads the weights. The link is never idle from the end of the training until the last byte has left.
"""

from __future__ import annotations

from collections.abc import Iterable

from rl_memory_plugins.trainer.offloading import Moved
from rl_memory_plugins.trainer.pausable_part import Pausable, commit_all, tags_of


class Leaving:
    """Parts of a handoff in `PausableMemory`, whose copies to host memory run while this process does other work.

    After `prepare` and `begin` each group is committed by itself. `abort` keeps on the device what no commit has freed.

    Args:
        others: What the update does not read. Its copies begin first.
        weights: What the update reads. Its copies queue behind those of `others` in the same memory; those of another
            memory run beside them.
        early: Whether the weights leave too. They do not if the update may write to them.

    Attributes:
        others, weights: By memory, the tags that are still to be committed.
        keeps_cache: Torch's cache stays until the last commit: to empty it would wait for the copies.
    """

    keeps_cache = False

    def __init__(self, others: Iterable[object], weights: Iterable[object], *, early: bool) -> None:
        read = tags_of(weights)
        self.weights = read if early else {}
        self.others: dict[Pausable, list[str]] = {}
        for memory, tags in tags_of(others).items():
            own = [tag for tag in tags if tag not in read.get(memory, ())]
            if own:
                self.others[memory] = own

    def prepare(self) -> None:
        """Obtain host memory for all of them, and free nothing yet; see `PausableMemory.prepare_sleep`."""
        for memory, tags in self.tags().items():
            memory.prepare_sleep(tags)

    def drop_gradients(self) -> None:
        """See `PausableMemory.drop_gradients`. Between this and `begin` the cache is emptied, once for all memories."""
        for memory in self.tags():
            memory.drop_gradients()

    def begin(self) -> None:
        """Start the copies. Nothing may write to the tags from now on, and only the update may read the weights."""
        for memory in self.tags():
            memory.begin()

    def free_others(self) -> list[Moved]:
        """Wait for the copies of `others`, not for those of `weights`, and free the device memory."""
        others, self.others = self.others, {}
        return commit_all(others, only=others)

    def abort(self) -> None:
        for memory in self.tags():
            memory.abort()

    def tags(self) -> dict[Pausable, list[str]]:
        """By memory, all tags that are still to be committed."""
        memories = dict.fromkeys([*self.others, *self.weights])
        return {memory: [*self.others.get(memory, ()), *self.weights.get(memory, ())] for memory in memories}
