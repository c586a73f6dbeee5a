"""Pinned host memory for backups, at a fraction of the time that torch's own pinned tensors take to make."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import platform
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rl_memory_plugins.memory.backup import STEP_BYTES, PagedArena, Step, address_of
from rl_memory_plugins.memory.host_memory import host_memory_info
from rl_memory_plugins.memory.preparation import GivenUp, Preparation, Prepares, always
from rl_memory_plugins.private_directory import one_at_a_time

logger = logging.getLogger(__name__)

HUGE_PAGE = 2 << 20
TURN_S = 60.0  # for so long a rank waits for another that fills host memory
SMALL_BYTES = 32 << 20  # so little is made in milliseconds, and without waiting for anybody
SPARE_SHARE = 4  # of a host's memory, one part in so many stays free of what is made on a guess
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
        prepares: when memory for all weights is made, and whether it is given back.
        threads: how many threads make pages; by default one for each core, at most 16.
    """

    def __init__(
        self,
        index: int,
        max_bytes: int = 0,
        margin_bytes: int = 0,
        prepares: Prepares = "auto",
        threads: int | None = None,
    ) -> None:
        super().__init__(max_bytes, margin_bytes, prepares)
        self._threads = threads or min(len(os.sched_getaffinity(0)), 16)
        self._index = index
        self._node = numa_node(index)
        self._registered: set[int] = set()
        self._preparations: list[Preparation] = []
        self._kept: list[mmap.mmap] = []  # still page-locked: the GPU may go on reading them

    def prepare(self, sizes: Sequence[int]) -> Preparation | None:
        """Make idle buffers of these sizes in the background, so that no `acquire` of the sizes has to.

        An `acquire` of one of the sizes meanwhile waits and then finds its buffer; any other, and one of little, waits
        for none of it. What cannot be made is left to the `acquire`, which raises in its turn.
        """
        if self.demand.prepares == "first_use":
            return None
        try:
            preparation = Preparation(sizes, self._make_idle)
        except RuntimeError:  # no more threads
            logger.exception("host memory is not made in advance; the first sleep does it")
            return None
        self._preparations = [*self._running(), preparation]
        return preparation

    def _running(self) -> list[Preparation]:
        return [preparation for preparation in self._preparations if preparation.is_running]

    def acquire(self, nbytes: int, go_on: Callable[[], bool] = always) -> int:
        if nbytes > SMALL_BYTES:
            for preparation in self._running():
                preparation.await_buffer(nbytes, go_on)
        return super().acquire(nbytes, go_on)

    def note_sleep(self, preserving: bool) -> None:
        super().note_sleep(preserving)
        if self.demand.is_gone:
            for preparation in self._running():
                preparation.end()

    def _make_idle(self, nbytes: int, go_on: Callable[[], bool]) -> None:
        @contextmanager
        def step(rest: int) -> Iterator[None]:
            if not go_on():
                raise GivenUp
            with one_at_a_time("host-memory", TURN_S, go_on):  # for each step: others' sleeps need not wait for all
                if not go_on():
                    raise GivenUp
                self._check_spare(rest)
                yield

        self.release(self._make(nbytes, step))

    def _check_spare(self, nbytes: int) -> None:
        """What is made on a guess, others may need more."""
        free, total = host_memory_info()
        spare = total // SPARE_SHARE if self.demand.prepares == "auto" else self._margin_bytes
        if nbytes + spare > free:
            raise self._error(nbytes, free - spare + self._margin_bytes, f"free beside {spare} to spare")

    def _make_way(self) -> bool:
        running = self._running()
        for preparation in running:
            preparation.end()
        for preparation in running:
            preparation.join()
        return super()._make_way() or bool(running)

    def _fill(self, mapping: mmap.mmap, step: Step) -> None:
        address, nbytes = address_of(mapping), len(mapping)
        _libc.madvise(address, nbytes, mmap.MADV_HUGEPAGE)  # either may be unknown to the kernel: no matter
        _libc.madvise(address, nbytes, mmap.MADV_DONTFORK)  # a fork's copy-on-write would move our pages
        prefer_node(address, nbytes, self._node)
        for start in range(0, nbytes, STEP_BYTES):
            with step(nbytes - start):
                touch(address + start, min(STEP_BYTES, nbytes - start), self._threads)
        with step(0):
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

    def _taking_turns(self, nbytes: int) -> AbstractContextManager[None]:
        return nullcontext() if nbytes <= SMALL_BYTES else one_at_a_time("host-memory", TURN_S)

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

    Unlike an executor's these threads still start while Python ends. No call outlives this one, whose caller may unmap
    what they write to.
    """
    futures: list[Future[Any]] = [Future() for _ in calls]

    def run(future: Future[Any], call: Callable[[], Any]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    try:
        for future, call in zip(futures, calls, strict=True):
            threading.Thread(target=run, args=(future, call), name="rl-memory-pages", daemon=True).start()
    except BaseException:
        for future in futures:  # a thread whose start was interrupted may begin yet: then it does nothing
            future.cancel()
        raise
    finally:
        _await(futures)
    return [future.result() for future in futures]


def _await(futures: Sequence[Future[Any]]) -> None:
    """Wait for those that were not cancelled, whatever a signal's handler raises meanwhile."""
    interrupted: BaseException | None = None
    while running := [future for future in futures if not future.done()]:
        try:
            wait(running)
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
