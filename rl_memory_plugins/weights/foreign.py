"""Weight loads that others make: trainers that call the model's own `load_weights` keep working.

Such a load cannot be announced by a manifest. It is complete once every parameter has been loaded since the
weights became stale; then the content is valid again, as after one of our own updates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from rl_memory_plugins.memory.manager import MemoryManager

if TYPE_CHECKING:
    import torch


class ForeignLoads:
    """Watches `model.load_weights`, by wrapping it on the instance.

    Args:
        manager: Told when the loads seen so far amount to a complete update.
        model: Its `load_weights` takes (name, tensor) pairs and returns the names of the parameters it loaded.
    """

    def __init__(self, manager: MemoryManager, model: torch.nn.Module) -> None:
        self._manager = manager
        self._model = model
        self._loaded: set[str] = set()
        self._epoch = manager.epoch
        self.original: Callable[[Iterable[tuple[str, torch.Tensor]]], Any] = model.load_weights  # type: ignore[assignment]
        model.load_weights = self._load_weights  # type: ignore[assignment]

    def _load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], *args: Any, **kwargs: Any) -> Any:
        self._manager.require_writable()
        if self._epoch != self._manager.epoch:  # discarded or updated by other means since the last load
            self._loaded.clear()
        names = self.original(weights, *args, **kwargs)  # type: ignore[call-arg]
        self._loaded.update(names or ())
        missing = {name for name, _ in self._model.named_parameters()} - self._loaded
        self._manager.note_foreign_load(complete=not missing)
        self._epoch = self._manager.epoch
        if not missing:
            self._loaded.clear()
        return names
