"""Weight updates outside this package: through the engine's own calls, or by a trainer through the engine's loader.

Such an update has no manifest, so this module records its writes. The update is complete once every byte of every
parameter has been written since the weights became stale. The content is then valid, as after the package's updates.
The return value of a loader does not count: a loader reports a fused parameter after the first of its parts.

Several calls may form one update with a begin and an end. The content is `updating` in between. Weights that were valid
at the begin are valid again at the end.
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
    """Sets the content of one rank's weights from the writes into its parameters.

    A rank that decides alone uses `watch`. Ranks that must agree first use `record`, and then `settle` or `fail`.

    Args:
        manager: The manager of the rank.
        parameters: Gives the parameters that a complete update must cover.
        undo: Restores the layers that the engine has changed for a load that failed.
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
        self._epoch = manager.epoch  # at the last call; a later epoch means that something else has changed the weights
        self._recorded = Written()  # by the current call, or the last one
        self._is_open = False  # an update of several calls has begun
        self._before = Content.VALID  # the content at its begin
        self._wrote = False  # a call of the open update has written

    # -- one call ---------------------------------------------------------------------------------------------

    @contextmanager
    def watch(self) -> Iterator[None]:
        """The body loads weights. A load that fails after it has written every parameter is complete.

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
        """Account for the recorded call, which has succeeded on every rank."""
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
        """Mark the content as undefined: a call failed on some rank after some rank had written."""
        self._recorded, self._written = Written(), Coverage()
        self.manager.mark_failed()
        self._epoch = self.manager.epoch

    # -- an update of several calls ---------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether an update of several calls has begun and not ended."""
        return self._is_open

    def begin(self) -> None:
        """Begin an update of several calls.

        Raises:
            StateConflictError: the weights are asleep.
        """
        self._forget_outdated()
        self._epoch = self.manager.epoch
        before = self.manager.content
        self.manager.begin_writing()
        self._is_open, self._before, self._wrote = True, before, False

    def assume_written(self) -> None:
        """Note that a call of the open update writes unrecorded, for example by NCCL or in another thread."""
        self._wrote = True

    def end(self, *, complete: bool = False) -> bool:
        """End an update that has succeeded on every rank.

        Args:
            complete: The update has written every parameter, even if this was not recorded.

        Returns: whether the content changed: `False` if no update was open, or it had failed.
        """
        was_open, self._is_open = self._is_open, False
        if not was_open or self.manager.content is not Content.UPDATING:  # torn or discarded meanwhile
            return False
        self._forget_outdated()
        self._leave(Content.VALID if complete or self._covers(self._written) else self._before)
        return True

    def break_off(self) -> None:
        """End an update that has failed. Does nothing but `undo` if no update is open."""
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
        if self._epoch != self.manager.epoch:  # something else has discarded or updated the weights since
            self._written = Coverage()

    def _covers(self, written: Coverage) -> bool:
        return all(not tensor.is_meta and written.fraction(tensor) == 1 for tensor in self._parameters())
