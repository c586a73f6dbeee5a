"""Watch loads through the model's `load_weights`, and vLLM's own updates in several calls.

The calls are `start_weight_update`, `update_weights` and `finish_weight_update`. The start moves the parameters to the
meta device, or leaves them in place to be written call by call. In both cases the engine must not generate before the
finish, and a trainer that dies before the finish must not leave the model in that state.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rl_memory_plugins.memory.manager import MemoryManager
from rl_memory_plugins.tags import Content
from rl_memory_plugins.weights.engine_updates import EngineUpdates
from rl_memory_plugins.weights.filled import Filled
from rl_memory_plugins.weights.write_detector import leaving_early

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

UPDATE_METHODS = ("start_weight_update", "update_weights", "finish_weight_update")

DRAFT_METHOD = "start_draft_weight_update"

#: vLLM's name of this package's own transfer backend; see `weight_transfer.py`.
BACKEND = "rl_memory"

#: vLLM's transfer backends that write only through the model's `load_weights`, where the writes are recorded.
RECORDED = ("nccl", "ipc", "sparse_nccl")


class WatchedLoads(EngineUpdates):
    """Watches the `load_weights` of a model, by a wrapper on the instance.

    Args:
        manager: The manager of the rank.
        model: A model whose `load_weights` takes (name, tensor) pairs.
        undo: Restores the layers that vLLM has taken apart for a load that breaks off.
        padding: As for `EngineUpdates`.
    """

    def __init__(
        self,
        manager: MemoryManager,
        model: torch.nn.Module,
        undo: Callable[[], None],
        padding: Callable[[], Filled] = dict,
    ) -> None:
        super().__init__(manager, model.named_parameters, undo, padding)
        self._modules = model.modules
        _all.add(self)
        self.original: Callable[[Iterable[tuple[str, torch.Tensor]]], Any] = model.load_weights
        model.load_weights = self._load_weights

    def _load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], *args: Any, **kwargs: Any) -> Any:
        with self.watch():
            return self.original(leaving_early(weights), *args, **kwargs)


_all: weakref.WeakSet[WatchedLoads] = weakref.WeakSet()


_own = False  # the reload that runs is one of this package's updates


@contextmanager
def own_reload() -> Iterator[None]:
    """The body starts a reload for an update of this package, whose completeness the load plan shows."""
    global _own
    _own = True
    try:
        yield
    finally:
        _own = False


def prepare_reload(layer: torch.nn.Module) -> None:
    """Called before vLLM puts the parameters of a layer aside, for a reload of the model to which the layer belongs."""
    for loads in () if _own else list(_all):
        if (loads.needs_marks or loads.manager.may_learn) and any(one is layer for one in loads._modules()):
            loads.prepare()


def loads_of(model: Any) -> WatchedLoads | None:
    """The `WatchedLoads` of a model; `None` if it has none."""
    loads = getattr(getattr(model, "load_weights", None), "__self__", None)
    return loads if isinstance(loads, WatchedLoads) else None


class UpdateSession:
    """Follows vLLM's own updates, by wrappers around three methods of one worker.

    An update of a draft model closes the engine too, because the parameters of the draft are on the meta device. The
    content state of the weights does not depend on the draft: a stale draft costs acceptance, but no answer is wrong.

    Args:
        worker: vLLM's worker.
        loads: Gives the `WatchedLoads` of the worker's model.
    """

    def __init__(self, worker: Any, loads: Callable[[], WatchedLoads]) -> None:
        self._worker = worker
        self._loads = loads
        for name, wrap in zip(UPDATE_METHODS, (self._start, self._update, self._finish), strict=True):
            setattr(worker, name, wrap(getattr(worker, name)))
        if hasattr(worker, DRAFT_METHOD):  # not in every version
            setattr(worker, DRAFT_METHOD, self._start(getattr(worker, DRAFT_METHOD)))

    def abandon(self) -> None:
        """End an update that is still open, because another caller updates the weights."""
        if self._loads().is_open:
            self._worker._weight_update_active = False
            self._worker.weight_transfer_engine.reset_weight_update_target()
        self._break_off()

    def settle_writes(self) -> None:
        """Wait for the writes of an open update that the backend has deferred. If they fail, the update is over."""
        if not self._loads().is_open:
            return
        engine = self._worker.weight_transfer_engine
        if not getattr(engine, "defers_processing", False):
            return
        try:
            engine.drain_pending()
        except Exception:
            logger.exception("the writes that the weight transfer had deferred have failed")
            if not self._is_of_draft:
                self._loads().assume_written()
            self._worker._weight_update_active = False
            engine.reset_weight_update_target()
            self._loads().break_off()

    def _break_off(self) -> None:
        """End the content's update, once nothing writes any more."""
        self.settle_writes()
        of_draft = self._loads().is_open and self._is_of_draft
        self._loads().break_off()
        if of_draft:
            self._loads().manager.draft.note_draft(complete=False)

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
            if self._backend == BACKEND:
                return self._start_own(original)
            if self._worker._weight_update_active:
                return original()  # vLLM refuses a second start
            self.abandon()  # vLLM counts a failed update as over, but has left the model in pieces
            try:
                original()
            except BaseException:
                self.abandon()
                raise
            self._loads().begin()
            return None

        return start_weight_update

    def _start_own(self, original: Callable[[], None]) -> None:
        """Start an update by this package's stream. It marks the content itself, from the first write on."""
        self._worker.weight_transfer_engine.agent = self._worker.rl_memory.agent
        manager = self._loads().manager
        if manager.content is Content.UPDATING:  # the last update failed on another rank, or was left open
            manager.finish_writing(complete=False)
            self._worker._weight_update_active = False
        original()

    def _update(self, original: Callable[..., None]) -> Callable[..., None]:
        def update_weights(*args: Any, **kwargs: Any) -> None:
            is_open = self._loads().is_open and self._worker._weight_update_active
            if is_open and not self._is_of_draft and self._backend not in RECORDED:
                self._loads().assume_written()
            try:
                original(*args, **kwargs)
            except BaseException:
                if self._loads().is_open and not self._worker._weight_update_active:  # vLLM counts the update as over
                    self._break_off()
                raise

        return update_weights

    def _finish(self, original: Callable[[], None]) -> Callable[[], None]:
        def finish_weight_update() -> None:
            try:
                original()
            except BaseException:
                if self._loads().is_open:  # a second finish would take the half that is done for all
                    if not self._is_of_draft:
                        self._loads().manager.mark_failed()
                    self.abandon()
                raise
            of_draft = self._loads().is_open and self._is_of_draft
            self._loads().end()
            if of_draft:
                self._loads().manager.draft.note_draft(complete=True)

        return finish_weight_update
