"""Pinned host memory for backups, at a fraction of the time that torch's own pinned tensors take to make."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import platform
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rl_memory_plugins.errors import RLMemoryError
from rl_memory_plugins.memory.backup import PagedArena, address_of
from rl_memory_plugins.private_directory import one_at_a_time

logger = logging.getLogger(__name__)

HUGE_PAGE = 2 << 20
TURN_S = 60.0  # for so long a rank waits for another that fills host memory
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context of the process
_MPOL_PREFERRED = 1
_MBIND = {"x86_64": 237, "aarch64": 235}

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class PinnedArena(PagedArena):
    """An arena whose buffers are huge pages, made by several threads, near the GPU, and page-locked.

    A buffer is one mapping and one registration. Where page-locking is refused (a container's limits, say),
    backups still work at the speed of pageable memory, and `notes` says so.

    Args:
        index: torch's ordinal of the GPU that copies to and from it.
        max_bytes: bound on what the arena holds; 0 means only free host memory bounds it.
        margin_bytes: host memory that must stay free after an `acquire`.
        threads: how many threads make pages; by default one for each core, at most 16.
    """

    def __init__(self, index: int, max_bytes: int = 0, margin_bytes: int = 0, threads: int | None = None) -> None:
        super().__init__(max_bytes, margin_bytes)
        self._threads = threads or min(len(os.sched_getaffinity(0)), 16)
        self._index = index
        self._node = numa_node(index)
        self._registered: set[int] = set()
        self._preparing: list[threading.Thread] = []
        self._kept: list[mmap.mmap] = []  # still page-locked: the GPU may go on reading them

    def prepare(self, sizes: Sequence[int]) -> threading.Thread | None:
        """Make idle buffers of these sizes in the background, so that no `acquire` of the sizes has to.

        An `acquire` meanwhile waits and then finds its buffer. What cannot be made is left to that `acquire`,
        which raises in its turn.
        """
        thread = threading.Thread(target=self._make_idle, args=(list(sizes),), name="rl-memory-arena", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads
            logger.exception("host memory is not made in advance; the first sleep does it")
            return None
        self._preparing = [*(one for one in self._preparing if one.is_alive()), thread]
        return thread

    def acquire(self, nbytes: int) -> int:
        for thread in self._preparing:
            thread.join()
        return super().acquire(nbytes)

    def _make_idle(self, sizes: list[int]) -> None:
        made = []
        try:
            for nbytes in sorted(sizes, reverse=True):
                made.append(super().acquire(nbytes))  # noqa: PERF401 - those made must be known if one fails
        except RLMemoryError as error:
            logger.warning("the host arena was not prepared: %s", error)
        finally:
            for address in made:
                self.release(address)

    def close(self) -> None:
        for thread in self._preparing:
            thread.join()
        super().close()

    def _prepare(self, mapping: mmap.mmap) -> None:
        address, nbytes = address_of(mapping), len(mapping)
        _libc.madvise(address, nbytes, mmap.MADV_HUGEPAGE)  # either may be unknown to the kernel: no matter
        _libc.madvise(address, nbytes, mmap.MADV_DONTFORK)  # a fork's copy-on-write would move our pages
        prefer_node(address, nbytes, self._node)
        touch(address, nbytes, self._threads)
        (code,) = _in_threads([partial(self._register, address, nbytes)])
        if code == 0:
            self._registered.add(address)
        else:
            note = f"host memory could not be page-locked (CUDA error {code}): copies are slower"
            logger.warning(note)
            if note not in self.notes:
                self.notes.append(note)

    # A refusal stays behind as the thread's last error, which torch would raise where it next launches a kernel: so
    # both of these run in a thread of their own.

    def _register(self, address: int, nbytes: int) -> int:
        with torch.cuda.device(self._index):  # a new thread's is GPU 0, where this would make a context
            return int(torch.cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE))

    def _unregister(self, address: int) -> int:
        with torch.cuda.device(self._index):
            return int(torch.cuda.cudart().cudaHostUnregister(address))

    def _taking_turns(self) -> AbstractContextManager[None]:
        return one_at_a_time("host-memory", TURN_S)

    def _discard(self, address: int, mapping: mmap.mmap) -> None:
        if address in self._registered:
            self._registered.remove(address)
            self._kept.append(mapping)
            (code,) = _in_threads([partial(self._unregister, address)])
            if code != 0:
                logger.error("host memory stays page-locked (CUDA error %d) and is not given back", code)
                return
            self._kept.remove(mapping)
        super()._discard(address, mapping)


def touch(address: int, nbytes: int, threads: int) -> None:
    """Have the kernel back every page of the range with memory, with several threads at it."""
    step = max(-(-nbytes // threads // HUGE_PAGE) * HUGE_PAGE, HUGE_PAGE)

    def write(start: int) -> None:
        # twice as fast as madvise(MADV_POPULATE_WRITE) on huge pages; ctypes releases the GIL
        ctypes.memset(start, 0, min(step, address + nbytes - start))

    _in_threads([partial(write, start) for start in range(address, address + nbytes, step)])


def _in_threads(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run the calls at once, each in a thread of its own, and return what they return.

    Unlike an executor's these threads still start while Python ends. None outlives the call, whose caller may unmap
    what they write to.
    """
    futures: list[Future[Any]] = [Future() for _ in calls]

    def run(future: Future[Any], call: Callable[[], Any]) -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threads = [
        threading.Thread(target=run, args=(future, call), name="rl-memory-pages", daemon=True)
        for future, call in zip(futures, calls, strict=True)
    ]
    try:
        for thread in threads:
            thread.start()
    finally:
        _join(threads)
    return [future.result() for future in futures]


def _join(threads: Sequence[threading.Thread]) -> None:
    """Wait for those that were started, whatever a signal's handler raises meanwhile."""
    interrupted: BaseException | None = None
    for thread in threads:
        while thread.is_alive():
            try:
                thread.join()
            except BaseException as error:
                interrupted = error
    if interrupted is not None:
        raise interrupted


def prefer_node(address: int, nbytes: int, node: int | None) -> None:
    """Ask for the range's pages on one NUMA node; a hint, which the kernel may not follow."""
    number = _MBIND.get(platform.machine())
    if node is None or number is None:
        return
    mask = (ctypes.c_ulong * 16)()
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask[node // bits] = 1 << node % bits
    _libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_size_t(nbytes),
        ctypes.c_int(_MPOL_PREFERRED),
        mask,
        ctypes.c_ulong(16 * bits),
        ctypes.c_uint(0),
    )


def numa_node(index: int) -> int | None:
    """The NUMA node that a GPU is attached to, or None where that cannot be known."""
    properties = torch.cuda.get_device_properties(index)
    try:
        domain, bus, device = properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id
        node = int(Path(f"/sys/bus/pci/devices/{domain:04x}:{bus:02x}:{device:02x}.0/numa_node").read_text())
    except (AttributeError, OSError, ValueError):  # an older torch, no such file, or no number in it
        return None
    return node if node >= 0 else None
