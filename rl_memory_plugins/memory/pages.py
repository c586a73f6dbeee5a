"""Gives ranges of host memory their pages, in several threads."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from rl_memory_plugins.memory.host_memory import MADV_POPULATE_WRITE, libc
from rl_memory_plugins.memory.threads import in_parallel

HUGE_PAGE = 2 << 20
THREADS = "rl-memory-pages"
"""The name of the threads."""


def touch(address: int, nbytes: int, threads: int, nice: int = 0) -> None:
    """Make the kernel back every page of the range with memory, in several threads of this niceness. The pages read as
    zeros."""

    def clear(start: int, size: int) -> int:
        ctypes.memset(start, 0, size)  # releases the GIL
        return 0

    # on huge pages memset is twice as fast as madvise(MADV_POPULATE_WRITE), and half as fast on small ones
    _in_pieces(address, nbytes, threads, nice, clear)


def populate(address: int, nbytes: int, threads: int, nice: int = 0) -> int:
    """The same, for pages that may have content, which stays.

    Returns: 0, or the error number of the kernel: EINVAL before Linux 5.14.
    """

    def ask(start: int, size: int) -> int:
        return ctypes.get_errno() if libc.madvise(start, size, MADV_POPULATE_WRITE) != 0 else 0

    return _in_pieces(address, nbytes, threads, nice, ask)


def _in_pieces(address: int, nbytes: int, threads: int, nice: int, call: Callable[[int, int], int]) -> int:
    step = max(-(-nbytes // threads // HUGE_PAGE) * HUGE_PAGE, HUGE_PAGE)
    end, caller = address + nbytes, threading.get_ident()

    def run(start: int) -> int:
        if nice and threading.get_ident() != caller:
            with suppress(OSError):  # a sandbox may forbid the call
                os.setpriority(os.PRIO_PROCESS, 0, nice)  # on Linux that is this thread, which ends with `run`
        return call(start, min(step, end - start))

    pieces = [partial(run, start) for start in range(address, end, step)]
    return max(in_parallel(pieces, THREADS, to_the_end=True), default=0)
