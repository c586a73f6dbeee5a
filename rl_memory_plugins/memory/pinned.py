"""Pinned host memory for backups, allocated in a fraction of the time of torch's pinned tensors."""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import platform
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from rl_memory_plugins.memory.allocator import Block
from rl_memory_plugins.memory.arena import SMALL_BYTES, STEP_BYTES, PagedArena, Step, address_of
from rl_memory_plugins.memory.copies import LARGE_PIECE_BYTES, by_pieces, end_of_piece
from rl_memory_plugins.memory.host_memory import libc, whole_pages
from rl_memory_plugins.memory.pages import THREADS, populate, touch
from rl_memory_plugins.memory.preparation import (
    SLEEP,
    Caller,
    Make,
    Preparation,
    PrepareMode,
)
from rl_memory_plugins.memory.shared_buffers import File, Map
from rl_memory_plugins.memory.threads import await_end, in_parallel

logger = logging.getLogger(__name__)

UNLOCK_PAUSE_S = 0.001  # between two pieces, for the driver's other calls
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all contexts of the process
_MPOL_PREFERRED = 1
_MBIND = {"x86_64": 237, "aarch64": 235}


class PinnedArena(PagedArena):
    """An arena of page-locked huge pages on the NUMA node of the GPU. Several threads touch the pages.

    A buffer is one mapping. If page-locking fails, e.g. because of a container's limits, backups work at the speed of
    pageable memory, and `notes` reports the failure.

    Args:
        index: torch's ordinal of the GPU that copies to and from the arena.
        max_bytes, margin_bytes, mode: See `PagedArena`.
        threads: The number of threads that touch pages; by default one for each core, at most 16.
        serves: Whether the process answers requests meanwhile. To lock the pages of 15 GB takes the driver 0.4 s, and
            all work on the GPU waits for that, and for the unlocking (`integration/bench_driver.py` measures it). An
            engine therefore locks the pages in pieces. In the background each step locks one. Only `CudaDevice` may
            copy from and to such memory.
    """

    def __init__(
        self,
        index: int,
        max_bytes: int = 0,
        margin_bytes: int = 0,
        mode: PrepareMode = "auto",
        threads: int | None = None,
        *,
        serves: bool = False,
    ) -> None:
        super().__init__(max_bytes, margin_bytes, mode, threads)
        self._index = index
        self._node = numa_node(index)
        self._serves = serves
        self._registered: dict[int, list[int]] = {}  # the pieces' addresses, by their mapping's address
        self._preparations: list[Preparation] = []
        self._kept: list[mmap.mmap] = []  # page-locked mappings, which the GPU may still read

    def prepare(self, sizes: Sequence[int]) -> Preparation | None:
        """Allocate idle buffers of these sizes in the background, for later calls of `acquire`.

        Meanwhile an `acquire` that fits a pending buffer waits for it; small and other sizes do not wait. If the host
        lacks memory for a buffer, the `acquire` allocates it, or raises.
        """
        whole = [whole_pages(nbytes) for nbytes in sizes if nbytes]
        return self._prepare(whole, lambda nbytes, caller: self.release(self._allocate_patiently(nbytes, caller)))

    def prepare_file(self, nbytes: int, make: Callable[[Map], None]) -> Preparation | None:
        def in_background(_: int, caller: Caller) -> None:
            make(lambda file, size: self._allocate_patiently(size, caller, file))

        return self._prepare([nbytes], in_background)

    def _prepare(self, sizes: Sequence[int], make: Make) -> Preparation | None:
        if self.demand.mode == "first_use":
            return None
        try:
            preparation = Preparation(sizes, make)
        except RuntimeError:  # the thread cannot start
            logger.exception("host memory is not allocated in advance; a sleep that needs it allocates it")
            return None
        self._preparations = [*self._running(), preparation]
        return preparation

    @property
    def is_preparing(self) -> bool:
        """Whether buffers are being allocated in the background."""
        return bool(self._running())

    def _running(self) -> list[Preparation]:
        return [preparation for preparation in self._preparations if preparation.is_alive()]

    def acquire(self, nbytes: int, caller: Caller = SLEEP) -> int:
        if nbytes > SMALL_BYTES:
            running = self._running()
            if caller.awaited() and any(preparation.is_making(nbytes) for preparation in running):
                for preparation in running:  # the others too: they take turns with that one
                    preparation.hurry()
            for preparation in running:
                preparation.await_buffer(nbytes, caller)
        return super().acquire(nbytes, caller)

    def note_sleep(self, preserving: bool) -> None:
        super().note_sleep(preserving)
        if self.demand.is_gone:
            for preparation in self._running():
                preparation.end()

    def _await_background_work(self) -> bool:
        running = self._running()
        for preparation in running:
            preparation.end()
        for preparation in running:
            if preparation is not threading.current_thread():  # a finaliser may run anywhere
                await_end(preparation)
        return super()._await_background_work() or bool(running)

    def _fill(self, mapping: mmap.mmap, step: Step, file: File | None = None) -> None:
        address, nbytes = address_of(mapping), len(mapping)
        libc.madvise(address, nbytes, mmap.MADV_HUGEPAGE)  # a kernel that lacks either advice ignores it
        libc.madvise(address, nbytes, mmap.MADV_DONTFORK)  # copy-on-write after a fork would move our pages
        prefer_node(address, nbytes, self._node)
        back: Callable[..., int | None] = touch if file is None else populate
        start, locked = 0, 0
        while start < nbytes:
            with step(nbytes - start) as bound:
                end = start + STEP_BYTES if bound is None else end_of_piece(address + start, bound) - address
                made = min(end, nbytes) - start
                code = back(address + start, made, *self._effort(bound is not None))
                if code not in (None, 0, errno.EINVAL):
                    raise self._refused(nbytes, os.strerror(code))
            start += made
            if bound is not None and self._serves:
                self._lock_part(address, locked, start)
                locked = start
        if locked < nbytes:
            with step(0):
                self._lock_part(address, locked, nbytes)

    def _lock_part(self, mapping: int, start: int, end: int) -> None:
        """Lock the pages of a part of a mapping. What is refused stays pageable."""
        (code,) = in_parallel([partial(self._lock_pages, mapping, start, end)], THREADS, to_the_end=True)
        if code != 0:
            note = f"host memory could not be page-locked (CUDA error {code}): copies take longer"
            if note not in self.notes:
                logger.warning(note)
                self.notes.append(note)

    # An error stays the last CUDA error of the thread, and torch would raise it at its next kernel launch. So these
    # functions run in a thread of their own. The thread notes what the driver has done: no interrupt of the caller
    # comes between the two there.

    def _lock_pages(self, mapping: int, start: int, end: int) -> int:
        part = Block(mapping + start, end - start)
        for piece, _ in by_pieces([(part, part.address)], LARGE_PIECE_BYTES) if self._serves else [(part, 0)]:
            code = self._register(*piece)
            if code != 0:
                return code
            self._registered.setdefault(mapping, []).append(piece.address)
        return 0

    def _unlock_pages(self, mapping: int, pause: Callable[[], None]) -> int:
        pieces = self._registered[mapping]
        while pieces:
            pause()
            code = self._unregister(pieces[-1])
            if code != 0:
                return code
            pieces.pop()
            time.sleep(UNLOCK_PAUSE_S if pieces else 0)
        del self._registered[mapping]
        return 0

    def _register(self, address: int, nbytes: int) -> int:
        with torch.cuda.device(self._index):  # a new thread would create a context on GPU 0
            return int(torch.cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE))

    def _unregister(self, address: int) -> int:
        with torch.cuda.device(self._index):
            return int(torch.cuda.cudart().cudaHostUnregister(address))

    def _discard(self, address: int, mapping: mmap.mmap, pause: Callable[[], None]) -> None:
        if address in self._registered:
            self._kept.append(mapping)
            (code,) = in_parallel([partial(self._unlock_pages, address, pause)], THREADS, to_the_end=True)
            if code != 0:
                logger.error("host memory could not be unlocked (CUDA error %d), so it is not freed", code)
                return
            self._kept.remove(mapping)
        super()._discard(address, mapping, pause)


def prefer_node(address: int, nbytes: int, node: int | None) -> None:
    """Ask the kernel to place the range's pages on one NUMA node. The kernel may ignore the hint."""
    number = _MBIND.get(platform.machine())
    if node is None or number is None:
        return
    mask = (1 << node).to_bytes(128, "little")
    libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_size_t(nbytes),
        ctypes.c_int(_MPOL_PREFERRED),
        ctypes.c_char_p(mask),
        ctypes.c_ulong(8 * len(mask)),
        ctypes.c_uint(0),
    )


def numa_node(index: int) -> int | None:
    """The NUMA node of a GPU; None if it is unknown."""
    properties = torch.cuda.get_device_properties(index)
    try:
        domain, bus, device = properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id
        node = int(Path(f"/sys/bus/pci/devices/{domain:04x}:{bus:02x}:{device:02x}.0/numa_node").read_text())
    except (AttributeError, OSError, ValueError):  # an older torch, a missing file, or a file without a number
        return None
    return node if node >= 0 else None
