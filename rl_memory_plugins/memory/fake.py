"""An allocator and a device for unit tests, without torch: real bytes, counted memory, injected failures."""

from __future__ import annotations

import ctypes
import hashlib
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rl_memory_plugins.errors import EngineFaultError
from rl_memory_plugins.memory.allocator import Allocator, Block, out_of_device_memory

GARBAGE_BYTE = 0xA5


class _Range:
    def __init__(self, tag: str, nbytes: int) -> None:
        self.tag = tag
        self.memory = ctypes.create_string_buffer(nbytes)
        self.block = Block(ctypes.addressof(self.memory), nbytes)
        self.mapped = True


class FakeDevice:
    """A device whose "physical memory" is a counter. Its blocks are in ordinary host memory.

    Copies, fills and fingerprints of unmapped memory raise `EngineFaultError`, as a GPU would fault.

    Args:
        name: The name of the device.
        capacity: Bytes of physical memory.
    """

    def __init__(self, name: str = "fake:0", capacity: int = 1 << 30) -> None:
        self.name = name
        self.capacity = capacity
        self.used = 0
        self.allocated = 0
        self.calls: dict[str, int] = defaultdict(int)
        """Calls by operation: `synchronize`, `trim`, `begin_copy_to_host`, `end_copy_to_host`, `begin_copy_from_host`,
        `end_copy_from_host` (an end moves the bytes, as late as possible), `fill`, `fingerprint`, and the allocator's
        `reserve`, `release` and `reclaim` (once per call), `map` and `unmap` (once per block)."""
        self._failures: dict[str, tuple[int, Exception | None]] = {}
        self._ranges: dict[int, _Range] = {}

    def fail(self, operation: str, nth: int = 1, error: Exception | None = None) -> None:
        """Make the `nth` next call of an operation (its name as in `calls`) raise before it acts."""
        self._failures[operation] = (self.calls[operation] + nth, error)

    def clear_failures(self) -> None:
        self._failures.clear()

    def synchronize(self) -> None:
        self._enter("synchronize")

    def memory_info(self) -> tuple[int, int]:
        return self.capacity - self.used, self.capacity

    def trim(self, min_bytes: int = 0) -> None:
        self._enter("trim")

    def allocations(self) -> int:
        return self.allocated

    def begin_copy_to_host(self, pairs: Sequence[tuple[Block, int]]) -> Callable[[], None]:
        self._enter("begin_copy_to_host")
        for block, _ in pairs:
            self._require_mapped(block)

        def wait() -> None:
            self._enter("end_copy_to_host")
            for block, host in pairs:
                self._require_mapped(block)
                ctypes.memmove(host, block.address, block.nbytes)

        return wait

    def begin_copy_from_host(self, pairs: Sequence[tuple[Block, int]]) -> Callable[[], None]:
        self._enter("begin_copy_from_host")
        for block, _ in pairs:
            self._require_mapped(block)

        def wait() -> None:
            self._enter("end_copy_from_host")
            for block, host in pairs:
                self._require_mapped(block)
                ctypes.memmove(block.address, host, block.nbytes)

        return wait

    def fill(self, blocks: Sequence[Block], byte: int) -> None:
        self._enter("fill")
        for block in blocks:
            self._require_mapped(block)
            ctypes.memset(block.address, byte, block.nbytes)

    def fingerprint(self, blocks: Sequence[Block]) -> int:
        self._enter("fingerprint")
        digest = hashlib.blake2b(digest_size=8)
        for block in blocks:
            self._require_mapped(block)
            digest.update(ctypes.string_at(block.address, block.nbytes))
        return int.from_bytes(digest.digest(), "little")

    def _enter(self, operation: str) -> None:
        self.calls[operation] += 1
        nth, error = self._failures.get(operation, (0, None))
        if self.calls[operation] == nth:
            del self._failures[operation]
            raise error or EngineFaultError(f"injected failure of {operation}", operation=operation)

    def _take(self, nbytes: int) -> None:
        free = self.capacity - self.used
        if nbytes > free:
            message = f"the allocation needs {nbytes} bytes, but only {free} are free"
            raise out_of_device_memory(message, free, needed=nbytes)
        self.used += nbytes

    def _require_mapped(self, block: Block) -> None:
        for range_ in self._ranges.values():
            if range_.block.address <= block.address and block.end <= range_.block.end and range_.mapped:
                return
        raise EngineFaultError(f"illegal access to {block.nbytes} bytes at {block.address:#x}: not mapped")


class FakeAllocator(Allocator):
    """Pausable regions on a `FakeDevice`. Released memory reads as garbage.

    Args:
        maps_zeroed: Newly mapped memory reads as zeros instead of garbage.
    """

    name = "fake"

    def __init__(self, device: FakeDevice | None = None, *, maps_zeroed: bool = False) -> None:
        self.device: FakeDevice = device or FakeDevice()
        self.maps_zeroed = maps_zeroed
        self.unused_blocks: list[Block] = []
        self._local = threading.local()

    @contextmanager
    def region(self, tag: str) -> Iterator[None]:
        outer = getattr(self._local, "tag", None)
        self._local.tag = tag
        try:
            yield
        finally:
            self._local.tag = outer

    def allocate(self, nbytes: int) -> Block:
        """Allocate a zeroed block for the tag of the innermost region. A region must be open.

        Raises:
            DeviceMemoryError: the capacity of the device does not suffice.
        """
        self.device._take(nbytes)
        range_ = _Range(self._local.tag, nbytes)
        self.device._ranges[range_.block.address] = range_
        return range_.block

    def free(self, block: Block) -> None:
        """Free a block, resident or released."""
        range_ = self.device._ranges.pop(block.address)
        if range_.mapped:
            self.device.used -= block.nbytes

    def write(self, block: Block, data: bytes) -> None:
        """Write to the start of a block, as a kernel would."""
        self.device._require_mapped(block)
        ctypes.memmove(block.address, data, min(len(data), block.nbytes))

    def read(self, block: Block) -> bytes:
        """The bytes of a block. A released block reads as garbage."""
        return ctypes.string_at(block.address, block.nbytes)

    def blocks(self, tag: str) -> list[Block]:
        return sorted(range_.block for range_ in self._of(tag))

    def unused(self, tag: str) -> list[Block]:
        return list(self.unused_blocks)

    def reclaim(self) -> None:
        self.device._enter("reclaim")

    def release(self, tag: str) -> int:
        self.device._enter("release")
        released = 0
        for range_ in self._of(tag):
            if range_.mapped:
                self.device._enter("unmap")
                self._unmap(range_)
                released += range_.block.nbytes
        return released

    def reserve(self, tag: str) -> FakeReservation:
        self.device._enter("reserve")
        ranges = [range_ for range_ in self._of(tag) if not range_.mapped]
        self.device._take(sum(range_.block.nbytes for range_ in ranges))
        return FakeReservation(self, ranges)

    def _of(self, tag: str) -> list[_Range]:
        return [range_ for range_ in self.device._ranges.values() if range_.tag == tag]

    def _unmap(self, range_: _Range) -> None:
        ctypes.memset(range_.block.address, GARBAGE_BYTE, range_.block.nbytes)
        range_.mapped = False
        self.device.used -= range_.block.nbytes


class FakeReservation:
    def __init__(self, allocator: FakeAllocator, ranges: list[_Range]) -> None:
        self._allocator = allocator
        self._ranges = ranges
        self._open = True
        self.blocks = sorted(range_.block for range_ in ranges)
        self.nbytes = sum(block.nbytes for block in self.blocks)

    def commit(self) -> None:
        self._close()
        device = self._allocator.device
        live = [range_ for range_ in self._ranges if range_.block.address in device._ranges]
        device.used -= self.nbytes - sum(range_.block.nbytes for range_ in live)  # of blocks that were freed meanwhile
        try:
            for range_ in live:
                device._enter("map")
                range_.mapped = True
                if self._allocator.maps_zeroed:
                    ctypes.memset(range_.block.address, 0, range_.block.nbytes)
        except Exception:
            for range_ in live:
                self._allocator._unmap(range_)
            raise

    def drop(self) -> None:
        self._close()
        self._allocator.device.used -= self.nbytes

    def _close(self) -> None:
        if not self._open:
            raise EngineFaultError("a reservation was committed or dropped twice")
        self._open = False
