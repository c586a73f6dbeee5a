"""Pausable regions on CUDA through the driver's virtual memory management: transactional, in pure Python.

torch requests memory in segments of at least 2 MiB. Each segment is one block: an address range that stays reserved,
and physical memory that is unmapped by a sleep and mapped by a wake. The rules between this module and torch:

- torch calls `malloc` through ctypes, which takes the GIL. torch takes the GIL before its allocator's lock, so the
  allocator must not hold its lock during the call: `release_lock_on_cudamalloc` is switched on for the process.
- torch calls `free` under its lock, and possibly after the interpreter has ended, so `free` must not run Python. The
  driver's `cuMemUnmap(address, size)` has the right signature, and serves as `free`. A block's handle is released after
  the block is mapped, so unmapping frees the memory. On a sleeping block, unmapping does nothing.
- A pool is kept while any of its tensors lives, so torch never frees its segments by itself. When a region closes, this
  module frees the segments that hold no tensor, and a wake does not restore them. Their pool is retired: no region uses
  it again, because torch would allocate from the freed segments.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from rl_memory_plugins.errors import DeviceMemoryError, UnsupportedError
from rl_memory_plugins.memory.adoption import move_storages
from rl_memory_plugins.memory.allocator import Allocator, Block, too_little_for_wake
from rl_memory_plugins.memory.cuda_device import CudaDevice
from rl_memory_plugins.memory.cuda_driver import Driver, address_of_function
from rl_memory_plugins.memory.interrupts import to_its_end
from rl_memory_plugins.memory.regions import keep_forever, regions_of
from rl_memory_plugins.memory.residual import ResidualMemory
from rl_memory_plugins.memory.segments import Segments, pool_key
from rl_memory_plugins.memory.torch_settings import has_torch_option, missing_symbols, set_torch_option, torch_options
from rl_memory_plugins.tags import Tag

logger = logging.getLogger(__name__)

#: Symbols of torch that are undocumented or missing in old versions. The start checks them.
TORCH_SYMBOLS = (
    "_C._cuda_customAllocator",
    "cuda.MemPool",
    "cuda.MemPool.id",
    "cuda.use_mem_pool",
    "cuda.memory._snapshot",
)

_RELEASES_LOCK = "release_lock_on_cudamalloc"
"""The option of torch without which a thread that waits for the GIL in `malloc` holds torch's lock."""

_MALLOC = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)


@dataclass(eq=False, slots=True)
class _Mapping:
    """A block, and whether physical memory is mapped to it."""

    block: Block
    mapped: bool = True


class CudaVmmAllocator(Allocator):
    """Pausable regions of one GPU.

    Args:
        index: torch's ordinal of the GPU.
        margin_bytes: Device memory that a reservation leaves free.

    Raises:
        UnsupportedError: torch, the driver or their settings lack a requirement, which the message names.
    """

    name = "vmm"
    keeps_freed = True
    maps_zeroed = True  # NVIDIA's driver scrubs freed memory; this is undocumented, and tests/gpu checks it

    def __init__(self, index: int, margin_bytes: int = 0) -> None:
        require_torch_symbols()
        self.index = index
        self.device = CudaDevice(index)
        self._margin_bytes = margin_bytes
        self._driver = Driver(index)
        self._lock = threading.Lock()  # guards the fields below; never held while torch is called
        self._mappings: dict[str, dict[int, _Mapping]] = defaultdict(dict)
        self._idle_pools: dict[str, list[torch.cuda.MemPool]] = defaultdict(list)
        self._retired_pools: dict[str, list[torch.cuda.MemPool]] = defaultdict(list)
        self._graph_pools: dict[str, torch.cuda.MemPool] = {}
        self._holds: dict[str, int] = defaultdict(int)
        self._segments = Segments(index)
        self._regions = regions_of(index)
        self._known_unused: dict[str, list[Block]] = {}  # guarded by their lock
        self._residual = ResidualMemory(index)
        self._allocators_lock = threading.Lock()  # guards the next
        self._torch_allocators: dict[str, tuple[Any, Any]] = {}  # with the callbacks, which must live as long
        keep_forever(self)  # keeps all callbacks, allocators and pools
        set_torch_option(_RELEASES_LOCK, True)
        self._require_custom_pools()

    # -- regions ------------------------------------------------------------------------------------------

    def region(self, tag: str) -> AbstractContextManager[None]:
        """See `Allocator.region`. A CUDA graph that is captured inside uses its own pool, unless the capture names
        `pool_id(tag)`.

        Raises:
            UnsupportedError: other code has changed torch's settings, and torch no longer calls the allocator.
        """
        self._require_settings()
        return self._region(tag)

    def _require_settings(self) -> None:
        """Other code may have set options since, which resets those that it omits. Takes milliseconds."""
        # In a capture the probe would join it.
        if not torch.cuda.is_current_stream_capturing() and not has_torch_option(_RELEASES_LOCK):
            set_torch_option(_RELEASES_LOCK, True)
            self._require_custom_pools()

    @contextmanager
    def _region(self, tag: str) -> Iterator[None]:
        region = object()
        try:
            with self._regions.lock:
                self._regions.open.add(region)
                self._known_unused.clear()
            with self._lock:
                pool = self._idle_pools[tag].pop() if self._idle_pools[tag] else None
            if pool is None:
                pool = self._new_pool(tag)
            try:
                with self._regions.stack.enter(lambda: torch.cuda.use_mem_pool(pool, self.index)):
                    yield
            finally:
                self._return_pool(tag, pool)
        finally:
            self._regions.open.discard(region)

    def pool_id(self, tag: str = Tag.CUDA_GRAPH) -> tuple[int, int]:
        """The identifier of a pool for `torch.cuda.graph(pool=…)`. Its memory belongs to `tag`.

        A sleep preserves all of it, unused parts too: torch counts a graph's temporaries as unused.
        """
        pool = self._graph_pools.get(tag)
        if pool is None:
            pool = self._graph_pools[tag] = self._new_pool(tag)
        return pool_key(pool)

    def _new_pool(self, tag: str) -> torch.cuda.MemPool:
        with self._allocators_lock:
            if tag not in self._torch_allocators:
                callback = _MALLOC(self._malloc_for(tag))
                allocator = torch._C._cuda_customAllocator(address_of_function(callback), self._driver.unmap_address)
                self._torch_allocators[tag] = allocator, callback
        with torch.cuda.device(self.index):
            return torch.cuda.MemPool(self._torch_allocators[tag][0])

    def _return_pool(self, tag: str, pool: torch.cuda.MemPool) -> None:
        """Keep the pool for the tag's next region, or retire it if it has unused segments. Free unused segments."""
        capturing = torch.cuda.is_current_stream_capturing()
        whole = capturing or not self._unused(tag, [pool])
        with self._lock:
            whole = whole and all(mapping.mapped for mapping in self._mappings[tag].values())
            (self._idle_pools if whole else self._retired_pools)[tag].append(pool)
        if not capturing:  # freeing synchronises the device, which aborts a capture
            self.forget_freed(tag)

    def forget_freed(self, tag: str) -> set[int]:
        """Free the blocks of retired pools that hold no tensor. Returns their addresses.

        While the tag is held, the method frees nothing; a later call does.
        """
        unused = self._unused(tag, self._retired_pools[tag])
        if not unused:
            return unused
        torch.cuda.synchronize(self.index)
        with self._lock, self._driver.context():
            if self._holds[tag]:
                return set()
            for address in unused:
                mapping = self._mappings[tag].pop(address, None)  # another thread may have removed the block
                if mapping is not None and mapping.mapped:
                    self._driver.unmap(*mapping.block)
        return unused

    def _unused(self, tag: str, pools: Iterable[torch.cuda.MemPool]) -> set[int]:
        """The addresses of the pools' blocks that hold no tensor. Empty for CUDA graphs."""
        if tag == Tag.CUDA_GRAPH:
            return set()
        segments = self._segments.of(list(pools))
        with self._lock:
            return {
                segment.address
                for segment in segments
                if not segment.active_bytes and segment.address in self._mappings[tag]
            }

    def _drop_empty_pools(self, tag: str) -> None:
        """Destroy the retired pools without blocks, and free their address ranges.

        torch aborts the process if a pool is destroyed while allocations are directed to any pool. So this method runs
        only between sleep and wake, when no graph is captured, and while no region is open.
        """
        with self._regions.lock:
            if self._regions.open:
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
                del pool  # torch frees the segments, which are unmapped already
            with self._lock:
                self._retired_pools[tag] += kept
            known = self._segments.read() if gone else set()
            for segment in gone:
                if segment.address not in known:
                    self._driver.free_address(segment.address, segment.nbytes)

    def _malloc_for(self, tag: str) -> Callable[[int, int, int | None], int | None]:
        mappings, lock, driver, index = self._mappings[tag], self._lock, self._driver, self.index

        def malloc(nbytes: int, device: int, stream: int | None) -> int | None:
            try:
                if device != index or nbytes % driver.granularity:
                    logger.error("torch requested %d bytes on GPU %d from a region of GPU %d", nbytes, device, index)
                    return None
                address = driver.allocate(nbytes)
                with lock:
                    mappings[address] = _Mapping(Block(address, nbytes))
                return address
            except DeviceMemoryError:
                return None  # torch frees cached memory and tries again
            except BaseException:  # no exception may leave a callback; torch reports null as out of memory
                logger.exception("the allocation of %d bytes for the tag %s failed", nbytes, tag)
                return None

        return malloc

    # -- the protocol -------------------------------------------------------------------------------------

    def blocks(self, tag: str) -> list[Block]:
        return [mapping.block for mapping in self._live(tag)]

    def unused(self, tag: str) -> list[Block]:
        """See `Allocator.unused`. The result is cached until a region opens: a snapshot takes milliseconds, and these
        pools get new tensors only in regions."""
        with self._regions.lock:
            if tag in self._known_unused:
                return self._known_unused[tag]
            all_closed = not self._regions.open  # a region may close meanwhile
            with self._lock:
                pools = [*self._idle_pools[tag], *self._retired_pools[tag]]  # not the pools of open regions
            unused = [block for segment in self._segments.of(pools) for block in segment.unused]
            if all_closed:
                self._known_unused[tag] = unused
            return unused

    def is_used(self, tag: str) -> bool:
        segments = [segment for of_pool in self._segments.by_pool().values() for segment in of_pool]
        with self._lock:
            return any(segment.active_bytes and segment.address in self._mappings[tag] for segment in segments)

    @contextmanager
    def held(self, tag: str) -> Iterator[list[Block]]:
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
            for by_tag in (self._idle_pools, self._retired_pools):
                pools += [pool for of_tag in list(by_tag.values()) for pool in of_tag]
            mappings = [mapping for by_address in self._mappings.values() for mapping in by_address.values()]
            resident = sum(mapping.block.nbytes for mapping in mappings if mapping.mapped)
        return self._residual(self._segments.by_pool(), {pool_key(pool) for pool in pools}, resident)

    def adopt(self, tag: str, tensors: Iterable[Any]) -> None:
        self._require_settings()
        move_storages(self, tag, tensors, self._region)

    def _live(self, tag: str) -> list[_Mapping]:
        with self._lock, self._driver.context():
            for address, mapping in list(self._mappings[tag].items()):
                if mapping.mapped and not self._driver.is_mapped(address):  # torch has freed it
                    del self._mappings[tag][address]
            return [mapping for _, mapping in sorted(self._mappings[tag].items())]

    def release(self, tag: str) -> int:
        released = 0
        mapped = [mapping for mapping in self._live(tag) if mapping.mapped]
        with self._lock, self._driver.context():
            # A later region must not use these pools: torch would allocate from unused parts of unmapped blocks.
            self._retired_pools[tag] += self._idle_pools[tag]
            self._idle_pools[tag].clear()
            for mapping in mapped:
                try:
                    self._driver.unmap(*mapping.block)
                finally:  # an interrupt may come when the driver has unmapped it
                    mapping.mapped = self._driver.is_mapped(mapping.block.address)
                released += mapping.block.nbytes
        return released

    def reclaim(self) -> None:
        self._driver.reclaim()
        self._segments.by_pool()  # read in advance for the next wake

    def reserve(self, tag: str) -> VmmReservation:
        self.forget_freed(tag)
        self._drop_empty_pools(tag)
        return VmmReservation(self, tag, [mapping for mapping in self._live(tag) if not mapping.mapped])

    def free_unused(self, tag: str) -> None:
        with self._lock:
            self._retired_pools[tag] += self._idle_pools[tag]
            self._idle_pools[tag].clear()
        self.forget_freed(tag)
        self._drop_empty_pools(tag)

    def close(self) -> None:
        """Free all memory. Tensors in the regions must not be used afterwards."""
        torch.cuda.synchronize(self.index)
        for tag in list(self._mappings):
            self.release(tag)
            with self._lock:
                self._mappings[tag].clear()

    # -- start-up -----------------------------------------------------------------------------------------

    def _require_custom_pools(self) -> None:
        """Check that torch calls our allocator. With expandable segments, some versions of torch do not.

        Raises:
            UnsupportedError: torch does not call the allocator, with expandable segments switched off too.
        """
        if self._is_used_by_torch():
            return
        if torch_options().get("expandable_segments"):
            logger.warning("expandable_segments is switched off, because torch then ignores the allocators of pools")
            set_torch_option("expandable_segments", False)
            if self._is_used_by_torch():
                return
        raise UnsupportedError(
            f"torch {torch.__version__} does not allocate through custom pools here"
            f" (allocator settings: {torch_options()}): unset PYTORCH_CUDA_ALLOC_CONF and PYTORCH_ALLOC_CONF"
        )

    def _is_used_by_torch(self) -> bool:
        with self._region(Tag.RUNTIME):  # `region` would probe again
            probe = torch.empty(1, dtype=torch.uint8, device=torch.device("cuda", self.index))
            address = probe.data_ptr()
            used = any(block.address <= address < block.end for block in self.blocks(Tag.RUNTIME))
            del probe  # before the region closes, which frees unused segments
        return used


class VmmReservation:
    """Physical memory for the released blocks of one tag.

    Raises:
        DeviceMemoryError: the GPU has too little free memory; nothing stays reserved.
    """

    def __init__(self, allocator: CudaVmmAllocator, tag: str, mappings: Sequence[_Mapping]) -> None:
        self._allocator = allocator
        self._tag = tag
        self._driver = driver = allocator._driver
        self._handles: dict[_Mapping, Any] = {}
        self.blocks = [mapping.block for mapping in mappings]
        self.nbytes = sum(block.nbytes for block in self.blocks)
        margin = allocator._margin_bytes
        try:
            with driver.context():
                for mapping in mappings:
                    self._handles[mapping] = driver.create(mapping.block.nbytes)
                if mappings and driver.free_bytes() < margin:
                    raise DeviceMemoryError("the margin is not free")
        except DeviceMemoryError:
            self.drop()
            raise too_little_for_wake(self.nbytes, driver.free_bytes(), margin) from None
        except BaseException:
            self.drop()
            raise

    def commit(self) -> None:
        freed = self._allocator.forget_freed(self._tag)
        mappings = [mapping for mapping in self._handles if mapping.block.address not in freed]

        def undo() -> None:
            for mapping in mappings:
                mapping.mapped = False
                if self._driver.is_mapped(mapping.block.address):  # also one that an interrupt has left uncounted
                    self._driver.unmap(*mapping.block)

        with self._driver.context():
            try:
                for mapping in mappings:
                    self._driver.map(*mapping.block, self._handles.pop(mapping))
                for mapping in mappings:
                    mapping.mapped = True
            except BaseException:
                to_its_end(undo)
                raise
            finally:
                to_its_end(self.drop)

    def drop(self) -> None:
        with self._driver.context():
            while self._handles:
                self._driver.release(self._handles.popitem()[1])


def require_torch_symbols() -> None:
    """Check that torch has all of `TORCH_SYMBOLS`.

    Raises:
        UnsupportedError: torch lacks symbols; `details["missing"]` names them.
    """
    missing = [f"torch.{path}" for path in missing_symbols(torch, TORCH_SYMBOLS)]
    if missing:
        raise UnsupportedError(
            f"torch {torch.__version__} lacks {', '.join(missing)}, which allocator=vmm needs", missing=missing
        )
