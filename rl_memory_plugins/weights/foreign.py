"""Weight loads that others make: trainers that call the model's own `load_weights` keep working.

Such a load cannot be announced by a manifest. It is complete once every byte of every parameter has been
written since the weights became stale; then the content is valid again, as after one of our own updates. What
a loader returns does not count: it names a fused parameter after the first of its parts.

Several loads may be one update of the engine's own, with a begin and an end: from the one to the other the content
is `updating`, and what was valid is valid again then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rl_memory_plugins.memory.manager import MemoryManager
from rl_memory_plugins.tags import Content
from rl_memory_plugins.weights.regions import Coverage
from rl_memory_plugins.weights.written import Written, recording

if TYPE_CHECKING:
    import torch


class ForeignLoads:
    """Watches `model.load_weights`, by wrapping it on the instance.

    Args:
        manager: Told of every load, and when the loads so far amount to a complete update.
        model: Its `load_weights` takes (name, tensor) pairs.
        undo: Puts back what the engine has taken apart of the model for a load that breaks off.
    """

    def __init__(self, manager: MemoryManager, model: torch.nn.Module, undo: Callable[[], None] = lambda: None) -> None:
        self.manager = manager
        self._model = model
        self._undo = undo
        self._before: Content | None = None  # an update of several loads is under way: what the weights were worth
        self._wrote = False  # it has
        self._written = Coverage()
        self._epoch = manager.epoch
        self.original: Callable[[Iterable[tuple[str, torch.Tensor]]], Any] = model.load_weights
        model.load_weights = self._load_weights

    def _load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], *args: Any, **kwargs: Any) -> Any:
        with self.watch():
            return self.original(weights, *args, **kwargs)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """The body writes weights.

        Raises:
            StateConflictError: the weights are asleep.
        """
        self.manager.require_writable()
        self._forget_outdated()
        written = Written()
        broken_off = False
        try:
            with recording(written):
                yield
        except BaseException:
            broken_off = not written.touched.is_empty
            self._undo()
            raise
        finally:
            self._wrote = self._wrote or not written.touched.is_empty
            if broken_off:  # what came before may be torn now
                self._written = Coverage()
            self._written.extend(written.anew)
            complete = not self.is_under_way and self._is_complete()
            self.manager.note_foreign_load(complete, broken_off=broken_off)
            self._epoch = self.manager.epoch
            if complete or broken_off:  # the next load may bring other weights than one that broke off
                self._written = Coverage()

    @property
    def is_under_way(self) -> bool:
        """Whether an update of several loads has begun and not ended."""
        return self._before is not None

    def begin(self) -> None:
        """The loads from here on are one update.

        Raises:
            StateConflictError: the weights are asleep.
        """
        self._forget_outdated()
        self._epoch = self.manager.epoch
        before = self.manager.content
        self.manager.begin_writing()
        self._before, self._wrote = before, False

    def end(self) -> None:
        """The update that began is over and went well. Does nothing where none did."""
        before, self._before = self._before, None
        if before is None or self.manager.content is not Content.UPDATING:  # torn or discarded meanwhile
            return
        if self._epoch == self.manager.epoch and self._is_complete():
            before = Content.VALID
        self._settle(before)

    def break_off(self) -> None:
        """The update that began will not be ended. Does nothing where none did."""
        self._undo()
        before, self._before = self._before, None
        if before is not None and self.manager.content is Content.UPDATING:
            self._settle(Content.FAILED if self._wrote else before)

    def _settle(self, content: Content) -> None:
        self._written = Coverage()
        self.manager.content = content
        self.manager.note_foreign_load(content is Content.VALID)
        self._epoch = self.manager.epoch

    def _forget_outdated(self) -> None:
        if self._epoch != self.manager.epoch:  # discarded or updated by other means since the last load
            self._written = Coverage()

    def _is_complete(self) -> bool:
        return all(
            not parameter.is_meta and self._written.fraction(parameter) == 1 for parameter in self._model.parameters()
        )
