"""Host-to-host copies with several threads, independent of the trainer's OMP_NUM_THREADS."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from rl_memory_plugins.errors import WeightUpdateError

if TYPE_CHECKING:
    import torch

_ONE_THREAD_BYTES = 2 << 20
"""Up to this many bytes, one thread is faster than several."""


class HostCopier:
    """Copies with several threads. The first large `run` starts the threads."""

    def __init__(self, threads: int | None = None) -> None:
        self._threads = threads or min(len(os.sched_getaffinity(0)), 16)
        self._pool = ThreadPoolExecutor(self._threads, "rl-memory-copy")
        self._pending: list[tuple[torch.Tensor, torch.Tensor]] = []

    def add(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Add a copy between contiguous CPU tensors of equal size to the next `run`.

        Raises:
            WeightUpdateError: a tensor has no memory: it is offloaded, a DTensor, or another tensor subclass.
        """
        for tensor in (destination, source):
            require_memory(tensor)
        self._pending.append((destination, source))

    def run(self) -> None:
        """Run all added copies. Each thread gets an equal share of the bytes."""
        ranges = [(to.data_ptr(), source.data_ptr(), source.nbytes) for to, source in self._pending]
        total = sum(nbytes for _, _, nbytes in ranges)
        if total <= _ONE_THREAD_BYTES or self._threads == 1:
            _copy_ranges(ranges)
        else:
            try:
                list(self._pool.map(_copy_ranges, _even_shares(ranges, -(-total // self._threads))))
            except RuntimeError:  # this process cannot start more threads
                self._pool.shutdown()  # those that run copy to the end
                self._threads = 1
                _copy_ranges(ranges)
        self._pending.clear()

    def close(self) -> None:
        self._pool.shutdown()  # before: threads may still copy after an error
        self._pending.clear()


LOWEST = 1 << 40
"""The address of a tensor without memory is lower: it is an offset in a storage. So may that of memory be."""


def require_memory(tensor: torch.Tensor) -> None:
    """
    Raises:
        WeightUpdateError: a tensor has no memory: it is offloaded, a DTensor, or another tensor subclass.
    """
    # The address of a storage without memory is 0, and that of its tensor is the offset in the storage.
    if tensor.nbytes and tensor.data_ptr() <= tensor.storage_offset() * tensor.element_size():
        raise WeightUpdateError(
            f"a {type(tensor).__name__} of {tensor.dtype} {list(tensor.shape)} has no memory to copy: "
            "it is offloaded, sharded, or another tensor subclass"
        )


def _copy_ranges(ranges: Sequence[tuple[int, int, int]]) -> None:
    for to, origin, nbytes in ranges:
        ctypes.memmove(to, origin, nbytes)  # releases the GIL


def _even_shares(ranges: Sequence[tuple[int, int, int]], share: int) -> Iterator[list[tuple[int, int, int]]]:
    """Cut the ranges into lists of `share` bytes each. The last list has the rest."""
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
