"""The hooks of a worker: regions in place of vLLM's memory pools, and the agent that answers the engine core."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from rl_memory_plugins.config import RLMemoryConfig
from rl_memory_plugins.engines.communicators import count_as_nccl, note_custom_all_reduce
from rl_memory_plugins.engines.rank_builder import build_agent, build_manager
from rl_memory_plugins.engines.vllm import draft, first_load, modes, nccl_suspend, reload
from rl_memory_plugins.engines.vllm.adapters import VllmAdapters
from rl_memory_plugins.engines.vllm.attention import AttentionSteps
from rl_memory_plugins.engines.vllm.capabilities import resident_graphs
from rl_memory_plugins.engines.vllm.first_load import enabled_load
from rl_memory_plugins.engines.vllm.native_allocator import NativeAllocator, stand_in
from rl_memory_plugins.engines.vllm.options import config_of
from rl_memory_plugins.engines.vllm.update_session import (
    BACKEND,
    UPDATE_METHODS,
    UpdateSession,
    WatchedLoads,
    loads_of,
    prepare_reload,
)
from rl_memory_plugins.errors import UnsupportedError
from rl_memory_plugins.hooking import Hooks
from rl_memory_plugins.memory.allocator import Block
from rl_memory_plugins.memory.fingerprint import memory_view
from rl_memory_plugins.memory.manager import MemoryManager
from rl_memory_plugins.memory.ranges import merge, subtract
from rl_memory_plugins.memory.select import choose_allocator
from rl_memory_plugins.rank import RankAgent
from rl_memory_plugins.records import WeightsStatus
from rl_memory_plugins.tags import Tag
from rl_memory_plugins.weights.checkpoint_files import EngineCheckpoint
from rl_memory_plugins.weights.model_loader import Reload
from rl_memory_plugins.weights.names import parameter_blocks

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

#: vLLM's names of pools. A pool of any other name holds run-time state and stays resident.
TAGS = {"weights": Tag.WEIGHTS, "kv_cache": Tag.KV_CACHE}


def install(hooks: Hooks) -> None:
    hooks.wrap("vllm.v1.worker.worker_base:WorkerBase.__init__", _init)
    hooks.wrap(
        "vllm.model_executor.model_loader.reload.layerwise:finalize_layerwise_processing", _finish_layerwise_load
    )
    factory = hooks.require("vllm.distributed.weight_transfer.factory:WeightTransferEngineFactory")
    # In releases before 0.25 the worker takes the model apart for every backend, before its engine is asked.
    in_place = hasattr(
        hooks.require("vllm.distributed.weight_transfer.base:WeightTransferEngine"), "start_weight_update"
    )
    if in_place and BACKEND not in factory._registry:
        factory.register_engine(BACKEND, "rl_memory_plugins.engines.vllm.weight_transfer", "RLMemoryTransferEngine")
    hooks.wrap("vllm.model_executor.model_loader.reload.layerwise:restore_layer_on_meta", _put_aside)
    for symbol in reload.SYMBOLS:
        hooks.require(symbol)
    communicators = "vllm.distributed.device_communicators"
    hooks.wrap(f"{communicators}.pynccl:PyNcclCommunicator.__init__", count_as_nccl)
    hooks.wrap(f"{communicators}.custom_all_reduce:CustomAllreduce.__init__", note_custom_all_reduce)
    for name in ("_maybe_get_memory_pool_context", "compile_or_warm_up_model", "execute_dummy_batch", *UPDATE_METHODS):
        hooks.require(f"vllm.v1.worker.gpu_worker:Worker.{name}")
    base = hooks.require("vllm.v1.worker.worker_base:WorkerBase")
    base.rl_memory_rank_call = _rank_call


def _init(original: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, vllm_config, *args, **kwargs)
        config = config_of(vllm_config)
        stand_in(None)  # the allocator of an engine that this process had before
        if config is not None:
            # NCCL shares captured buffers with other ranks, and a sleep would release that memory under them.
            os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
            VllmWorker(self, config).attach()

    return __init__


def _rank_call(worker: Any, payload: bytes) -> bytes:
    """Run a call of the controller. `collective_rpc` finds it as a method of the worker."""
    return worker.rl_memory.agent.handle(payload)  # type: ignore[no-any-return]


_guarded = False  # the current call of this worker may raise; see `call_guarded`


def call_guarded(
    worker: Any, method: str | bytes, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[bool, Any, WeightsStatus, bool]:
    """Run a method of the worker by its name, or a pickled function of the worker.

    Returns: whether the call failed; its result or the message of its error; the state of the weights;
        whether the worker has reloaded its weights.
    """
    global _guarded
    from vllm.v1.serial_utils import run_method

    _guarded = True
    try:
        failed, result = False, run_method(worker, method, args, kwargs)
    except Exception as error:
        logger.exception("%s failed on this rank", method if isinstance(method, str) else "a function")
        failed, result = True, str(error)
    finally:
        _guarded = False
    agent = worker.rl_memory.agent
    return failed, result, agent.content(), agent.has_loaded


class VllmWorker:
    """The regions, the manager and the agent of one worker. They are made when vLLM loads the weights."""

    def __init__(self, worker: Any, config: RLMemoryConfig) -> None:
        self._worker = worker
        self._config = config
        self._manager: MemoryManager | None = None
        self._agent: RankAgent | None = None
        self._watched_loads: WatchedLoads | None = None
        self._resident_graphs = ""

    def attach(self) -> None:
        """Replace the worker's own memory handling."""
        worker = self._worker
        worker.rl_memory = self
        worker._maybe_get_memory_pool_context = self.pool
        stand_in(NativeAllocator(lambda: self.manager, self.pool))
        for name in ("sleep", "wake_up", "discard"):
            setattr(worker, name, self._refuse_native(name))
        if hasattr(worker, "reset_weights"):  # new in 0.32, for tests of updates
            worker.reset_weights = self._tear_then(worker.reset_weights)
        worker.reload_weights = self._identified(worker.reload_weights)
        self._session = UpdateSession(worker, lambda: self._loads)

    def pool(self, tag: str) -> AbstractContextManager[None]:
        """Replaces `Worker._maybe_get_memory_pool_context`."""
        ours = TAGS.get(tag)
        if ours is None:
            return contextlib.nullcontext()
        if ours is Tag.WEIGHTS:
            return self._load_weights_region()
        return self.manager.allocator.region(ours)

    @contextlib.contextmanager
    def _load_weights_region(self) -> Iterator[None]:
        self._capture_graphs_in_a_region()
        with self.manager.allocator.region(Tag.WEIGHTS), enabled_load():
            yield
        self._note_steps()
        self._attention = AttentionSteps(self.model, self._worker.vllm_config)
        self._attention_of_draft = draft.attention_of(self._worker)
        self._watched_loads = WatchedLoads(
            self.manager, self.model, self._restore_layers, lambda: self.agent.receiver.padding()
        )

    def _note_steps(self) -> None:
        """Tell background work when the engine computes. A data-parallel engine without requests has dummy batches."""
        worker, pace = self._worker, self.manager.arena.pace
        runner = worker.model_runner  # with Ray nobody calls the worker's own `execute_model`
        runner.execute_model = pace.noting(runner.execute_model)
        worker.execute_dummy_batch = pace.noting(worker.execute_dummy_batch)

    def _capture_graphs_in_a_region(self) -> None:
        """Have vLLM capture its graphs into a pausable pool, or declare why that is not safe."""
        allocator: Any = self.manager.allocator
        self._resident_graphs = resident_graphs(allocator, self._worker.parallel_config)
        modes.refuse_resident_graphs(self._worker.vllm_config, self._resident_graphs)
        if not self._resident_graphs:
            self._lend_graph_pool(allocator.pool_id(Tag.CUDA_GRAPH))
        else:
            self.manager.notes.append(f"CUDA graphs stay resident: {self._resident_graphs}")

    def _lend_graph_pool(self, pool: Any) -> None:
        """Make vLLM capture into `pool` until this worker has made its captures. Later engines of this process must not
        capture into it."""
        from vllm.platforms import current_platform

        platform: Any = type(current_platform)
        former, platform._global_graph_pool = platform._global_graph_pool, pool
        capture = self._worker.compile_or_warm_up_model

        def compile_or_warm_up_model(*args: Any, **kwargs: Any) -> Any:
            try:
                return capture(*args, **kwargs)
            finally:
                platform._global_graph_pool = former

        self._worker.compile_or_warm_up_model = compile_or_warm_up_model

    @property
    def manager(self) -> MemoryManager:
        if self._manager is None:
            parallel = self._worker.parallel_config
            # Each data-parallel engine counts its own workers from 0.
            own = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
            number = parallel.data_parallel_index * own + self._worker.rank
            memory = choose_allocator(self._config, self._worker.device, number, serves=True)
            memory[1].pace.ranks = own
            self._manager = build_manager(self._config, self._worker.rank, memory, self._discardable)
        return self._manager

    @property
    def model(self) -> torch.nn.Module:
        return self._worker.model_runner.get_model()

    @property
    def agent(self) -> RankAgent:
        if self._agent is None:
            self._agent = build_agent(
                self._config,
                self.manager,
                lambda: self.model,
                load_weights=self._load_weights,
                reload=self._reload,
                model_config=lambda: self._worker.model_config.hf_config,
                checkpoint=EngineCheckpoint(self._checkpoint),
                draft=draft.of(
                    self._worker, lambda: self.manager.allocator.region(Tag.WEIGHTS), self._attention_of_draft
                ),
                derive=self._attention.repeat,
                adapters=lambda: VllmAdapters(self._worker),
                settle_writes=self._session.settle_writes,
                after_wake=self._after_wake,
                before_update=self._session.abandon,
                resident_graphs=self._resident_graphs,
                filled=self._filled,
                dummy=lambda model: self._worker.vllm_config.load_config.load_format == "dummy",
                calls={
                    **nccl_suspend.calls(self._config),
                    "clear_kv_cache": self._clear_kv_cache,
                    "drop_pooled_rows": self._drop_pooled_rows,
                },
            )
        return self._agent

    @property
    def _loads(self) -> WatchedLoads:
        assert self._watched_loads is not None
        return self._watched_loads

    def _checkpoint(self) -> tuple[str, str | None]:
        config = self._worker.model_config
        return str(getattr(config, "model_weights", "") or config.model), config.revision

    def _filled(self) -> list[str]:
        """The parameters that vLLM's loaders have filled at the start."""
        first = first_load.of(self.model)
        names = {layer: f"{name}." if name else "" for name, layer in self.model.named_modules()}
        return [] if first is None else [f"{names[layer]}{key}" for layer, key in first.filled if layer in names]

    def _restore_layers(self) -> None:
        for model in (self.model, draft.model_of(self._worker)):
            if model is not None:
                reload.restore_layers(model)

    def _load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self._worker.vllm_config):
            self._loads.original(weights)

    def _reload(self) -> Reload | None:
        """The reload of the layers that vLLM has transformed after loading; `None` if there are none."""
        return reload.reload_of(
            self.model,
            self._worker.vllm_config,
            self._loads.original,
            region=lambda: self.manager.allocator.region(Tag.WEIGHTS),
        )

    def _discardable(self, tag: str) -> Iterable[Block]:
        if tag == Tag.WEIGHTS:
            yield from parameter_blocks(self.model)
            return
        for tensor in _flatten(self._worker.model_runner.kv_caches):
            storage = tensor.untyped_storage()
            yield Block(storage.data_ptr(), storage.nbytes())

    def _clear_kv_cache(self) -> None:
        if self.manager.is_resident(Tag.KV_CACHE):
            for block in merge(self._discardable(Tag.KV_CACHE)):
                memory_view(*block).zero_()  # by all threads: the cache may have hundreds of GiB

    def _drop_pooled_rows(self, requests: list[str]) -> None:
        known = getattr(self._worker.model_runner, "requests", {})  # the second model runner makes them anew
        for request in filter(None, map(known.get, requests)):
            if (states := getattr(request, "pooling_states", None)) is not None:
                states.clean()

    def _after_wake(self, tags: list[Tag]) -> None:
        allocator = self.manager.allocator
        if Tag.KV_CACHE in tags and allocator.name == "host":  # the first and last bytes were never released
            for block in subtract(merge(self._discardable(Tag.KV_CACHE)), allocator.blocks(Tag.KV_CACHE)):
                memory_view(*block).zero_()
        # vLLM 0.26's second model runner keeps pointers into the KV cache and must read them again. The first model
        # runner would only clear the cache, and would set calibrated FP8 scales, which a sleep preserves, to 1.0. Later
        # versions need neither.
        runner = self._worker.model_runner
        refresh = getattr(runner, "post_kv_cache_wake_up", None)
        if Tag.KV_CACHE in tags and refresh is not None and not hasattr(runner, "init_fp8_kv_scales"):
            refresh()

    def _tear_then(self, reset: Callable[[], None]) -> Callable[[], None]:
        """Close the engine at vLLM's own reset, which overwrites the weights with zeros, until an update."""

        def reset_weights() -> None:
            self.agent.manager.give_up_content()  # the agent tells it which parameters no load fills
            reset()

        return reset_weights

    def _identified(self, reload: Callable[..., None]) -> Callable[..., None]:
        """Note a reload, whose weights may have another version."""

        def reload_weights(
            weights_iterator: Any = None, weights_path: str | None = None, *args: Any, **kwargs: Any
        ) -> None:
            path = self._worker.model_config.model if weights_path is None else weights_path
            source = "reload_weights" if weights_iterator is not None else f"reload_weights from {path}"
            in_place = not (args[0] if args else kwargs.get("is_checkpoint_format", True))
            epoch = self.manager.epoch
            try:
                # Weights in the format of the kernels are copied past the model's `load_weights`.
                watching = self._loads.watch() if in_place else contextlib.nullcontext()
                with self.agent.loading(source), watching:
                    reload(weights_iterator, weights_path, *args, **kwargs)
            finally:
                if self.manager.epoch == epoch:  # nothing was loaded
                    self.agent.forget_load()

        return reload_weights

    def _refuse_native(self, name: str) -> Callable[..., None]:
        """Refuse a memory method of the worker, which would bypass the other ranks and the scheduler.

        Worker extensions call it, and RPCs of the executor that bypass the engine core.
        """

        def refuse(*args: Any, **kwargs: Any) -> None:
            error = UnsupportedError(
                f"worker.{name}() cannot manage the memory of one worker while rl_memory is enabled: "
                f"call {name}() of the engine, or collective_rpc({name!r})"
            )
            parallel = self._worker.parallel_config
            if _guarded or parallel.world_size == 1 or parallel.distributed_executor_backend == "external_launcher":
                raise error
            logger.error("%s", error)  # an exception would leave the replies of other ranks in vLLM's queues

        return refuse


def _put_aside(original: Callable[..., None]) -> Callable[..., None]:
    def restore_layer_on_meta(layer: Any, *args: Any, **kwargs: Any) -> None:
        prepare_reload(layer)
        original(layer, *args, **kwargs)

    return restore_layer_on_meta


def _finish_layerwise_load(original: Callable[..., None]) -> Callable[..., None]:
    """Watch the end of vLLM's own reload, which also writes layers that the caller sent in part."""

    def finalize_layerwise_processing(model: Any, *args: Any, **kwargs: Any) -> None:
        loads = loads_of(model)
        if loads is None:
            return original(model, *args, **kwargs)
        torn = any(_is_torn(layer) for layer in model.modules())
        with loads.watch():
            original(model, *args, **kwargs)
        if torn:
            loads.manager.mark_failed()
        return None

    return finalize_layerwise_processing


def _is_torn(layer: Any) -> bool:
    """Whether vLLM is about to fill the missing parts of a layer with undefined memory."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    info = get_layerwise_info(layer)
    if not info.can_load() or not 0 < info.load_numel < info.load_numel_total:
        return False
    if isinstance(layer, VocabParallelEmbedding):  # no checkpoint holds its padding
        rows = layer.num_embeddings_per_partition
        padding = rows - layer.shard_indices.num_org_elements
        return bool(info.load_numel_total - info.load_numel > padding * (info.load_numel_total // rows))
    # Experts and quantised layers may have padding too, which only they know.
    return type(getattr(layer, "quant_method", None)) in (type(None), UnquantizedLinearMethod)


def _flatten(caches: Any) -> Iterator[torch.Tensor]:
    if isinstance(caches, dict):
        caches = caches.values()
    for cache in caches:
        if hasattr(cache, "untyped_storage"):
            yield cache
        else:
            yield from _flatten(cache)
