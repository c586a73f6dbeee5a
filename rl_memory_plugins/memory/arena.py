"""Host memory for backups: pageable memory that is kept and reused."""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress

from rl_memory_plugins.errors import HostMemoryError
from rl_memory_plugins.memory.host_memory import free_host_bytes, libc, refusal_of, whole_pages
from rl_memory_plugins.memory.preparation import (
    MAX_OVERSIZE,
    PAUSE_S,
    SLEEP,
    Asked,
    Caller,
    Demand,
    Pace,
    Preparation,
    PrepareMode,
)
from rl_memory_plugins.memory.shared_buffers import File, Map, SharedBuffers
from rl_memory_plugins.memory.threads import await_end

#: Bytes that are copied, allocated or freed between two checks for cancellation; a few milliseconds of work.
STEP_BYTES = 256 << 20

Step = Callable[[int], AbstractContextManager[bool]]
"""The context of one step of an allocation. The argument is the number of bytes still to allocate. The context's value
says whether the step leaves the processors to others. May raise `AllocationCancelled`."""


def never() -> bool:
    return False


def at_once() -> None:
    """No pause."""


class PagedArena:
    """Host memory for backups in anonymous mappings. The arena keeps freed buffers and reuses them by best fit.

    Args:
        max_bytes: The most bytes that the arena may hold; with 0 only the free host memory limits it.
        margin_bytes: Bytes of host memory that must stay free after an `acquire`.
        mode: When memory for all weights is allocated, and whether it is freed again; see `config.py`.

    Attributes:
        notes: Limitations of the arena, for `memory_status`.
        shared: Buffers that this process shares with others; `None` if it shares none.
        is_busy: Whether a sleep or a wake acts, as the manager says. Meanwhile the background gives back little memory:
            each of the hundreds of driver calls of a sleep or a wake waits while a piece is unlocked.
        pace: The pauses of what is allocated in the background. The engine tells it of its steps.
    """

    def __init__(self, max_bytes: int = 0, margin_bytes: int = 0, mode: PrepareMode = "auto") -> None:
        self.notes: list[str] = []
        self.shared: SharedBuffers | None = None
        self.is_busy = False
        self.demand = Demand(mode)
        self.pace = Pace()
        self._max_bytes = max_bytes
        self._margin_bytes = margin_bytes
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
        """Allocate a buffer that the caller waits for."""
        return self._allocate(nbytes, lambda rest: nullcontext(False), file)

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
                raise HostMemoryError(
                    f"the kernel refuses {nbytes} bytes of host memory for the backup: {refusal_of(error)}",
                    needed_bytes=nbytes,
                    free_bytes=free_host_bytes(),
                    margin_bytes=self._margin_bytes,
                ) from error
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
        return None  # the kernel allocates pageable memory at the first touch

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

    def _error(self, needed: int, free: int, what: str = "free") -> HostMemoryError:
        usable = max(free - self._margin_bytes, 0)
        return HostMemoryError(
            f"the backup needs {needed} bytes of host memory, but only {usable} are {what}",
            needed_bytes=needed,
            free_bytes=max(free, 0),
            margin_bytes=self._margin_bytes,
        )

    def _fill(self, mapping: mmap.mmap, step: Step, file: File | None = None) -> None:
        """Touch and pin the pages, in subclasses that do so. The pages of a file keep their content."""

    def _discard(self, address: int, mapping: mmap.mmap, pause: Callable[[], None]) -> None:
        unmap(mapping, pause)


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
