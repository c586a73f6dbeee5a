"""Finds the host copy of equal bytes that another process has made, or makes a copy that others find.

A process maps at most one shared buffer, and keeps the mapping between sleeps, because mapping and page-locking take
longer than a copy. Processes with equal bytes map the same buffer. When the bytes have changed in all of them, the
first that sleeps writes the new bytes to that buffer, and the others find them there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum
from typing import NamedTuple, Protocol

from rl_memory_plugins.memory.open_buffers import Entry, others, turn
from rl_memory_plugins.memory.preparation import MAX_OVERSIZE, SLEEP, AllocationCancelled, Caller, Preparation
from rl_memory_plugins.memory.shared_buffer import Header, SharedBuffer

#: How long a process waits for another that writes equal bytes: 10 s, and 1 s per GB for memory and the copy.
WAIT_S = 10.0
WAIT_BYTES_PER_S = 1e9
POLL_S = 0.005


class File(NamedTuple):
    """An open file to map, so that other processes can map it too."""

    fd: int
    is_new: bool  # its pages take new memory


Map = Callable[[File, int], int]
"""Maps the first bytes of a file, ready for copies, and returns the address."""


class Mapper(Protocol):
    """What the buffers need of the arena."""

    def map_file(self, file: File, nbytes: int, caller: Caller = SLEEP) -> int: ...
    def unmap_file(self, address: int) -> None: ...
    def prepare_file(self, nbytes: int, make: Callable[[Map], None]) -> Preparation | None: ...


class Held(Enum):
    """The lock of a buffer that this process has taken."""

    SHARED = "the buffer holds the bytes"
    EXCLUSIVE = "the buffer is ours to write"
    NONE = "another process writes the bytes to it"


class SharedBuffers:
    """The shared buffer of this process. One thread at a time calls `lease`.

    Args:
        arena: Maps the buffer, and counts its bytes.
    """

    def __init__(self, arena: Mapper) -> None:
        self._arena = arena
        self._buffer: SharedBuffer | None = None
        self._entry: Entry | None = None
        self._leased = False
        self._preparation: Preparation | None = None
        self._lock = threading.RLock()  # held while the buffer is exchanged, mapped or written

    @property
    def is_idle(self) -> bool:
        """Whether a buffer is mapped that no backup of this process relies on."""
        return self._buffer is not None and not self._leased

    @property
    def held(self) -> dict[str, int]:
        """The bytes of the mapped buffer, by its name on this host. Does not wait."""
        buffer = self._buffer
        return {} if buffer is None or not buffer.address else {buffer.name: buffer.nbytes}

    def prepare(self, key: bytes, nbytes: int) -> None:
        """Map a buffer for these bytes in the background, if that takes long. Processes with equal bytes map the same.

        Args:
            key, nbytes: As for `lease`.
        """

        def make(map_file: Map) -> None:
            if not self._lock.acquire(blocking=False):  # a sleep is faster, and must not wait for this thread
                return
            try:
                if self._buffer is None:
                    with turn():
                        buffer, held = self._take(key, nbytes)
                    self._map(buffer, held, map_file)
                    if held is not Held.NONE:
                        buffer.unlock()
            finally:
                self._lock.release()

        self._preparation = self._arena.prepare_file(nbytes, make)

    def lease(
        self,
        key: bytes,
        nbytes: int,
        write: Callable[[int], bool],
        caller: Caller = SLEEP,
    ) -> int | None:
        """Get a complete copy that no process changes until `end_lease`, and return its address in this process.

        Args:
            key: Names the bytes. Processes with equal bytes give equal keys.
            nbytes: Their number.
            write: Writes the bytes to an address, and returns whether they still had this key at the end.
            caller: For whom this call waits and allocates.

        Returns: the address; `None` if `write` returned `False`, or another backup of this process has the lease.

        Raises:
            HostMemoryError: no other process has a copy, and host memory does not suffice for one.
            AllocationCancelled: by the caller.
            OSError: the kernel refuses to share memory.
        """
        if self._preparation is not None:
            self._preparation.await_buffer(nbytes, caller)
        deadline = time.monotonic() + WAIT_S + nbytes / WAIT_BYTES_PER_S
        with self._lock:
            if self._leased:  # the process maps one buffer only
                return None
            while True:
                with turn():
                    buffer, held = self._take(key, nbytes, ignore_writers=time.monotonic() > deadline)
                self._map(buffer, held, lambda file, size: self._arena.map_file(file, size, caller))
                if held is not Held.NONE:
                    break
                if not caller.go_on():
                    raise AllocationCancelled
                time.sleep(POLL_S)
            if held is Held.EXCLUSIVE and not _written(buffer, key, write):
                return None
            self._leased = True
            return buffer.address

    def end_lease(self) -> None:
        """Let other processes write to the buffer. The mapping stays for the next lease."""
        with self._lock:
            if self._leased and self._buffer is not None:
                self._leased = False
                self._buffer.unlock()

    def free_idle(self) -> None:
        """Unmap the buffer, unless a backup of this process relies on it or a thread is about to."""
        if self._lock.acquire(blocking=False):  # that thread may wait for the caller
            try:
                if self.is_idle:
                    self._drop()
            finally:
                self._lock.release()

    def close(self) -> None:
        """Unmap the buffer. A backup that relies on it becomes invalid."""
        with self._lock:
            self._leased = False
            self._drop()

    def _take(self, key: bytes, nbytes: int, ignore_writers: bool = False) -> tuple[SharedBuffer, Held]:
        """Choose the buffer for the key, lock it, and make it the own one. The caller holds `turn`."""
        own = self._buffer
        found = [*([own] if own is not None else []), *others()]
        try:
            buffer, held = _choose(found, key)
            if buffer is None or (held is Held.NONE and ignore_writers):
                held = Held.EXCLUSIVE
                if own is not None and nbytes <= own.nbytes <= MAX_OVERSIZE * nbytes and own.lock(exclusive=True):
                    buffer = own
                else:
                    buffer = SharedBuffer.create(nbytes)
                    found.append(buffer)
                    buffer.lock(exclusive=True)
            if held is Held.EXCLUSIVE:
                buffer.header = Header(complete=False, key=key)
            if buffer is not own:
                self._drop()
                self._buffer = buffer
                self._entry = Entry(buffer)
            return buffer, held
        finally:
            for other in found:
                if other is not own and other is not self._buffer:
                    other.close()

    def _map(self, buffer: SharedBuffer, held: Held, map_file: Map) -> None:
        if buffer.address:
            return
        is_new = held is Held.EXCLUSIVE and not buffer.has_memory  # another writer has checked the free memory
        try:
            buffer.address = map_file(File(buffer.fd, is_new), buffer.nbytes)
            buffer.allow_writes(False)
        except BaseException:
            self._drop()
            raise

    def _drop(self) -> None:
        buffer, entry, self._buffer, self._entry = self._buffer, self._entry, None, None
        if entry is not None:
            entry.remove()
        if buffer is not None:
            if buffer.address:
                self._arena.unmap_file(buffer.address)
            buffer.close()


def _choose(found: Sequence[SharedBuffer], key: bytes) -> tuple[SharedBuffer | None, Held]:
    """The best buffer for the key, with its lock; the first of equally good ones."""
    written: SharedBuffer | None = None
    empty: SharedBuffer | None = None
    for buffer in found:
        if buffer.header.key != key:
            continue
        if not buffer.lock(exclusive=False):
            written = written or buffer
        elif buffer.header == Header(complete=True, key=key):  # nobody can write to it any more
            return buffer, Held.SHARED
        else:  # prepared for these bytes, or its writer has died
            buffer.unlock()
            empty = empty or buffer
    if written is None and empty is not None and empty.lock(exclusive=True):
        return empty, Held.EXCLUSIVE
    return written, Held.NONE


def _written(buffer: SharedBuffer, key: bytes, write: Callable[[int], bool]) -> bool:
    """Write to the exclusively locked buffer. Returns whether the buffer is complete, and its lock shared."""
    complete = False
    try:
        buffer.allow_writes(True)
        if write(buffer.address):
            buffer.allow_writes(False)
            buffer.header = Header(complete=True, key=key)
            with turn():
                complete = buffer.share_lock() and buffer.header == Header(complete=True, key=key)
    finally:
        if not complete:
            with suppress(OSError):
                buffer.allow_writes(False)
            buffer.unlock()
    return complete
