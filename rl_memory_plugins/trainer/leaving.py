"""What leaves the trainer's devices while the engines' weights wake and the update runs.

    link to host memory   | copies of others | copies of weights |
    this process          | engines wake, update |  free others  |  free weights  | engines open

The update only reads the weights. The link is never idle from the end of the training until the last byte has left.
Where the devices have room for all of the engines beside all of the trainer, nobody waits for the copies:

    link to host memory   | copies of others | copies of weights |
    threads of memories   |                                      |  free all
    this process          | engines wake, update | engines open |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rl_memory_plugins.trainer.offloading import Moved
from rl_memory_plugins.trainer.pausable_part import Pausable, commit_all, tags_of
from rl_memory_plugins.weights.later import Frees


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
        behind: All of them leave behind the engines, which open beside them.
        frees: What the update has allocated on a GPU, if it is to be freed after the copies.
    """

    keeps_cache = False
    behind = False

    def __init__(self, others: Iterable[object], weights: Iterable[object], *, early: bool) -> None:
        self.frees = Frees()
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
        moves = commit_all(self.others, only=self.others)
        self.others = {}  # only now: what an interrupt leaves prepared is for `abort`
        return moves

    @property
    def may_stay(self) -> bool:
        """Whether all of them can leave behind: the update only reads the weights, and no ranks must meet for it."""
        return bool(self.weights) and not any(memory.process_groups for memory in self.tags())

    def commit_behind(self, then: Callable[[], object]) -> tuple[int, int]:
        """Free the device memory behind this call; see `PausableMemory.commit_behind`.

        Args:
            then: Called once, when the last memory has left; not if one fails to.

        Returns: the bytes of `others` and of the weights that leave.
        """
        of_others = of_weights = 0
        left = iter(reversed(range(len(self.tags()))))
        frees, self.frees = self.frees, Frees()

        def end() -> None:
            try:
                frees.run()
            finally:
                then()

        for memory, tags in self.tags().items():
            sizes = memory.commit_behind(lambda: end() if next(left) == 0 else None)
            others = [tag for tag in tags if tag in self.others.get(memory, ())]
            of_others += sum(sizes.get(tag, 0) for tag in others)
            of_weights += sum(nbytes for tag, nbytes in sizes.items() if tag not in others)
        self.others, self.weights = {}, {}
        return of_others, of_weights

    def abort(self) -> None:
        for memory in self.tags():
            memory.abort()
        self.frees.run()

    def tags(self) -> dict[Pausable, list[str]]:
        """By memory, all tags that are still to be committed."""
        memories = dict.fromkeys([*self.others, *self.weights])
        return {memory: [*self.others.get(memory, ()), *self.weights.get(memory, ())] for memory in memories}
