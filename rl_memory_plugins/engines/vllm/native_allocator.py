"""What vLLM gets on a GPU where it asks for its own sleep-mode allocator (`CuMemAllocator`): the worker's regions.

vLLM and the code of its users ask for that allocator in places that no hook covers: the memory of LoRA slots, the pool
of graphs, the bytes in use. Without a stand-in they would get an allocator that holds nothing, or would fill it beside
the regions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn

from rl_memory_plugins.errors import StateConflictError
from rl_memory_plugins.memory.allocator import Block
from rl_memory_plugins.memory.manager import MemoryManager
from rl_memory_plugins.tags import Tag

#: vLLM's names of the tags.
NAMES = {Tag.WEIGHTS: "weights", Tag.KV_CACHE: "kv_cache", Tag.CUDA_GRAPH: "cudagraph", Tag.RUNTIME: "runtime"}


class NativeAllocator:
    """Has the methods of vLLM's `CuMemAllocator`.

    Args:
        manager: The worker's memory.
        region: The worker's region for one of vLLM's names of pools.
    """

    default_tag = "default"
    allocator_and_pools: Mapping[str, Any] = {}

    def __init__(
        self, manager: Callable[[], MemoryManager], region: Callable[[str], AbstractContextManager[None]]
    ) -> None:
        self._manager = manager
        self._region = region

    @property
    def pointer_to_data(self) -> dict[int, Any]:
        """An `AllocationData` of vLLM for each block, by its address, as of now."""
        manager = self._manager()
        return {
            block.address: _allocation(NAMES[tag], block, asleep=not manager.is_resident(tag))
            for tag in NAMES
            for block in manager.allocator.blocks(tag)
        }

    def get_current_usage(self) -> int:
        """The bytes of all blocks, asleep or not, as vLLM counts them."""
        return sum(data.handle[1] for data in self.pointer_to_data.values())

    def use_memory_pool(self, tag: str | None = None) -> AbstractContextManager[None]:
        return self._region(self.default_tag if tag is None else tag)

    @contextmanager
    def cudagraph_pool(self) -> Iterator[Any]:
        """vLLM's context for a capture that a sleep may release: yields the id of the pool."""
        allocator: Any = self._manager().allocator
        yield allocator.pool_id(Tag.CUDA_GRAPH)

    def sleep(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse("sleep")

    def discard(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse("discard")

    def wake_up(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse("wake_up")

    def release_pools(self) -> None:
        """vLLM calls this at the end of the process. The regions end with their tensors."""

    close = release_pools


def stand_in(allocator: NativeAllocator | None) -> None:
    """Make vLLM find `allocator`; with `None` its own one, if it found another engine's."""
    from vllm.platforms import current_platform

    if not current_platform.is_cuda_alike():
        return
    from vllm.device_allocator.cumem import CuMemAllocator

    if allocator is not None or isinstance(CuMemAllocator.instance, NativeAllocator):
        CuMemAllocator.instance = allocator


def _allocation(tag: str, block: Block, *, asleep: bool) -> Any:
    from vllm.device_allocator import cumem

    data = cumem.AllocationData(handle=(0, block.nbytes, block.address, 0), tag=tag)
    data.is_asleep = asleep
    return data


def _refuse(what: str) -> NoReturn:
    raise StateConflictError(
        f"CuMemAllocator.{what}() would move memory without the engine's knowledge: call the engine's own {what}"
    )
