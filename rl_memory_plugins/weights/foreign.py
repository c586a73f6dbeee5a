"""Weight loads that others make: trainers that call the model's own `load_weights` keep working.

Such a load cannot be announced by a manifest. It is complete once every byte of every parameter has been
written since the weights became stale; then the content is valid again, as after one of our own updates. What
a loader returns does not count: it names a fused parameter after the first of its parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rl_memory_plugins.memory.manager import MemoryManager
from rl_memory_plugins.weights.regions import Coverage
from rl_memory_plugins.weights.written import Written, recording

if TYPE_CHECKING:
    import torch


class ForeignLoads:
    """Watches `model.load_weights`, by wrapping it on the instance.

    Args:
        manager: Told of every load, and when the loads so far amount to a complete update.
        model: Its `load_weights` takes (name, tensor) pairs.
    """

    def __init__(self, manager: MemoryManager, model: torch.nn.Module) -> None:
        self.manager = manager
        self._model = model
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
        if self._epoch != self.manager.epoch:  # discarded or updated by other means since the last load
            self._written = Coverage()
        written = Written()
        broken_off = False
        try:
            with recording(written):
                yield
        except BaseException:
            broken_off = not written.touched.is_empty
            raise
        finally:
            if broken_off:  # what came before may be torn now
                self._written = Coverage()
            self._written.extend(written.anew)
            complete = self._is_complete()
            self.manager.note_foreign_load(complete, broken_off=broken_off)
            self._epoch = self.manager.epoch
            if complete or broken_off:  # the next load may bring other weights than one that broke off
                self._written = Coverage()

    def _is_complete(self) -> bool:
        return all(
            not parameter.is_meta and self._written.fraction(parameter) == 1 for parameter in self._model.parameters()
        )
