"""Host copies of device memory: the arena they lie in, and the backups themselves."""

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
#: Bytes that are copied, made or given back between two looks at whether to go on; a few milliseconds' worth.
STEP_BYTES = 256 << 20
#: Unused parts that are smaller are copied like what lies around them: that takes less time than to copy in pieces.
MIN_LEFT_OUT = 1 << 20

Step = Callable[[int], AbstractContextManager[None]]
"""Entered for each step of making a buffer, with the bytes that are still to be made. It may raise `GivenUp`."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class HostArena(Protocol):
    """Host memory for backups, kept across cycles so that no sleep but the first pays for making it.

    Attributes:
        notes: What it cannot do, for `memory_status`.
    """

    notes: list[str]

    @property
    def held_bytes(self) -> int:
        """Bytes the arena occupies now, used or not."""

    def acquire(self, nbytes: int, go_on: Callable[[], bool] = always) -> int:
        """The address of `nbytes` of host memory.

        Args:
            go_on: Asked while the memory is made; if it says no, none is made.

        Raises:
            HostMemoryError: the arena's bound or the free host memory does not allow it; nothing was changed.
            GivenUp: `go_on` said no.
        """

    def prepare(self, sizes: Sequence[int]) -> object:
        """Make buffers of these sizes in the background, where making them takes long and may be worth it."""

    def note_sleep(self, preserving: bool) -> None:
        """A sleep is about to preserve the weights, or to discard them. Does not wait."""

    def settle(self) -> None:
        """Give back, in the background, what sleeps no longer need. Called some time after a sleep."""

    def release(self, address: int) -> None:
        """Hand a buffer back to the arena, which may keep it for the next `acquire`."""


class PagedArena:
    """An arena of anonymous mappings; freed buffers are kept and reused by best fit.

    Args:
        max_bytes: bound on what the arena holds; 0 means only free host memory bounds it.
        margin_bytes: host memory that must stay free after an `acquire`.
        prepares: when memory for all weights is made, and whether it is given back.
    """

    def __init__(self, max_bytes: int = 0, margin_bytes: int = 0, prepares: Prepares = "auto") -> None:
        self.notes: list[str] = []
        self.demand = Demand(prepares)
        self._max_bytes = max_bytes
        self._margin_bytes = margin_bytes
        self._mappings: dict[int, mmap.mmap] = {}
        self._idle: set[int] = set()
        self._coming_or_going = 0  # bytes that are being made or given back
        self._lock = threading.Lock()  # guards the three above; never held while memory is made or given back
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
        # Idle buffers that are too small only stand in the way of a larger one.
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
        """Whether host memory that was in the way of an `acquire` has gone meanwhile, after a wait for it."""
        settling, self._settling = self._settling, None
        if settling is not None:
            settling.join()
        return settling is not None

    def _smallest_idle(self, nbytes: int) -> int | None:
        fitting = [address for address in self._idle if len(self._mappings[address]) >= nbytes]
        return min(fitting, key=lambda address: len(self._mappings[address]), default=None)

    def prepare(self, sizes: Sequence[int]) -> object:
        return None  # pageable memory is made as it is touched

    def note_sleep(self, preserving: bool) -> None:
        self.demand.note(preserving)

    def settle(self) -> None:
        if not self.demand.is_gone or not self._idle or (self._settling is not None and self._settling.is_alive()):
            return
        # Not a daemon: Python's end waits for it, so it is in no call of torch or CUDA when these go.
        settling = threading.Thread(
            target=self._give_back, args=(lambda mapping: self.demand.is_gone,), name="rl-memory-give-back"
        )
        with suppress(RuntimeError):  # no more threads: it is done after a later sleep
            settling.start()
            self._settling = settling

    def release(self, address: int) -> None:
        with self._lock:
            if address in self._mappings:
                self._idle.add(address)

    def close(self) -> None:
        """Give everything back; buffers still in use become invalid."""
        self._make_way()
        with self._lock:
            self._idle = set(self._mappings)
        self._give_back(lambda mapping: True)

    def _give_back(self, chosen: Callable[[mmap.mmap], bool]) -> None:
        """Give back those idle buffers that are chosen, one by one."""
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
            f"{needed} bytes of host memory are needed for the backup, {usable} are {what}",
            needed_bytes=needed,
            free_bytes=max(free, 0),
            margin_bytes=self._margin_bytes,
        )

    def _taking_turns(self, nbytes: int) -> AbstractContextManager[None]:
        """For arenas that fill their pages: the ranks of a host must see what the others have taken."""
        return nullcontext()

    def _fill(self, mapping: mmap.mmap, step: Step) -> None:
        """For arenas that make and pin their pages."""

    def _discard(self, address: int, mapping: mmap.mmap) -> None:
        unmap(mapping)


def _at_once(go_on: Callable[[], bool]) -> Step:
    """The steps of a buffer that somebody waits for."""

    @contextmanager
    def step(rest: int) -> Iterator[None]:
        if not go_on():
            raise GivenUp
        yield

    return step


def unmap(mapping: mmap.mmap) -> None:
    """Give a mapping's memory back. Others may run and map memory meanwhile, also where it is large."""
    address, nbytes = address_of(mapping), len(mapping)
    for start in range(0, nbytes, STEP_BYTES):  # ctypes releases the GIL, and the kernel its lock
        _libc.madvise(address + start, min(STEP_BYTES, nbytes - start), mmap.MADV_DONTNEED)
    mapping.close()


def address_of(mapping: mmap.mmap) -> int:
    """The address of a writable mapping, without keeping its buffer exported."""
    anchor = ctypes.c_char.from_buffer(mapping)
    try:
        return ctypes.addressof(anchor)
    finally:
        del anchor


class Backup:
    """The bytes of some device blocks in host memory.

    A backup remembers the content epoch and the fingerprint of what it copied. It is clean, and need not be
    copied again, only while both still hold: the epoch tells of changes through this package, the fingerprint
    of those made behind its back, by an engine's or a trainer's own code.

    Args:
        identified: The part of the blocks that is fingerprinted. The rest, of which an engine may change something
            with every request, is copied again by `refresh` before a clean backup is used.
        go_on: Asked while host memory is made for it.

    Raises:
        HostMemoryError: there is none; see `HostArena.acquire`.
        GivenUp: `go_on` said no.
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
        self._wait: Callable[[], None] | None = None  # for a copy that is under way
        self._address = arena.acquire(self.nbytes, go_on) if self.nbytes else 0

    def _leave_out(self, unused: Sequence[Block]) -> None:
        large = [block for block in unused if block.nbytes >= MIN_LEFT_OUT]
        self._left_out = subtract(large, self.identified)

    def _pairs(self, gone: Sequence[Block] = ()) -> list[tuple[Block, int]]:
        """Each block that lies in none of `gone`, with the address of its copy."""
        pairs: list[tuple[Block, int]] = []
        offset = self._address
        pieces = iter([*subtract(self.blocks, gone), None])  # in the order of the blocks, each inside of one
        piece = next(pieces)
        for block in self.blocks:
            while piece is not None and block.address <= piece.address < block.end:
                pairs.append((piece, offset + piece.address - block.address))
                piece = next(pieces)
            offset += block.nbytes
        return pairs

    def begin_save(self, device: Device, epoch: int, gone: Sequence[Block] = (), unused: Sequence[Block] = ()) -> int:
        """Begin to copy the blocks out; until `finish` or `free` they must stay as they are.

        Args:
            gone: Parts of them that have been freed since the backup was made.
            unused: Parts whose content is worth nothing; `restore` leaves them out too.

        Returns: the bytes.
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
        """Wait for the copy that has begun, if any."""
        wait, self._wait = self._wait, None
        if wait is not None:
            wait()

    def save_in_steps(self, device: Device, epoch: int, go_on: Callable[[], bool]) -> bool:
        """Copy the blocks out while somebody may be writing to them.

        Args:
            go_on: Asked between steps; if it says no, the copy is given up.

        Returns: whether this is a copy of one state of the blocks. If not, the backup is never clean.
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
        """Begin to copy out again what is not identified; see `begin_save`."""
        self._leave_out(unused)
        pairs = self._pairs([*self.identified, *gone, *self._left_out])
        if pairs:
            self._wait = device.begin_copy_to_host(pairs)
        return sum(block.nbytes for block, _ in pairs)

    def restore(self, device: Device, blocks: Sequence[Block] | None = None) -> int:
        """Copy the bytes back, all or those that lie in `blocks`; returns how many, when all have arrived."""
        elsewhere = subtract(self.blocks, blocks) if blocks is not None else []
        pairs = self._pairs([*elsewhere, *self._left_out])
        device.copy_from_host(pairs)
        return sum(block.nbytes for block, _ in pairs)

    def is_clean(self, device: Device, blocks: Sequence[Block], epoch: int) -> bool:
        """Whether it holds, of these resident blocks, what they hold now: all that is identified."""
        return (
            bool(self.identified)
            and self.epoch == epoch
            and self.blocks == list(blocks)
            and self._fingerprint is not None
            and self._fingerprint == self._identity(device)
        )

    def _identity(self, device: Device) -> int | None:
        """The fingerprint; none where the device has no memory left to make one, and then nothing is clean."""
        try:
            return device.fingerprint(self.identified)
        except DeviceMemoryError:
            return None

    def free(self) -> None:
        try:
            self.finish()  # nobody else may have the memory while it is being written to
        finally:
            if self.nbytes:
                self._arena.release(self._address)
            self.nbytes = 0
