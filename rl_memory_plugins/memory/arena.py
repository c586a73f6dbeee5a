"""Host memory for backups: pageable memory that is kept and reused."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress

from rl_memory_plugins.errors import HostMemoryError
from rl_memory_plugins.memory.copies import LARGE_PIECE_BYTES, PIECE_BYTES
from rl_memory_plugins.memory.host_memory import free_host_bytes, host_memory_info, libc, refusal_of, whole_pages
from rl_memory_plugins.memory.pages import populate, touch
from rl_memory_plugins.memory.preparation import (
    MAX_OVERSIZE,
    PAUSE_S,
    SLEEP,
    AllocationCancelled,
    Asked,
    Caller,
    Demand,
    Pace,
    Preparation,
    PrepareMode,
)
from rl_memory_plugins.memory.shared_buffers import File, Map, SharedBuffers
from rl_memory_plugins.memory.threads import await_end
from rl_memory_plugins.private_directory import one_at_a_time

#: Bytes that are copied, allocated or freed between two checks for cancellation; a few milliseconds of work.
STEP_BYTES = 256 << 20
SMALL_BYTES = 32 << 20  # takes milliseconds to allocate, so a smaller buffer waits for no other rank
TURN_S = 60.0  # the longest wait of a rank for another rank that allocates host memory
SPARE_SHARE = 4  # with `auto`, an allocation in advance leaves a quarter of the host's memory free
#: While nobody waits for the memory: the share of the threads, and their niceness. An engine has several busy threads
#: of its own; while 16 threads touched pages, its requests took a third longer.
BACKGROUND_SHARE, BACKGROUND_NICE = 8, 5

Step = Callable[[int], AbstractContextManager[int | None]]
"""The context of one step of an allocation. The argument is the number of bytes still to allocate. The context's value
is `None` for a caller who waits. Otherwise the step leaves the processors to others, and locks at most so many bytes at
a time. May raise `AllocationCancelled`."""


def never() -> bool:
    return False


def at_once() -> None:
    """No pause."""


class PagedArena:
    """Host memory for backups in anonymous mappings. The arena keeps freed buffers and reuses them by best fit.

    A buffer gets its pages at once. The free host memory tells nothing of pages that only a later copy would take, and
    of several such buffers each would seem to fit.

    Args:
        max_bytes: The most bytes that the arena may hold; with 0 only the free host memory limits it.
        margin_bytes: Bytes of host memory that must stay free after an `acquire`.
        mode: When memory for all weights is allocated, and whether it is freed again; see `config.py`.
        threads: The number of threads that make pages; by default one for each core, at most 16.

    Attributes:
        notes: Limitations of the arena, for `memory_status`.
        shared: Buffers that this process shares with others; `None` if it shares none.
        is_busy: Whether a sleep or a wake acts, as the manager says. Meanwhile the background gives back little memory:
            each of the hundreds of driver calls of a sleep or a wake waits while a piece is unlocked.
        pace: The pauses of what is allocated in the background. The engine tells it of its steps.
    """

    def __init__(
        self, max_bytes: int = 0, margin_bytes: int = 0, mode: PrepareMode = "auto", threads: int | None = None
    ) -> None:
        self.notes: list[str] = []
        self.shared: SharedBuffers | None = None
        self.is_busy = False
        self.demand = Demand(mode)
        self.pace = Pace()
        self._max_bytes = max_bytes
        self._margin_bytes = margin_bytes
        self._threads = threads or min(len(os.sched_getaffinity(0)), 16)
        self._mappings: dict[int, mmap.mmap] = {}
        self._idle: set[int] = set()
        self._pending_bytes = 0  # bytes that are being allocated or freed
        self._lock = threading.Lock()  # guards the three above; never held while pages are allocated or freed
        self._settling: threading.Thread | None = None
        self._waiting = 0  # callers that wait for the end of background work; guarded by `_lock`

    @property
    def held_bytes(self) -> int:
        """Bytes of host memory that the arena holds now, used or idle."""
        with self._lock:
            return self._held()

    def _held(self) -> int:
        return self._pending_bytes + sum(len(mapping) for mapping in self._mappings.values())

    def acquire(self, nbytes: int, caller: Caller = SLEEP) -> int:
        """Allocate `nbytes` of host memory, and return the address.

        Raises:
            HostMemoryError: the bound of the arena or the free host memory does not suffice; nothing was changed.
            AllocationCancelled: by the caller.
        """
        nbytes = whole_pages(nbytes)
        address = self._take_idle(nbytes, MAX_OVERSIZE * nbytes)
        if address is not None:
            return address
        # Free the smaller idle buffers: the new buffer may need their memory.
        self._free_idle(lambda mapping: len(mapping) < nbytes)
        while True:
            try:
                return self._allocate_now(nbytes, caller)
            except HostMemoryError:
                if not self._end_background_work():
                    address = self._take_idle(nbytes, sys.maxsize)
                    if address is None:
                        raise
                    return address

    def map_file(self, file: File, nbytes: int, caller: Caller = SLEEP) -> int:
        """Map the first `nbytes` of a file, ready for copies, and return the address. `unmap_file` ends the mapping.

        Raises:
            HostMemoryError, AllocationCancelled: as for `acquire`. An existing file needs no new memory.
        """
        while True:
            try:
                return self._allocate_now(nbytes, caller, file)
            except HostMemoryError:
                if not (self._end_background_work() or self._idle):
                    raise
                self._free_idle(lambda mapping: True)

    def unmap_file(self, address: int) -> None:
        """End a mapping of `map_file`. The file keeps its memory while anybody has it open."""
        with self._lock:
            mapping = self._remove(address)
        self._discard_removed(address, mapping)

    def _take_idle(self, nbytes: int, largest: int) -> int | None:
        """Take the smallest idle buffer of at least `nbytes` and at most `largest`."""
        with self._lock:
            sizes = {address: len(self._mappings[address]) for address in self._idle}
            fitting = [address for address, size in sizes.items() if nbytes <= size <= largest]
            address = min(fitting, key=sizes.__getitem__, default=None)
            if address is not None:
                self._idle.remove(address)
            return address

    def _allocate_now(self, nbytes: int, caller: Caller, file: File | None = None) -> int:
        """Allocate a buffer that the caller waits for, or will wait for."""
        if nbytes > SMALL_BYTES and not caller.awaited():
            return self._allocate_patiently(nbytes, caller, file, in_advance=False)

        @contextmanager
        def step(rest: int) -> Iterator[None]:
            _check_not_cancelled(caller)
            yield

        address = 0
        try:
            # Ranks take turns, because each rank must see the memory that the others have taken.
            with nullcontext() if nbytes <= SMALL_BYTES else one_at_a_time("host-memory", TURN_S):
                address = self._allocate(nbytes, step, file)
        except BaseException:
            if address:  # the turn has ended with an error, and nobody will know the address
                self.unmap_file(address)
            raise
        return address

    def _allocate_patiently(
        self, nbytes: int, caller: Caller, file: File | None = None, *, in_advance: bool = True
    ) -> int:
        """Allocate a buffer in the background; see `Preparation`."""
        start = time.monotonic()  # of the latest step, which includes the locking of its pages
        # A copy of new weights would come too late with long rests. And who makes a shared buffer holds its lock, which
        # a sleep of another process may want.
        rests = in_advance and file is None
        is_new = file is None or file.is_new

        @contextmanager
        def step(rest: int) -> Iterator[int | None]:
            nonlocal start
            # outside the lock of all ranks, which others get meanwhile
            self.pace.rest(time.monotonic() - start if rests else 0.0, caller)
            _check_not_cancelled(caller)
            # per step: a sleep of another rank waits for one step
            with one_at_a_time("host-memory", TURN_S, caller.go_on):
                start = time.monotonic()
                _check_not_cancelled(caller)
                if is_new and in_advance:
                    self._check_spare(rest)
                elif is_new and rest:
                    self._check_free(rest)  # others may have taken memory between two steps
                small = rests and self.pace.engine_computes
                yield None if caller.awaited() else PIECE_BYTES if small else LARGE_PIECE_BYTES

        # Who frees a shared buffer holds its lock, which a sleep may want.
        between = at_once if file is not None else self._between_pieces(caller.awaited)
        return self._allocate(nbytes, step, file, between)

    def _allocate(self, nbytes: int, step: Step, file: File | None = None, pause: Callable[[], None] = at_once) -> int:
        with self._lock:
            if file is None or file.is_new:
                self._check(nbytes)
            try:
                if file is None:
                    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                else:
                    mapping = mmap.mmap(file.fd, nbytes, flags=mmap.MAP_SHARED)
            except OSError as error:
                raise self._refused(nbytes, refusal_of(error)) from error
            self._pending_bytes += nbytes
        try:
            self._fill(mapping, step, file)
        except BaseException:
            try:
                self._discard(address_of(mapping), mapping, pause)
            finally:
                with self._lock:
                    self._pending_bytes -= nbytes
            raise
        address = address_of(mapping)
        with self._lock:
            self._pending_bytes -= nbytes
            self._mappings[address] = mapping
        return address

    def _end_background_work(self) -> bool:
        """Wait until background work has freed its host memory. Returns whether any work ran."""
        with self._lock:
            self._waiting += 1
        try:
            return self._await_background_work()
        finally:
            with self._lock:
                self._waiting -= 1

    def _await_background_work(self) -> bool:
        settling = self._settling
        if settling is not None:
            await_end(settling)
            self._settling = None
        return settling is not None

    def prepare(self, sizes: Sequence[int]) -> Preparation | None:
        """Allocate buffers of these sizes in bytes in the background, if their allocation takes long."""
        return None  # pages that are not locked are made as fast as a copy to new ones would make them

    def prepare_file(self, nbytes: int, make: Callable[[Map], None]) -> Preparation | None:
        """Call `make` in the background, if mapping `nbytes` of a file takes long. `make` gets a patient `map_file`."""
        return None

    def note_sleep(self, preserving: bool) -> None:
        """Record that a sleep preserves or discards the weights. Does not wait."""
        self.demand.note(preserving)

    def settle(self) -> None:
        """Free in the background the memory that sleeps no longer need. Called some time after a sleep."""
        idle = self._idle or (self.shared is not None and self.shared.is_idle)
        if not self.demand.is_gone or not idle or (self._settling is not None and self._settling.is_alive()):
            return
        # Not a daemon: the interpreter waits for the thread at exit, so it makes no CUDA call while torch shuts down.
        settling = threading.Thread(target=self._free_unneeded, name="rl-memory-give-back")
        with suppress(RuntimeError):  # the thread cannot start: a later sleep tries again
            settling.start()
            self._settling = settling

    def _free_unneeded(self) -> None:
        self._free_idle(lambda mapping: self.demand.is_gone, self._between_pieces())
        if self.shared is not None and self.demand.is_gone:
            self.shared.free_idle()

    def release(self, address: int) -> None:
        """Return a buffer to the arena, which may keep it for the next `acquire`."""
        with self._lock:
            if address in self._mappings:
                self._idle.add(address)

    def free_idle(self) -> None:
        """Free the buffers that are not in use, also those that are being allocated in the background."""
        self._end_background_work()
        self._free_idle(lambda mapping: True)
        if self.shared is not None:
            self.shared.free_idle()

    def close(self) -> None:
        """Free all memory. Buffers in use become invalid."""
        self._end_background_work()
        if self.shared is not None:
            self.shared.close()
        with self._lock:
            self._idle = set(self._mappings)
        self._free_idle(lambda mapping: True)

    def _between_pieces(self, awaited: Asked = never) -> Callable[[], None]:
        """The pause of background work between two pieces of memory that it frees. `awaited`: whether somebody waits.

        The caller holds no lock that a sleep may want.
        """

        def pause() -> None:
            if self.is_busy and not (self._waiting or awaited()):
                time.sleep(PAUSE_S)

        return pause

    def _free_idle(self, chosen: Callable[[mmap.mmap], bool], pause: Callable[[], None] = at_once) -> None:
        """Free the idle buffers for which `chosen` returns `True`, one by one. `pause` comes between two pieces."""
        while True:
            with self._lock:
                address = next((address for address in self._idle if chosen(self._mappings[address])), None)
                if address is None:
                    return
                self._idle.remove(address)
                mapping = self._remove(address)
            self._discard_removed(address, mapping, pause)

    def _remove(self, address: int) -> mmap.mmap:
        mapping = self._mappings.pop(address)
        self._pending_bytes += len(mapping)
        return mapping

    def _discard_removed(self, address: int, mapping: mmap.mmap, pause: Callable[[], None] = at_once) -> None:
        nbytes = len(mapping)
        try:
            self._discard(address, mapping, pause)
        finally:
            with self._lock:
                self._pending_bytes -= nbytes

    def _check(self, nbytes: int) -> None:
        free = free_host_bytes()
        allowed = self._max_bytes - self._held() + self._margin_bytes if self._max_bytes else free
        if nbytes + self._margin_bytes > min(free, allowed):
            what = "allowed by host_arena_max_bytes" if allowed < free else "free"
            raise self._error(nbytes, min(free, allowed), what)

    def _check_free(self, nbytes: int) -> None:
        free = free_host_bytes()
        if nbytes + self._margin_bytes > free:
            raise self._error(nbytes, free)

    def _check_spare(self, nbytes: int) -> None:
        """Leave host memory for others: sleeps may never use memory that was allocated in advance."""
        free, total = host_memory_info()
        spare = total // SPARE_SHARE if self.demand.mode == "auto" else self._margin_bytes
        if nbytes + spare > free:
            raise self._error(nbytes, free - spare + self._margin_bytes, f"free beyond a reserve of {spare}")

    def _error(self, needed: int, free: int, what: str = "free") -> HostMemoryError:
        usable = max(free - self._margin_bytes, 0)
        return HostMemoryError(
            f"the backup needs {needed} bytes of host memory, but only {usable} are {what}",
            needed_bytes=needed,
            free_bytes=max(free, 0),
            margin_bytes=self._margin_bytes,
        )

    def _refused(self, nbytes: int, why: str) -> HostMemoryError:
        return HostMemoryError(
            f"the kernel refuses {nbytes} bytes of host memory for the backup: {why}",
            needed_bytes=nbytes,
            free_bytes=free_host_bytes(),
            margin_bytes=self._margin_bytes,
        )

    def _fill(self, mapping: mmap.mmap, step: Step, file: File | None = None) -> None:
        """Make the pages. Those of a file keep their content."""
        address, nbytes = address_of(mapping), len(mapping)
        for start in range(0, nbytes, STEP_BYTES):
            with step(nbytes - start) as bound:
                part = (address + start, min(STEP_BYTES, nbytes - start), *self._effort(bound is not None))
                code = populate(*part)
                if code == errno.EINVAL and file is None:  # an older kernel
                    touch(*part)
                elif code not in (0, errno.EINVAL):
                    raise self._refused(nbytes, os.strerror(code))

    def _effort(self, in_background: bool) -> tuple[int, int]:
        """The number of threads that make pages, and their niceness."""
        return (max(self._threads // BACKGROUND_SHARE, 1), BACKGROUND_NICE) if in_background else (self._threads, 0)

    def _discard(self, address: int, mapping: mmap.mmap, pause: Callable[[], None]) -> None:
        unmap(mapping, pause)


def _check_not_cancelled(caller: Caller) -> None:
    if not caller.go_on():
        raise AllocationCancelled


def unmap(mapping: mmap.mmap, pause: Callable[[], None]) -> None:
    """Free a mapping's memory in steps, between which other threads can run and map memory."""
    address, nbytes = address_of(mapping), len(mapping)
    for start in range(0, nbytes, STEP_BYTES):  # ctypes releases the GIL, and the kernel releases its lock
        pause()
        libc.madvise(address + start, min(STEP_BYTES, nbytes - start), mmap.MADV_DONTNEED)
    mapping.close()


def address_of(mapping: mmap.mmap) -> int:
    """The address of a writable mapping. Its buffer is not exported afterwards, so the mapping can be closed."""
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))
