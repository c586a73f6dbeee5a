"""Copies between host memory that are faster than one core, whatever OMP_NUM_THREADS a trainer runs with."""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_PIECE = 4 << 20


class HostCopier:
    """Copies with several threads, which start when they are needed first."""

    def __init__(self, threads: int | None = None) -> None:
        self._threads = threads or min(len(os.sched_getaffinity(0)), 8)
        self._pool: ThreadPoolExecutor | None = None

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Copy the bytes of one contiguous CPU tensor to another."""
        to, origin, nbytes = destination.data_ptr(), source.data_ptr(), source.nbytes
        if nbytes <= _PIECE or self._threads == 1:
            ctypes.memmove(to, origin, nbytes)  # which releases the GIL
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, "rl-memory-copy")

        def piece(start: int) -> None:
            ctypes.memmove(to + start, origin + start, min(_PIECE, nbytes - start))

        list(self._pool.map(piece, range(0, nbytes, _PIECE)))

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
