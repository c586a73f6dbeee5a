"""Loads by others: through the model's `load_weights`, and by vLLM's own updates in several calls.

The calls are `start_weight_update`, `update_weights` and `finish_weight_update`. At the start vLLM moves the parameters
to the meta device, or leaves them to be written in place, call by call. Either way nothing may be generated until the
finish, and a trainer that dies in between must not leave the model like that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from rl_memory_plugins.memory.manager import MemoryManager
from rl_memory_plugins.weights.engine_updates import EngineUpdates

if TYPE_CHECKING:
    import torch

UPDATE_METHODS = ("start_weight_update", "update_weights", "finish_weight_update")

DRAFT_METHOD = "start_draft_weight_update"

#: vLLM's transfer backends that write through the model's `load_weights` alone, where the writes are recorded.
RECORDED = ("nccl", "ipc", "sparse_nccl")

#: Its backends that write parameters by NCCL or in threads of their own, always those of the whole model.
WHOLE = ("nccl_m2n", "sharded_rdt")


class WatchedLoads(EngineUpdates):
    """Watches a model's `load_weights`, by wrapping it on the instance.

    Args:
        manager: Of the rank.
        model: Its `load_weights` takes (name, tensor) pairs.
        undo: Restores the layers that vLLM has taken apart for a load that breaks off.
    """

    def __init__(self, manager: MemoryManager, model: torch.nn.Module, undo: Callable[[], None]) -> None:
        super().__init__(manager, model.parameters, undo)
        self.original: Callable[[Iterable[tuple[str, torch.Tensor]]], Any] = model.load_weights
        model.load_weights = self._load_weights

    def _load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], *args: Any, **kwargs: Any) -> Any:
        with self.watch():
            return self.original(weights, *args, **kwargs)


def loads_of(model: Any) -> WatchedLoads | None:
    """The watch over a model, if it has one."""
    loads = getattr(getattr(model, "load_weights", None), "__self__", None)
    return loads if isinstance(loads, WatchedLoads) else None


class UpdateSession:
    """Put in front of one worker's methods.

    An update of a draft model closes the engine as well, for the draft's parameters are on the meta device. What the
    weights are worth does not depend on it: a draft that is out of step costs acceptance, and no answer is wrong.

    Args:
        worker: vLLM's.
        loads: Of the worker's model.
    """

    def __init__(self, worker: Any, loads: Callable[[], WatchedLoads]) -> None:
        self._worker = worker
        self._loads = loads
        self._has_updated = False  # a call of the open update has succeeded
        for name, wrap in zip(UPDATE_METHODS, (self._start, self._update, self._finish), strict=True):
            setattr(worker, name, wrap(getattr(worker, name)))
        if hasattr(worker, DRAFT_METHOD):  # not in every version
            setattr(worker, DRAFT_METHOD, self._start(getattr(worker, DRAFT_METHOD)))

    def abandon(self) -> None:
        """Somebody else updates the weights: what is still open ends here."""
        if self._loads().is_open:
            self._worker._weight_update_active = False
            self._worker.weight_transfer_engine.reset_weight_update_target()
        self._loads().break_off()

    @property
    def _is_of_draft(self) -> bool:
        return bool(getattr(self._worker, "_weight_update_is_draft", False))

    @property
    def _backend(self) -> str:
        config = self._worker.vllm_config.weight_transfer_config
        return RECORDED[0] if config is None else str(config.backend)

    def _start(self, original: Callable[[], None]) -> Callable[[], None]:
        def start_weight_update() -> None:
            self._loads().manager.require_writable()
            if self._worker._weight_update_active:
                return original()  # which refuses
            self.abandon()  # what vLLM took for over has left the model in pieces
            try:
                original()
            except BaseException:
                self.abandon()
                raise
            self._loads().begin()
            self._has_updated = False
            return None

        return start_weight_update

    def _update(self, original: Callable[..., None]) -> Callable[..., None]:
        def update_weights(*args: Any, **kwargs: Any) -> None:
            is_open = self._loads().is_open and self._worker._weight_update_active
            if is_open and not self._is_of_draft and self._backend not in RECORDED:
                self._loads().assume_written()
            try:
                original(*args, **kwargs)
            except BaseException:
                if self._loads().is_open and not self._worker._weight_update_active:  # over, says vLLM
                    self._loads().break_off()
                raise
            self._has_updated = True

        return update_weights

    def _finish(self, original: Callable[[], None]) -> Callable[[], None]:
        def finish_weight_update() -> None:
            try:
                original()
            except BaseException:
                if self._loads().is_open:  # half of it is done, which another try would take for all
                    if not self._is_of_draft:
                        self._loads().manager.tear()
                    self.abandon()
                raise
            is_whole = self._has_updated and not self._is_of_draft and self._backend in WHOLE
            self._loads().end(complete=is_whole)

        return finish_weight_update
