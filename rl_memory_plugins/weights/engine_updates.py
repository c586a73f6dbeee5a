"""Weight updates that this package does not carry: by the engine's own calls, or by a trainer through its loader.

No manifest announces such an update, so its writes are watched. The update is complete once every byte of every
parameter has been written since the weights became stale. The content is valid again then, as after an update of ours.
The return value of a loader does not count: a loader names a fused parameter after the first of its parts.

Several calls may form one update with a begin and an end. The content is `updating` from the begin to the end. Weights
that were valid at the begin are valid again at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rl_memory_plugins.memory.manager import MemoryManager
from rl_memory_plugins.tags import Content
from rl_memory_plugins.weights.coverage import Coverage
from rl_memory_plugins.weights.write_recorder import Written, recording

if TYPE_CHECKING:
    import torch


class EngineUpdates:
    """Decides what the weights of one rank are worth, from the writes into its parameters.

    A rank that decides alone uses `watch`. Ranks that must agree first use `record`, and then `settle` or `fail`.

    Args:
        manager: The manager of the rank.
        parameters: Gives the parameters that a complete update must cover.
        undo: Restores the layers that the engine has taken apart for a load that breaks off.
    """

    def __init__(
        self,
        manager: MemoryManager,
        parameters: Callable[[], Iterable[torch.Tensor]],
        undo: Callable[[], None] = lambda: None,
    ) -> None:
        self.manager = manager
        self._parameters = parameters
        self._undo = undo
        self._written = Coverage()  # since the weights became stale, by calls that succeeded
        self._epoch = manager.epoch  # at the last call; another one means that something else has changed the weights
        self._recorded = Written()  # by the call under way, or the last one
        self._is_open = False  # an update of several calls has begun
        self._before = Content.VALID  # the content at its begin
        self._wrote = False  # one of its calls has written

    # -- one call ---------------------------------------------------------------------------------------------

    @contextmanager
    def watch(self) -> Iterator[None]:
        """The body loads weights. A load that has written everything before it failed is complete.

        Raises:
            StateConflictError: the weights are asleep.
        """
        self.manager.require_writable()
        try:
            with self.record():
                yield
        except BaseException:
            self._undo()
            if self._recorded.touched.is_empty or (not self._is_open and self._covers(self._recorded.anew)):
                self.settle()
            else:
                self.fail()
            raise
        self.settle()

    @contextmanager
    def record(self) -> Iterator[None]:
        """Record what the body writes, for the `settle` or `fail` that follows.

        Raises:
            StateConflictError: the weights are asleep.
        """
        self._recorded = Written()
        self.manager.require_writable()
        with recording(self._recorded):
            yield

    @property
    def wrote(self) -> bool:
        """Whether the last recorded body wrote into a parameter."""
        touched = self._recorded.touched
        return any(touched.fraction(tensor) > 0 for tensor in self._parameters())

    def settle(self) -> None:
        """The recorded call is over, and succeeded on every rank."""
        recorded, self._recorded = self._recorded, Written()
        self._forget_outdated()
        self._written.extend(recorded.anew)
        if self._is_open:
            self._wrote = self._wrote or not recorded.touched.is_empty
            if self.manager.content is not Content.UPDATING:  # an earlier call of this update failed
                self._before = self.manager.content
                self.manager.begin_writing()
        complete = not self._is_open and self._covers(self._written)
        self.manager.note_foreign_load(complete)
        self._epoch = self.manager.epoch
        if complete:
            self._written = Coverage()

    def fail(self) -> None:
        """The content of the weights is undefined: a call failed on some rank after some rank had written."""
        self._recorded, self._written = Written(), Coverage()
        self.manager.tear()
        self._epoch = self.manager.epoch

    # -- an update of several calls ---------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether an update of several calls has begun and not ended."""
        return self._is_open

    def begin(self) -> None:
        """The calls from here on are one update.

        Raises:
            StateConflictError: the weights are asleep.
        """
        self._forget_outdated()
        self._epoch = self.manager.epoch
        before = self.manager.content
        self.manager.begin_writing()
        self._is_open, self._before, self._wrote = True, before, False

    def assume_written(self) -> None:
        """A call of the open update writes where nothing can be recorded, for example by NCCL or in another thread."""
        self._wrote = True

    def end(self, *, complete: bool = False) -> bool:
        """The update ended well on every rank. Returns whether that has changed what the weights are worth.

        Args:
            complete: It has written every parameter, also where nothing was recorded.
        """
        was_open, self._is_open = self._is_open, False
        if not was_open or self.manager.content is not Content.UPDATING:  # torn or discarded meanwhile
            return False
        self._forget_outdated()
        self._leave(Content.VALID if complete or self._covers(self._written) else self._before)
        return True

    def break_off(self) -> None:
        """The update will not be ended. Does nothing where none is open."""
        self._undo()
        was_open, self._is_open = self._is_open, False
        if was_open and self.manager.content is Content.UPDATING:
            if self._wrote:
                self.fail()
            else:
                self._leave(self._before)

    def _leave(self, content: Content) -> None:
        if content is Content.VALID:
            self._written = Coverage()
        self.manager.content = content
        self.manager.note_foreign_load(content is Content.VALID)
        self._epoch = self.manager.epoch

    # -- completeness -----------------------------------------------------------------------------------------

    def _forget_outdated(self) -> None:
        if self._epoch != self.manager.epoch:  # discarded or updated by other means since the last call
            self._written = Coverage()

    def _covers(self, written: Coverage) -> bool:
        return all(not tensor.is_meta and written.fraction(tensor) == 1 for tensor in self._parameters())
