"""Copies between host memory that are faster than one core, whatever OMP_NUM_THREADS a trainer runs with."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from rl_memory_plugins.errors import WeightUpdateError

if TYPE_CHECKING:
    import torch

_SINGLE = 2 << 20
"""Up to so many bytes one thread is faster than several."""


class HostCopier:
    """Copies with several threads, which start when they are needed first."""

    def __init__(self, threads: int | None = None) -> None:
        self._threads = threads or min(len(os.sched_getaffinity(0)), 16)
        self._pool: ThreadPoolExecutor | None = None
        self._pending: list[tuple[torch.Tensor, torch.Tensor]] = []

    def add(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Have the next `run` copy the bytes of one contiguous CPU tensor to another.

        Raises:
            WeightUpdateError: one has no memory: it is a DTensor or another wrapper, or is offloaded.
        """
        for tensor in (destination, source):
            # An address that is not more than the offset in the storage: that of the storage is 0.
            if tensor.nbytes and tensor.data_ptr() <= tensor.storage_offset() * tensor.element_size():
                raise WeightUpdateError(
                    f"a {type(tensor).__name__} of {tensor.dtype} {list(tensor.shape)} has no memory that can be "
                    "copied: it is sharded, another wrapper, or offloaded"
                )
        self._pending.append((destination, source))

    def run(self) -> None:
        """Do all copies that were added; the threads get equal shares of the bytes."""
        ranges = [(to.data_ptr(), source.data_ptr(), source.nbytes) for to, source in self._pending]
        total = sum(nbytes for _, _, nbytes in ranges)
        if total <= _SINGLE or self._threads == 1:
            _move(ranges)
        else:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._threads, "rl-memory-copy")
            list(self._pool.map(_move, _shares(ranges, -(-total // self._threads))))
        self._pending.clear()

    def close(self) -> None:
        self._pending.clear()
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


def _move(ranges: Sequence[tuple[int, int, int]]) -> None:
    for to, origin, nbytes in ranges:
        ctypes.memmove(to, origin, nbytes)  # which releases the GIL


def _shares(ranges: Sequence[tuple[int, int, int]], share: int) -> Iterator[list[tuple[int, int, int]]]:
    """The ranges, cut so that each list has `share` bytes, and the last one the rest."""
    found: list[tuple[int, int, int]] = []
    room = share
    for to, origin, nbytes in ranges:
        done = 0
        while done < nbytes:
            step = min(nbytes - done, room)
            found.append((to + done, origin + done, step))
            done += step
            room -= step
            if room == 0:
                yield found
                found, room = [], share
    if found:
        yield found
