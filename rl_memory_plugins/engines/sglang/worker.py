"""The memory of a scheduler's process: regions in place of SGLang's memory saver, and the agent of the rank."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from rl_memory_plugins.config import RLMemoryConfig
from rl_memory_plugins.engines import post_load
from rl_memory_plugins.engines.communicators import count_as_nccl, note_custom_all_reduce
from rl_memory_plugins.engines.layer_reload import LayerReload, made_once, reset
from rl_memory_plugins.engines.rank_builder import build_agent, build_manager, resident_graphs
from rl_memory_plugins.engines.sglang import draft, nccl_suspend
from rl_memory_plugins.engines.sglang.derived_caches import DerivedCaches
from rl_memory_plugins.engines.sglang.options import launching
from rl_memory_plugins.engines.sglang.registered_memory import RegisteredMemory
from rl_memory_plugins.errors import UnsupportedError, unsupported
from rl_memory_plugins.hooking import Hooks
from rl_memory_plugins.memory.allocator import Allocator, Block
from rl_memory_plugins.memory.arena import PagedArena
from rl_memory_plugins.memory.select import choose_allocator
from rl_memory_plugins.tags import Tag
from rl_memory_plugins.weights.adapters import AdapterSlots
from rl_memory_plugins.weights.checkpoint_files import EngineCheckpoint
from rl_memory_plugins.weights.names import parameter_blocks

if TYPE_CHECKING:
    import torch
from torch.distributed.tensor import DTensor

#: SGLang's names of regions. A region of any other name holds run-time state and stays resident.
TAGS = {"weights": Tag.WEIGHTS, "kv_cache": Tag.KV_CACHE}
_memory: Memory | None = None


def install(hooks: Hooks) -> None:
    hooks.wrap("sglang.srt.utils.torch_memory_saver_adapter:TorchMemorySaverAdapter.create", _create)
    hooks.wrap("sglang.srt.model_loader.loader:_initialize_model", _initialize_model)
    communicators = "sglang.srt.distributed.device_communicators"
    hooks.wrap(f"{communicators}.pynccl:PyNcclCommunicator.__init__", count_as_nccl)
    hooks.wrap(f"{communicators}.custom_all_reduce:CustomAllreduce.__init__", note_custom_all_reduce)
    hooks.wrap(f"{communicators}.custom_all_reduce_v2:CustomAllReduceV2.__init__", note_custom_all_reduce)


class Memory:
    """The allocator of this process, made at the first region, because the device is known only then.

    Args:
        config: The engine's options.
        place: Gives torch's name of the device, and the number of this process among all schedulers.
        server_args: SGLang's own options.
    """

    def __init__(self, config: RLMemoryConfig, place: Callable[[], tuple[str, int]], server_args: Any) -> None:
        self.config = config
        self.resident_graphs = ""
        self.registered = RegisteredMemory()
        self._place = place
        self._server_args = server_args
        self._checkpoint = server_args.model_path, server_args.revision  # SGLang's own updates change these

    @functools.cached_property
    def chosen(self) -> tuple[Allocator, PagedArena]:
        import torch

        device, rank = self._place()
        return choose_allocator(self.config, torch.device(device), rank, serves=True)

    @property
    def allocator(self) -> Allocator:
        return self.chosen[0]

    def region(self, tag: Tag) -> AbstractContextManager[None]:
        if tag is Tag.WEIGHTS and self.allocator.name != "host":
            self.resident_graphs = self._capture_graphs_in_a_region()
        return self.allocator.region(tag)

    def checkpoint(self) -> tuple[str, str | None]:
        """The folder or name of the model that the engine was started with, and its revision."""
        return self._checkpoint

    def has_graphs(self) -> bool:
        """Whether compiled code or CUDA graphs refer to the weights by address."""
        if getattr(self._server_args, "enable_torch_compile", False):
            return True
        if self.allocator.name == "host":
            return False
        try:
            from sglang.srt.model_executor.cuda_graph_config import cuda_graph_fully_disabled
        except ImportError:  # older releases
            return not getattr(self._server_args, "disable_cuda_graph", False)
        return not cuda_graph_fully_disabled()

    @property
    def notes(self) -> list[str]:
        return [f"CUDA graphs stay resident: {self.resident_graphs}"] if self.resident_graphs else []

    def _capture_graphs_in_a_region(self) -> str:
        """Make SGLang capture its graphs into a pausable pool. Returns why that is not safe; empty if it is done."""
        allocator: Any = self.allocator
        custom = self._server_args.tp_size > 1 and not self._server_args.disable_custom_all_reduce
        why = resident_graphs(allocator, custom_all_reduce=custom)
        if why:
            return why
        try:
            from sglang.srt.model_executor.runner_utils import pool
        except ImportError:
            return "this version of SGLang has no pool that all its graphs share"
        pool.set_global_graph_memory_pool(allocator.pool_id(Tag.CUDA_GRAPH))
        return ""


def prepare(memory: Memory) -> None:
    """Set the memory of this process, before the engine makes a region."""
    global _memory
    _memory = memory


def config() -> RLMemoryConfig | None:
    """The options of this process's engine; `None` if it is not enabled."""
    return None if _memory is None else _memory.config


def registered() -> RegisteredMemory | None:
    """The registered memory of this process; `None` if its engine is not enabled."""
    return None if _memory is None else _memory.registered


def _create(original: Callable[..., Any]) -> Callable[..., Any]:
    def create(enable: bool) -> Any:
        if _memory is not None:
            return RegionAdapter(_memory, enable)
        if launching():  # the process that starts the schedulers
            return RegionAdapter(None, enable)
        return original(enable)

    return create


def _initialize_model(original: Callable[..., Any]) -> Callable[..., Any]:
    """Watch the post-load steps of each model that SGLang makes."""

    def _initialize_model(model_config: Any, load_config: Any, *args: Any, **kwargs: Any) -> Any:
        model = original(model_config, load_config, *args, **kwargs)
        if _memory is not None:
            post_load.attach(model, templates=True, dummy=str(load_config.load_format).lower().endswith("dummy"))
        return model

    return _initialize_model


class RegionAdapter:
    """Replaces SGLang's `TorchMemorySaverAdapter`. The manager pauses and resumes its memory.

    Args:
        memory: None in a process that owns no device.
        enabled: SGLang's own argument. Graph backends read it, and some refuse to start when it is true.
    """

    def __init__(self, memory: Memory | None, enabled: bool) -> None:
        self._memory = memory
        self.enabled = enabled

    def check_validity(self, caller_name: str) -> None:
        pass

    def configure_subprocess(self) -> AbstractContextManager[None]:
        return nullcontext()

    def region(self, tag: str, enable_cpu_backup: bool = False) -> AbstractContextManager[None]:
        ours = TAGS.get(tag)
        if ours is None or self._memory is None:
            return nullcontext()
        return self._memory.region(ours)

    def cuda_graph(self, cuda_graph: Any, **kwargs: Any) -> AbstractContextManager[None]:
        import torch

        graph_arguments = {name: kwargs[name] for name in ("pool", "stream") if name in kwargs}
        return torch.cuda.graph(cuda_graph, **graph_arguments)  # type: ignore[no-any-return]

    def disable(self) -> AbstractContextManager[None]:
        return nullcontext()

    def pause(self, tag: str) -> None:
        raise RuntimeError("the controller of rl_memory pauses and resumes this memory")

    resume = pause


def derived_weights_error(model: torch.nn.Module) -> str | None:
    """Why SGLang itself refuses to update the model, in its own words; `None` if it does not. New in 0.5.17."""
    try:
        from sglang.srt.model_executor.model_runner_components import weight_updater
    except ModuleNotFoundError:  # SGLang 0.5.15.post1 has no such package
        return None
    ask = getattr(weight_updater, "_unsupported_derived_weight_cache_error", None)
    if ask is None:
        return None
    message: str | None = ask(model) if inspect.signature(ask).parameters else ask()
    return message


class SglangWorker:
    """One rank's manager, receiver and agent.

    Args:
        model: The target model. Every sleep preserves the weights of a draft model.
        rank: The rank within its engine.
        adapters: Gives the adapters of the engine.
        drafts: The model runners of the draft model, see `draft.runners_of`.
        draft_copies: See `draft.has_copies`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        memory: Memory,
        config: RLMemoryConfig,
        rank: int,
        adapters: Callable[[], AdapterSlots] | None = None,
        drafts: Sequence[Any] = (),
        draft_copies: bool = False,
    ) -> None:
        if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            # `TorchNativeLlamaForCausalLM` over several ranks, whose parameters become DTensors after the load
            raise unsupported("weights that torch splits over ranks", "their memory is not in the engine's regions")
        self._model, caches = model, DerivedCaches(model)
        self._allocator = memory.allocator
        self._graphs = memory.has_graphs
        self.draft_copies = draft_copies
        self.manager = build_manager(config, rank, memory.chosen, self._discardable, memory.notes)
        self.agent = build_agent(
            config,
            self.manager,
            lambda: model,
            load_weights=model.load_weights,
            reload=lambda: self._reload(model),
            model_config=lambda: getattr(model, "config", None),
            checkpoint=EngineCheckpoint(memory.checkpoint),
            draft=draft.of(drafts, self._reload, memory.checkpoint, draft_copies),
            adapters=adapters,
            derive=lambda plan: caches.derive_again(),
            unfilled=self.unfilled,
            dummy=post_load.has_dummy_weights,
            resident_graphs=memory.resident_graphs,
            calls=nccl_suspend.calls(config),
            before_sleep=lambda tags: memory.registered.suspend() if Tag.WEIGHTS in tags else None,
            after_wake=lambda tags: memory.registered.resume() if Tag.WEIGHTS in tags else None,
        )

    def region(self) -> AbstractContextManager[None]:
        """The region for code that makes new weights."""
        return self._allocator.region(Tag.WEIGHTS)

    def unfilled(self) -> list[str]:
        """The parameters of layers that SGLang transforms which its first load left as they were."""
        watch = post_load.of(self._model)
        return [] if watch is None else watch.unfilled()

    def reset_unfilled(self, keep: Set[str]) -> set[str]:
        """Give the layers of `unfilled` parameters the state of a first load. Those with a kept one stay as they are.

        Returns: the names of the parameters that hold their first values now.
        """
        watch = post_load.of(self._model)
        return set() if watch is None else reset(watch, {*watch.unfilled()} - keep, graphs=self._graphs())

    def _reload(self, model: torch.nn.Module) -> LayerReload | None:
        """The reload of a model's layers that SGLang has transformed after loading; `None` if there are none.

        Raises:
            UnsupportedError: no update can reach the weights.
        """
        derived = derived_weights_error(model)
        if derived is not None:
            raise UnsupportedError(derived)
        watch = post_load.of(model)
        if watch is None:
            raise UnsupportedError(
                "this load format hides from the plugin whether SGLang transforms weights after loading them"
            )
        layers = watch.transformed()
        if not layers:
            return None
        graphs = self._graphs()
        return made_once(
            watch, layers, lambda: LayerReload(watch, layers, model.load_weights, engine="SGLang", graphs=graphs)
        )

    def _discardable(self, tag: str) -> Iterable[Block]:
        if tag == Tag.KV_CACHE:  # SGLang keeps nothing of this region over a release
            return self._allocator.blocks(tag)
        return parameter_blocks(self._model)
