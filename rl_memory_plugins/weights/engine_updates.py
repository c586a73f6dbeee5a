"""Weight updates outside this package: through the engine's own calls, or by a trainer through the engine's loader.

Such an update has no manifest. Weights of undefined content are marked before its first write, and the update is
complete once no mark is left. The content is then valid, as after the package's updates. The return value of a loader
does not count: a loader reports a fused parameter after the first of its parts.

Valid weights are not marked: they stay valid unless a call fails that has written.

Several calls may form one update with a begin and an end. The content is `updating` in between. Weights that were valid
at the begin are valid again at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rl_memory_plugins.memory.manager import MemoryManager
from rl_memory_plugins.tags import Content
from rl_memory_plugins.weights.filled import Filled
from rl_memory_plugins.weights.unwritten import UnwrittenMarks
from rl_memory_plugins.weights.write_detector import WriteDetector

if TYPE_CHECKING:
    import torch


class EngineUpdates:
    """Sets the content of one rank's weights from the writes into its parameters.

    A rank that decides alone uses `watch`. Ranks that must agree first use `record`, and then `settle` or `fail`.

    Args:
        manager: The manager of the rank.
        parameters: Gives the parameters and their names, as `NamedWeights` names them. A complete update must cover
            those that the last sleep has not kept. Those that have no memory now are of a part that the engine does
            not run, and do not count.
        undo: Restores the layers that the engine has changed for a load that failed.
        padding: For parameters with padding, the regions that a load fills.
        reset: Gives parameters that no checkpoint has the values of the engine's start, but for those of its argument,
            which hold theirs. Returns the names. No mark overwrites them, because a step of the engine may read them
            after a load that did not bring them; they count as written.
    """

    def __init__(
        self,
        manager: MemoryManager,
        parameters: Callable[[], Iterable[tuple[str, torch.Tensor]]],
        undo: Callable[[], None] = lambda: None,
        padding: Callable[[], Filled] = dict,
        reset: Callable[[Set[str]], Iterable[str]] = lambda kept: (),
    ) -> None:
        self.manager = manager
        self._all_parameters = parameters
        self._absent = {name for name, one in parameters() if one.is_meta}
        self._undo = undo
        self._padding = padding
        self._reset = reset
        self._marks: UnwrittenMarks | None = None  # in weights of undefined content
        self._epoch = manager.epoch  # at the last call; a later epoch means that something else has changed the weights
        self._storages: set[int] = set()  # the addresses of the parameters, when a write was last looked for
        self._detector = WriteDetector()  # of the current call, or the last one
        self._is_open = False  # an update of several calls has begun
        self._before = Content.VALID  # the content at its begin
        self._wrote = False  # a call of the open update has written

    def _parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, one) for name, one in self._all_parameters() if name not in self._absent)

    # -- one call ---------------------------------------------------------------------------------------------

    @contextmanager
    def watch(self) -> Iterator[None]:
        """The body loads weights. A load that fails after it has overwritten all undefined weights is complete.

        Raises:
            StateConflictError: the weights are asleep.
        """
        try:
            self.prepare()
        except BaseException:
            self._undo()  # the caller may have changed layers for the load that is refused
            raise
        self._detector = WriteDetector()
        try:
            with self._detector.detecting():
                yield
        except BaseException:
            self._undo()
            if not self._detector.found or (not self._is_open and self._is_complete()):
                self.settle()
            else:
                self.fail()
            raise
        self.settle()

    @contextmanager
    def record(self, identity: Callable[[], str] | None = None) -> Iterator[None]:
        """Look for writes into parameters by the body, for the `settle` or `fail` that follows.

        Args:
            identity: Gives the identity of the weights. For a body that may write where no operator of torch runs.

        Raises:
            StateConflictError: the weights are asleep.
        """
        self._detector = WriteDetector()  # first: what is refused has written nothing
        self.prepare()
        if not self._storages:
            self._find_storages()
        self._detector = WriteDetector(self._storages.__contains__)
        before = "" if identity is None else identity()
        try:
            with self._detector.detecting():
                yield
        finally:
            if identity is not None and identity() != before:
                self._detector.found = True

    @property
    def wrote(self) -> bool:
        """Whether the last recorded body wrote into a parameter."""
        if not self._detector.found and self._detector.others:
            self._find_storages()
            self._detector.found = not self._storages.isdisjoint(self._detector.others)
        return self._detector.found

    @property
    def wrote_anything(self) -> bool:
        """Whether the last recorded body wrote, into parameters or elsewhere."""
        return self._detector.found_any

    def _find_storages(self) -> None:
        self._storages = {one.untyped_storage().data_ptr() for _, one in self._parameters() if not one.is_meta}

    def prepare(self) -> None:
        """Mark weights of undefined content, before a call may write them or take the model apart.

        Raises:
            StateConflictError: the weights are asleep.
        """
        self.manager.require_writable()
        self.manager.learn_unfilled()  # the marks would overwrite them
        if self.needs_marks:
            kept = self.manager.unmarked
            unmarked = kept.union(self._reset(kept))
            filled = self._padding()
            padded = [
                (one, [region.of(one) for region in filled[name]]) for name, one in self._parameters() if name in filled
            ]
            self._marks = UnwrittenMarks(
                lambda: [one for name, one in self._parameters() if name not in unmarked], padded
            )
            self._epoch = self.manager.epoch

    @property
    def needs_marks(self) -> bool:
        """Whether the content is undefined and nothing shows yet what is overwritten."""
        self._forget_outdated()
        content = self.manager.content
        if content is Content.UPDATING and self._is_open:
            content = self._before
        return content is not Content.VALID and self._marks is None

    def settle(self) -> None:
        """Account for the call, which has succeeded on every rank."""
        self._forget_outdated()
        if self._is_open:
            self._wrote = self._wrote or self._detector.found_any
            if self.manager.content is not Content.UPDATING:  # an earlier call of this update failed
                self._before = self.manager.content
                self.manager.begin_writing()
        complete = not self._is_open and self._is_complete()
        self.manager.note_foreign_load(complete)
        self._epoch = self.manager.epoch
        if complete:
            self._marks = None

    def fail(self) -> None:
        """Mark the content as undefined: a call failed on some rank after some rank had written."""
        self._marks = None
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
        self.prepare()
        before = self.manager.content
        self.manager.begin_writing()
        self._is_open, self._before, self._wrote = True, before, False

    def assume_written(self) -> None:
        """Note that a call of the open update writes unrecorded, for example by NCCL or in another thread."""
        self._wrote = True

    def end(self) -> bool:
        """End an update that has succeeded on every rank.

        Returns: whether the content changed: `False` if no update was open, or it had failed.
        """
        was_open, self._is_open = self._is_open, False
        if not was_open or self.manager.content is not Content.UPDATING:  # torn or discarded meanwhile
            return False
        self._forget_outdated()
        self._leave(Content.VALID if self._is_complete() else self._before)
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
            self._marks = None
        self.manager.content = content
        self.manager.note_foreign_load(content is Content.VALID)
        self._epoch = self.manager.epoch

    # -- completeness -----------------------------------------------------------------------------------------

    def _forget_outdated(self) -> None:
        if self._epoch != self.manager.epoch:  # something else has discarded or updated the weights since
            self._marks = None

    def _is_complete(self) -> bool:
        return self._marks is not None and self._marks.are_gone
