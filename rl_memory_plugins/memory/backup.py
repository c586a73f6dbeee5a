"""Backups: copies of device memory in host memory, and the arena that holds them."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Protocol

from rl_memory_plugins.errors import DeviceMemoryError, HostMemoryError
from rl_memory_plugins.memory.allocator import Block, Device
from rl_memory_plugins.memory.host_memory import free_host_bytes
from rl_memory_plugins.memory.preparation import WASTE, Demand, GivenUp, Prepares, always
from rl_memory_plugins.memory.ranges import subtract

ALIGNMENT = 4096
#: Bytes that are copied, allocated or freed between two checks for cancellation; a few milliseconds of work.
STEP_BYTES = 256 << 20
#: Smaller unused parts are copied with their surroundings: skipping them takes more time.
MIN_LEFT_OUT = 1 << 20

Step = Callable[[int], AbstractContextManager[None]]
"""The context of one step of an allocation. The argument is the number of bytes still to allocate. May raise
`GivenUp`."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class HostArena(Protocol):
    """Host memory for backups. The arena keeps freed buffers, so only the first sleep pays for their allocation.

    Attributes:
        notes: Limitations of the arena, for `memory_status`.
    """

    notes: list[str]

    @property
    def held_bytes(self) -> int:
        """Bytes of host memory that the arena holds now, used or idle."""

    def acquire(self, nbytes: int, go_on: Callable[[], bool] = always) -> int:
        """Allocate `nbytes` of host memory, and return the address.

        Args:
            go_on: Called during the allocation; `False` cancels it.

        Raises:
            HostMemoryError: the bound of the arena or the free host memory does not suffice; nothing was changed.
            GivenUp: `go_on` returned `False`.
        """

    def prepare(self, sizes: Sequence[int]) -> object:
        """Allocate buffers of these sizes in bytes in the background, if their allocation takes long."""

    def note_sleep(self, preserving: bool) -> None:
        """Record that a sleep preserves or discards the weights. Does not wait."""

    def settle(self) -> None:
        """Free in the background the memory that sleeps no longer need. Called some time after a sleep."""

    def release(self, address: int) -> None:
        """Return a buffer to the arena, which may keep it for the next `acquire`."""


class PagedArena:
    """An arena of anonymous mappings. It keeps freed buffers and reuses them by best fit.

    Args:
        max_bytes: The most bytes that the arena may hold; with 0 only the free host memory limits it.
        margin_bytes: Bytes of host memory that must stay free after an `acquire`.
        prepares: When memory for all weights is allocated, and whether it is freed again; see `config.py`.
    """

    def __init__(self, max_bytes: int = 0, margin_bytes: int = 0, prepares: Prepares = "auto") -> None:
        self.notes: list[str] = []
        self.demand = Demand(prepares)
        self._max_bytes = max_bytes
        self._margin_bytes = margin_bytes
        self._mappings: dict[int, mmap.mmap] = {}
        self._idle: set[int] = set()
        self._coming_or_going = 0  # bytes that are being allocated or freed
        self._lock = threading.Lock()  # guards the three above; never held while memory is allocated or freed
        self._settling: threading.Thread | None = None

    @property
    def held_bytes(self) -> int:
        with self._lock:
            return self._held()

    def _held(self) -> int:
        return self._coming_or_going + sum(len(mapping) for mapping in self._mappings.values())

    def acquire(self, nbytes: int, go_on: Callable[[], bool] = always) -> int:
        nbytes = max(-(-nbytes // ALIGNMENT) * ALIGNMENT, ALIGNMENT)
        with self._lock:
            fitting = self._smallest_idle(nbytes)
            if fitting is not None and len(self._mappings[fitting]) <= WASTE * nbytes:
                self._idle.remove(fitting)
                return fitting
        # Free the smaller idle buffers: the new buffer may need their memory.
        self._give_back(lambda mapping: len(mapping) < nbytes)
        while True:
            try:
                with self._taking_turns(nbytes):
                    return self._make(nbytes, _at_once(go_on))
            except HostMemoryError:
                if self._make_way():
                    continue
                with self._lock:
                    fitting = self._smallest_idle(nbytes)
                    if fitting is None:
                        raise
                    self._idle.remove(fitting)
                    return fitting

    def _make(self, nbytes: int, step: Step) -> int:
        with self._lock:
            self._check(nbytes)
            self._coming_or_going += nbytes
        mapping = None
        try:
            try:
                mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            except OSError as error:
                raise self._error(nbytes, free_host_bytes()) from error
            self._fill(mapping, step)
        except BaseException:
            if mapping is not None:
                unmap(mapping)
            with self._lock:
                self._coming_or_going -= nbytes
            raise
        address = address_of(mapping)
        with self._lock:
            self._coming_or_going -= nbytes
            self._mappings[address] = mapping
        return address

    def _make_way(self) -> bool:
        """Wait for background work that frees host memory. Returns whether any ran: then `acquire` tries again."""
        settling, self._settling = self._settling, None
        if settling is not None:
            settling.join()
        return settling is not None

    def _smallest_idle(self, nbytes: int) -> int | None:
        fitting = [address for address in self._idle if len(self._mappings[address]) >= nbytes]
        return min(fitting, key=lambda address: len(self._mappings[address]), default=None)

    def prepare(self, sizes: Sequence[int]) -> object:
        return None  # the kernel allocates pageable memory at the first touch

    def note_sleep(self, preserving: bool) -> None:
        self.demand.note(preserving)

    def settle(self) -> None:
        if not self.demand.is_gone or not self._idle or (self._settling is not None and self._settling.is_alive()):
            return
        # Not a daemon: the interpreter waits for the thread at exit, so it makes no CUDA call while torch shuts down.
        settling = threading.Thread(
            target=self._give_back, args=(lambda mapping: self.demand.is_gone,), name="rl-memory-give-back"
        )
        with suppress(RuntimeError):  # the thread cannot start: a later sleep tries again
            settling.start()
            self._settling = settling

    def release(self, address: int) -> None:
        with self._lock:
            if address in self._mappings:
                self._idle.add(address)

    def close(self) -> None:
        """Free all memory. Buffers in use become invalid."""
        self._make_way()
        with self._lock:
            self._idle = set(self._mappings)
        self._give_back(lambda mapping: True)

    def _give_back(self, chosen: Callable[[mmap.mmap], bool]) -> None:
        """Free the idle buffers for which `chosen` returns `True`, one by one."""
        while True:
            with self._lock:
                address = next((one for one in self._idle if chosen(self._mappings[one])), None)
                if address is None:
                    return
                self._idle.remove(address)
                mapping = self._mappings.pop(address)
                nbytes = len(mapping)
                self._coming_or_going += nbytes
            try:
                self._discard(address, mapping)
            finally:
                with self._lock:
                    self._coming_or_going -= nbytes

    def _check(self, nbytes: int) -> None:
        free = free_host_bytes()
        allowed = self._max_bytes - self._held() + self._margin_bytes if self._max_bytes else free
        if nbytes + self._margin_bytes > min(free, allowed):
            what = "allowed by host_arena_max_bytes" if allowed < free else "free"
            raise self._error(nbytes, min(free, allowed), what)

    def _error(self, needed: int, free: int, what: str = "free") -> HostMemoryError:
        usable = max(free - self._margin_bytes, 0)
        return HostMemoryError(
            f"the backup needs {needed} bytes of host memory, but only {usable} are {what}",
            needed_bytes=needed,
            free_bytes=max(free, 0),
            margin_bytes=self._margin_bytes,
        )

    def _taking_turns(self, nbytes: int) -> AbstractContextManager[None]:
        """A lock between the ranks of a host, for subclasses that touch their pages: each rank must see the memory that
        the others have taken."""
        return nullcontext()

    def _fill(self, mapping: mmap.mmap, step: Step) -> None:
        """Touch and pin the pages, in subclasses that do so."""

    def _discard(self, address: int, mapping: mmap.mmap) -> None:
        unmap(mapping)


def _at_once(go_on: Callable[[], bool]) -> Step:
    """The steps of an allocation that a caller waits for."""

    @contextmanager
    def step(rest: int) -> Iterator[None]:
        if not go_on():
            raise GivenUp
        yield

    return step


def unmap(mapping: mmap.mmap) -> None:
    """Free a mapping's memory in steps, between which other threads can run and map memory."""
    address, nbytes = address_of(mapping), len(mapping)
    for start in range(0, nbytes, STEP_BYTES):  # ctypes releases the GIL, and the kernel releases its lock
        _libc.madvise(address + start, min(STEP_BYTES, nbytes - start), mmap.MADV_DONTNEED)
    mapping.close()


def address_of(mapping: mmap.mmap) -> int:
    """The address of a writable mapping. Its buffer is not exported afterwards, so the mapping can be closed."""
    anchor = ctypes.c_char.from_buffer(mapping)
    try:
        return ctypes.addressof(anchor)
    finally:
        del anchor


class Backup:
    """A copy of device blocks in host memory.

    A backup stores the content epoch and the fingerprint of its source. It is clean, and needs no new copy, while both
    still match. The epoch reveals changes through this package; the fingerprint reveals changes by other code of the
    engine or the trainer.

    Args:
        identified: The part of the blocks that is fingerprinted. An engine may change the rest with every request;
            `begin_refresh` copies the rest again before a clean backup is used.
        go_on: Called while host memory is allocated; `False` cancels the backup.

    Raises:
        HostMemoryError: too little host memory; see `HostArena.acquire`.
        GivenUp: `go_on` returned `False`.
    """

    def __init__(
        self,
        arena: HostArena,
        blocks: Sequence[Block],
        identified: Sequence[Block] = (),
        go_on: Callable[[], bool] = always,
    ) -> None:
        self.identified = list(identified)
        self._arena = arena
        self.blocks = list(blocks)
        self.nbytes = sum(block.nbytes for block in blocks)
        self.epoch = -1
        self._fingerprint: int | None = None
        self._left_out: list[Block] = []
        self._wait: Callable[[], None] | None = None  # waits for the running copy
        self._address = arena.acquire(self.nbytes, go_on) if self.nbytes else 0

    def _leave_out(self, unused: Sequence[Block]) -> None:
        large = [block for block in unused if block.nbytes >= MIN_LEFT_OUT]
        self._left_out = subtract(large, self.identified)

    def _pairs(self, gone: Sequence[Block] = ()) -> list[tuple[Block, int]]:
        """The parts of the blocks outside `gone`, each with the address of its copy."""
        pairs: list[tuple[Block, int]] = []
        offset = self._address
        pieces = iter([*subtract(self.blocks, gone), None])  # in the order of the blocks; no piece spans two blocks
        piece = next(pieces)
        for block in self.blocks:
            while piece is not None and block.address <= piece.address < block.end:
                pairs.append((piece, offset + piece.address - block.address))
                piece = next(pieces)
            offset += block.nbytes
        return pairs

    def begin_save(self, device: Device, epoch: int, gone: Sequence[Block] = (), unused: Sequence[Block] = ()) -> int:
        """Start to copy the blocks to the host. They must not change until `finish` or `free`.

        Args:
            gone: Parts of the blocks that have been freed since the backup was made.
            unused: Parts of the blocks that need no copy; `restore` skips them too.

        Returns: the bytes to copy.
        """
        self._leave_out(unused)
        pairs = self._pairs([*gone, *self._left_out])
        self._fingerprint = None
        self._wait = device.begin_copy_to_host(pairs)
        if self.identified and not gone:
            self._fingerprint = self._identity(device)
        self.epoch = epoch
        return sum(block.nbytes for block, _ in pairs)

    def finish(self) -> None:
        """Wait for the running copy, if any."""
        wait, self._wait = self._wait, None
        if wait is not None:
            wait()

    def save_in_steps(self, device: Device, epoch: int, go_on: Callable[[], bool]) -> bool:
        """Copy the blocks to the host while other code may write to them.

        Args:
            go_on: Called between steps; `False` cancels the copy.

        Returns: whether the copy is consistent, i.e. no write overlapped it. An inconsistent backup is never clean.
        """
        self._fingerprint, self._left_out = None, []
        before = self._identity(device)
        for block, address in self._pairs():
            for start in range(0, block.nbytes, STEP_BYTES):
                if not go_on():
                    return False
                step = Block(block.address + start, min(STEP_BYTES, block.nbytes - start))
                device.begin_copy_to_host([(step, address + start)])()
        if not go_on() or before is None or self._identity(device) != before:
            return False
        self._fingerprint, self.epoch = before, epoch
        return True

    def begin_refresh(self, device: Device, gone: Sequence[Block] = (), unused: Sequence[Block] = ()) -> int:
        """Start to copy again all parts that are not fingerprinted; see `begin_save`."""
        self._leave_out(unused)
        pairs = self._pairs([*self.identified, *gone, *self._left_out])
        if pairs:
            self._wait = device.begin_copy_to_host(pairs)
        return sum(block.nbytes for block, _ in pairs)

    def restore(self, device: Device, blocks: Sequence[Block] | None = None) -> int:
        """Copy the bytes back to the device, all of them or those in `blocks`. Waits, and returns the bytes copied."""
        elsewhere = subtract(self.blocks, blocks) if blocks is not None else []
        pairs = self._pairs([*elsewhere, *self._left_out])
        device.copy_from_host(pairs)
        return sum(block.nbytes for block, _ in pairs)

    def is_clean(self, device: Device, blocks: Sequence[Block], epoch: int) -> bool:
        """Whether the backup matches the present content of these resident blocks, in all fingerprinted parts."""
        return (
            bool(self.identified)
            and self.epoch == epoch
            and self.blocks == list(blocks)
            and self._fingerprint is not None
            and self._fingerprint == self._identity(device)
        )

    def _identity(self, device: Device) -> int | None:
        """The fingerprint; None if the device lacks memory to compute it. Without a fingerprint no backup is clean."""
        try:
            return device.fingerprint(self.identified)
        except DeviceMemoryError:
            return None

    def free(self) -> None:
        try:
            self.finish()  # the memory must not be reused during a copy
        finally:
            if self.nbytes:
                self._arena.release(self._address)
            self.nbytes = 0
