"""A scheduler process's memory: SGLang's memory saver becomes our regions, and the rank's agent is made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from rl_memory_plugins.config import RLMemoryConfig
from rl_memory_plugins.engines.sglang.switch import launching
from rl_memory_plugins.hooking import Hooks
from rl_memory_plugins.memory.allocator import Allocator, Block
from rl_memory_plugins.memory.backup import HostArena
from rl_memory_plugins.memory.manager import MemoryManager
from rl_memory_plugins.memory.select import choose_allocator
from rl_memory_plugins.rank import RankAgent
from rl_memory_plugins.tags import Tag
from rl_memory_plugins.weights.receiver import WeightReceiver, ignore_derived

if TYPE_CHECKING:
    import torch

#: SGLang's region names. Every other name is run-time state and stays resident.
TAGS = {"weights": Tag.WEIGHTS, "kv_cache": Tag.KV_CACHE}
GRAPHS_STAY = "CUDA graphs stay on the device: SGLang captures them outside of the regions"

_memory: Memory | None = None


def install(hooks: Hooks) -> None:
    hooks.wrap("sglang.srt.utils.torch_memory_saver_adapter:TorchMemorySaverAdapter.create", _create)


class Memory:
    """This process's allocator. It is made at the first region, when the device is known.

    Args:
        config: The engine's options.
        place: Tells torch's name of the device, and the process's number among all schedulers.
    """

    def __init__(self, config: RLMemoryConfig, place: Callable[[], tuple[str, int]]) -> None:
        self.config = config
        self._place = place
        self._chosen: tuple[Allocator, HostArena] | None = None

    def _choose(self) -> tuple[Allocator, HostArena]:
        if self._chosen is None:
            import torch

            device, rank = self._place()
            self._chosen = choose_allocator(self.config, torch.device(device), rank)
        return self._chosen

    @property
    def allocator(self) -> Allocator:
        return self._choose()[0]

    @property
    def arena(self) -> HostArena:
        return self._choose()[1]


def prepare(memory: Memory) -> None:
    """Say what the regions of this process are to use, before the engine makes any."""
    global _memory
    _memory = memory


def config() -> RLMemoryConfig | None:
    """The options of this process's engine; `None` if it is not enabled."""
    return None if _memory is None else _memory.config


def _create(original: Callable[..., Any]) -> Callable[..., Any]:
    def create(enable: bool) -> Any:
        if _memory is not None:
            return RegionAdapter(_memory)
        if launching():  # the process that starts the schedulers
            return RegionAdapter(None)
        return original(enable)

    return create


class RegionAdapter:
    """Takes the place of SGLang's `TorchMemorySaverAdapter`. `pause` and `resume` are the manager's affair."""

    enabled = True

    def __init__(self, memory: Memory | None) -> None:
        self._memory = memory

    def check_validity(self, caller_name: str) -> None:
        pass

    def configure_subprocess(self) -> AbstractContextManager[None]:
        return nullcontext()

    def region(self, tag: str, enable_cpu_backup: bool = False) -> AbstractContextManager[None]:
        ours = TAGS.get(tag)
        if ours is None or self._memory is None:
            return nullcontext()
        return self._memory.allocator.region(ours)

    @contextmanager
    def cuda_graph(self, cuda_graph: Any, **kwargs: Any) -> Iterator[None]:
        import torch

        graph_arguments = {name: kwargs[name] for name in ("pool", "stream") if name in kwargs}
        with torch.cuda.graph(cuda_graph, **graph_arguments):
            yield

    def disable(self) -> AbstractContextManager[None]:
        return nullcontext()

    def pause(self, tag: str) -> None:
        raise RuntimeError("memory is released by rl_memory's controller")

    resume = pause


class SglangWorker:
    """One rank's manager, receiver and agent.

    Args:
        model: The target model. Draft models' weights count as run-time state: they are always preserved.
        rank: The rank within its engine.
    """

    def __init__(self, model: torch.nn.Module, memory: Memory, config: RLMemoryConfig, rank: int) -> None:
        self._model = model
        self._allocator = memory.allocator
        self.manager = MemoryManager(
            rank,
            memory.allocator,
            memory.arena,
            self._discardable,
            poison=config.poison,
            zero_on_wake=(Tag.KV_CACHE,),  # the table of requests and the padding rows must read as zeros
            notes=() if memory.allocator.name == "host" else (GRAPHS_STAY,),
        )
        receiver = WeightReceiver(
            self.manager,
            load_weights=model.load_weights,
            parameters=self.parameters,
            ignorable=self._ignorable,
            allow_cast=config.allow_cast,
            check_finite=config.check_finite,
        )
        self.agent = RankAgent(self.manager, receiver)
        self.manager.warm_up()

    def region(self) -> AbstractContextManager[None]:
        """For code that makes weights anew."""
        return self._allocator.region(Tag.WEIGHTS)

    def parameters(self) -> dict[str, torch.Tensor]:
        return dict(self._model.named_parameters())

    def _ignorable(self, name: str) -> bool:
        """Names of a checkpoint that the loader skips on purpose."""
        if ignore_derived(name):
            return True
        tied = bool(getattr(getattr(self._model, "config", None), "tie_word_embeddings", False))
        return tied and name.startswith("lm_head.")

    def _discardable(self, tag: Tag) -> Iterable[Block]:
        if tag is Tag.KV_CACHE:  # SGLang itself keeps nothing of this region
            return self._allocator.blocks(tag)
        storages = (tensor.untyped_storage() for tensor in self._model.parameters())
        return [Block(storage.data_ptr(), storage.nbytes()) for storage in storages]
