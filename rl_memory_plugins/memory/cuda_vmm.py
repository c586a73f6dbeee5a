"""Pausable regions on CUDA through the driver's virtual memory management: transactional, in pure Python.

torch asks for memory in segments of at least 2 MiB, and each becomes one block: an address range reserved for
good, and physical memory mapped behind it that comes and goes. How this meets torch, and why:

- torch calls `malloc` through ctypes, which takes the GIL. torch's own rule is "GIL before allocator lock", so
  the allocator must not hold its lock then: `release_lock_on_cudamalloc` is switched on for the process.
- torch calls `free` under its lock and perhaps after Python is gone, so no Python may run there. The driver's
  `cuMemUnmap(address, size)` has the very signature: it is the free function. A block's handle is released once
  it is mapped, so unmapping alone gives the memory back, and on a block that sleeps it does nothing.
- A pool is held while anything in it lives, so torch frees none of its segments by itself. Segments that hold
  no tensor any more are given back here, when their region closes, and are not restored by a wake. Their pool
  is retired, which means no region uses it again: torch would hand the same segments out once more.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from rl_memory_plugins.errors import DeviceMemoryError, UnsupportedError
from rl_memory_plugins.memory.allocator import Block
from rl_memory_plugins.memory.cuda_device import CudaDevice
from rl_memory_plugins.memory.cuda_driver import Driver, address_of_function
from rl_memory_plugins.memory.regions import RegionStack, keep_forever
from rl_memory_plugins.memory.residual import ResidualMemory
from rl_memory_plugins.memory.segments import Segments, pool_key
from rl_memory_plugins.memory.torch_settings import set_torch_option, torch_options
from rl_memory_plugins.tags import Tag

logger = logging.getLogger(__name__)

#: What is used of torch that torch does not document, or that old versions lack: checked at start-up.
TORCH_SYMBOLS = (
    "_C._cuda_customAllocator",
    "cuda.MemPool",
    "cuda.MemPool.id",
    "cuda.use_mem_pool",
    "cuda.memory._snapshot",
)

_MALLOC = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)


class _Mapping:
    """A block and whether physical memory is behind it."""

    __slots__ = ("address", "mapped", "nbytes")

    def __init__(self, address: int, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes
        self.mapped = True


class CudaVmmAllocator:
    """Pausable regions of one GPU.

    Args:
        index: torch's ordinal of the GPU.
        margin_bytes: Device memory that a reservation leaves free.

    Raises:
        UnsupportedError: this cannot work with the torch, driver or settings at hand; says why.
    """

    name = "vmm"
    maps_zeroed = True  # NVIDIA's driver scrubs what is freed, which no document promises: tests/gpu checks it

    def __init__(self, index: int, margin_bytes: int = 0) -> None:
        require_torch_symbols()
        self.index = index
        self.device = CudaDevice(index)
        self._margin_bytes = margin_bytes
        self._driver = Driver(index)
        self._lock = threading.Lock()  # guards the fields below; never held while torch is called
        self._mappings: dict[Tag, dict[int, _Mapping]] = {tag: {} for tag in Tag}
        self._idle_pools: dict[Tag, list[torch.cuda.MemPool]] = {tag: [] for tag in Tag}
        self._retired_pools: dict[Tag, list[torch.cuda.MemPool]] = {tag: [] for tag in Tag}
        self._graph_pools: dict[Tag, torch.cuda.MemPool] = {}
        self._holds = dict.fromkeys(Tag, 0)
        self._segments = Segments(index)
        self._regions = RegionStack()
        self._region_lock = threading.Lock()  # guards the three below
        self._open_regions = 0
        self._regions_entered = 0
        self._known_unused: dict[Tag, list[Block]] = {}
        self._residual = ResidualMemory(index)
        self._malloc_callbacks = {tag: _MALLOC(self._malloc_for(tag)) for tag in Tag}
        self._torch_allocators = {
            tag: torch._C._cuda_customAllocator(address_of_function(callback), self._driver.unmap_address)
            for tag, callback in self._malloc_callbacks.items()
        }
        keep_forever(self)  # and with it all callbacks, allocators and pools
        set_torch_option("release_lock_on_cudamalloc", True)
        self._require_torch_to_use_us()

    # -- regions ------------------------------------------------------------------------------------------

    @contextmanager
    def region(self, tag: Tag) -> Iterator[None]:
        """Allocations that this thread makes inside belong to `tag`. Regions nest; the inner one wins.

        A CUDA graph that is captured inside uses a pool of its own unless it is given `pool_id(tag)`.
        """
        with self._region_lock:
            self._open_regions += 1
            self._regions_entered += 1
            self._known_unused.clear()
        try:
            pool = self._take_pool(tag)
            try:
                with self._regions.enter(lambda: torch.cuda.use_mem_pool(pool, self.index)):
                    yield
            finally:
                self._return_pool(tag, pool)
        finally:
            with self._region_lock:
                self._open_regions -= 1

    def pool_id(self, tag: Tag = Tag.CUDA_GRAPH) -> tuple[int, int]:
        """A pool for `torch.cuda.graph(pool=…)`; whatever is captured into it belongs to `tag`.

        All of it is preserved and restored, also what torch counts as unused: a graph's temporaries are.
        """
        pool = self._graph_pools.get(tag)
        if pool is None:
            pool = self._graph_pools[tag] = self._new_pool(tag)
        return pool_key(pool)

    def _take_pool(self, tag: Tag) -> torch.cuda.MemPool:
        with self._lock:
            if self._idle_pools[tag]:
                return self._idle_pools[tag].pop()
        return self._new_pool(tag)

    def _new_pool(self, tag: Tag) -> torch.cuda.MemPool:
        with torch.cuda.device(self.index):
            return torch.cuda.MemPool(self._torch_allocators[tag])

    def _return_pool(self, tag: Tag, pool: torch.cuda.MemPool) -> None:
        """Keep the pool for the tag's next region if it is all in use, and give back what of the tag is not."""
        capturing = torch.cuda.is_current_stream_capturing()
        whole = capturing or not self._unused(tag, [pool])
        with self._lock:
            whole = whole and all(mapping.mapped for mapping in self._mappings[tag].values())
            (self._idle_pools if whole else self._retired_pools)[tag].append(pool)
        if not capturing:  # giving back waits for the device
            self.forget_freed(tag)

    def forget_freed(self, tag: Tag) -> set[int]:
        """Strike out the blocks of retired pools that hold no tensor any more; returns their addresses.

        While the tag is held this is left to the next call.
        """
        unused = self._unused(tag, self._retired_pools[tag])
        if not unused:
            return unused
        torch.cuda.synchronize(self.index)
        with self._lock, self._driver.context():
            if self._holds[tag]:
                return set()
            for address in unused:
                mapping = self._mappings[tag].pop(address, None)  # another thread may have been faster
                if mapping is not None and mapping.mapped:
                    self._driver.unmap(address, mapping.nbytes)
        return unused

    def _unused(self, tag: Tag, pools: Iterable[torch.cuda.MemPool]) -> set[int]:
        """The addresses of those blocks in the pools that hold no tensor; none for CUDA graphs."""
        if tag is Tag.CUDA_GRAPH:
            return set()
        segments = self._segments.of(list(pools))
        with self._lock:
            return {
                segment.address
                for segment in segments
                if not segment.active_bytes and segment.address in self._mappings[tag]
            }

    def _drop_empty_pools(self, tag: Tag) -> None:
        """Let torch forget the retired pools that have no block left, and give their addresses back.

        torch ends the process if a pool goes while an allocation to any pool is being recorded: this is done
        only between sleep and wake, when no graph is captured, and while no region is open.
        """
        with self._region_lock:
            if self._open_regions:
                return
            with self._lock:
                retired, self._retired_pools[tag] = self._retired_pools[tag], []
            kept, gone = [], []
            by_pool = self._segments.by_pool()
            while retired:
                pool = retired.pop()
                segments = by_pool.get(pool_key(pool), [])
                with self._lock:
                    empty = not any(segment.address in self._mappings[tag] for segment in segments)
                if empty:
                    gone += segments
                else:
                    kept.append(pool)
                del pool  # torch frees its segments; there is no memory behind them, so that does nothing
            with self._lock:
                self._retired_pools[tag] += kept
            known = self._segments.read() if gone else set()
            for segment in gone:
                if segment.address not in known:
                    self._driver.free_address(segment.address, segment.nbytes)

    def _malloc_for(self, tag: Tag) -> Callable[[int, int, int | None], int | None]:
        mappings, lock, driver, index = self._mappings[tag], self._lock, self._driver, self.index

        def malloc(nbytes: int, device: int, stream: int | None) -> int | None:
            try:
                if device != index or nbytes % driver.granularity:
                    logger.error("a region of GPU %d was asked for %d bytes on GPU %d", index, nbytes, device)
                    return None
                address = driver.allocate(nbytes)
                if address is not None:
                    with lock:
                        mappings[address] = _Mapping(address, nbytes)
                return address
            except BaseException:  # nothing may leave a callback; torch reports null as out of memory
                logger.exception("allocating %d bytes for %s failed", nbytes, tag)
                return None

        return malloc

    # -- the protocol -------------------------------------------------------------------------------------

    def blocks(self, tag: Tag) -> list[Block]:
        return [Block(mapping.address, mapping.nbytes) for mapping in self._live(tag)]

    def unused(self, tag: Tag) -> list[Block]:
        """What is unused stays so until a region is entered, for only there do tensors come into these pools: torch,
        which takes some milliseconds to say it, is not asked at every sleep."""
        with self._region_lock:
            entered, known = self._regions_entered, self._known_unused.get(tag)
            none_open = not self._open_regions
        if known is not None:
            return known
        with self._lock:
            pools = [*self._idle_pools[tag], *self._retired_pools[tag]]  # not those of regions that are open
        unused = [block for segment in self._segments.of(pools) for block in segment.unused]
        with self._region_lock:
            if none_open and entered == self._regions_entered:
                self._known_unused[tag] = unused
        return unused

    @contextmanager
    def held(self, tag: Tag) -> Iterator[list[Block]]:
        with self._lock:
            self._holds[tag] += 1
        try:
            yield self.blocks(tag)
        finally:
            with self._lock:
                self._holds[tag] -= 1

    def residual_memory(self) -> dict[str, int]:
        with self._lock:
            pools = [*self._graph_pools.values()]
            for tag in Tag:
                pools += self._idle_pools[tag] + self._retired_pools[tag]
            resident = sum(m.nbytes for mappings in self._mappings.values() for m in mappings.values() if m.mapped)
        return self._residual(self._segments.by_pool(), {pool_key(pool) for pool in pools}, resident)

    def _live(self, tag: Tag) -> list[_Mapping]:
        with self._lock, self._driver.context():
            for address, mapping in list(self._mappings[tag].items()):
                if mapping.mapped and not self._driver.is_mapped(address):  # torch has freed it
                    del self._mappings[tag][address]
            return [mapping for _, mapping in sorted(self._mappings[tag].items())]

    def release(self, tag: Tag) -> int:
        released = 0
        mapped = [mapping for mapping in self._live(tag) if mapping.mapped]
        with self._lock, self._driver.context():
            # torch takes unused parts of their blocks for memory that it may hand out
            self._retired_pools[tag] += self._idle_pools[tag]
            self._idle_pools[tag].clear()
            for mapping in mapped:
                self._driver.unmap(mapping.address, mapping.nbytes)
                mapping.mapped = False
                released += mapping.nbytes
        return released

    def reclaim(self) -> None:
        self._driver.reclaim()
        self._segments.by_pool()  # the next wake finds it read

    def reserve(self, tag: Tag) -> VmmReservation:
        self.forget_freed(tag)
        self._drop_empty_pools(tag)
        released = [mapping for mapping in self._live(tag) if not mapping.mapped]
        return VmmReservation(self, tag, self._driver, released, self._margin_bytes)

    def close(self) -> None:
        """Give all memory back. Tensors in it must not be used any more."""
        torch.cuda.synchronize(self.index)
        for tag in Tag:
            self.release(tag)
            with self._lock:
                self._mappings[tag].clear()

    # -- start-up -----------------------------------------------------------------------------------------

    def _require_torch_to_use_us(self) -> None:
        """Allocate once and see whether torch called us: with expandable segments, some versions do not."""
        if self._probe():
            return
        if torch_options().get("expandable_segments"):
            logger.warning("expandable_segments is switched off: with it, torch ignores the allocators of pools")
            set_torch_option("expandable_segments", False)
            if self._probe():
                return
        raise UnsupportedError(
            f"torch {torch.__version__} does not allocate through custom pools here"
            f" (allocator settings: {torch_options()}): unset PYTORCH_CUDA_ALLOC_CONF and PYTORCH_ALLOC_CONF"
        )

    def _probe(self) -> bool:
        with self.region(Tag.RUNTIME):
            probe = torch.empty(1, dtype=torch.uint8, device=torch.device("cuda", self.index))
            address = probe.data_ptr()
            ours = any(block.address <= address < block.end for block in self.blocks(Tag.RUNTIME))
            del probe
        return ours


class VmmReservation:
    """Physical memory for the released blocks of one tag.

    Raises:
        DeviceMemoryError: not enough; whatever had been obtained was given back.
    """

    def __init__(
        self,
        allocator: CudaVmmAllocator,
        tag: Tag,
        driver: Driver,
        mappings: Sequence[_Mapping],
        margin_bytes: int,
    ) -> None:
        self._allocator = allocator
        self._tag = tag
        self._driver = driver
        self._handles: dict[_Mapping, Any] = {}
        self.blocks = [Block(mapping.address, mapping.nbytes) for mapping in mappings]
        self.nbytes = sum(block.nbytes for block in self.blocks)
        try:
            with driver.context():
                for mapping in mappings:
                    handle = driver.create(mapping.nbytes)
                    if handle is None:
                        raise self._out_of_memory(margin_bytes)
                    self._handles[mapping] = handle
                if mappings and driver.free_bytes() < margin_bytes:
                    raise self._out_of_memory(margin_bytes)
        except BaseException:
            self.drop()
            raise

    def _out_of_memory(self, margin_bytes: int) -> DeviceMemoryError:
        self.drop()
        free = self._driver.free_bytes()
        return DeviceMemoryError(
            f"{self.nbytes} bytes of GPU memory are needed and {margin_bytes} to spare, {free} are free",
            needed_bytes=self.nbytes,
            free_bytes=free,
            margin_bytes=margin_bytes,
        )

    def commit(self) -> None:
        freed = self._allocator.forget_freed(self._tag)
        done: list[_Mapping] = []
        with self._driver.context():
            try:
                for mapping in [mapping for mapping in self._handles if mapping.address not in freed]:
                    self._driver.map(mapping.address, mapping.nbytes, self._handles[mapping])
                    del self._handles[mapping]
                    done.append(mapping)
            except BaseException:
                for mapping in done:
                    self._driver.unmap(mapping.address, mapping.nbytes)
                raise
            else:
                for mapping in done:
                    mapping.mapped = True
            finally:
                self.drop()

    def drop(self) -> None:
        handles, self._handles = self._handles, {}
        with self._driver.context():
            for handle in handles.values():
                self._driver.release(handle)


def require_torch_symbols() -> None:
    """Check that torch has all of `TORCH_SYMBOLS`.

    Raises:
        UnsupportedError: names those it lacks.
    """
    missing = []
    for path in TORCH_SYMBOLS:
        found: Any = torch
        for part in path.split("."):
            found = getattr(found, part, None)
        if found is None:
            missing.append(f"torch.{path}")
    if missing:
        raise UnsupportedError(
            f"torch {torch.__version__} lacks {', '.join(missing)}, which allocator=vmm needs", missing=missing
        )
