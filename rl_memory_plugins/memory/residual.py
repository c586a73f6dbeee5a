"""What a process holds on a GPU beside its regions, named as far as it can be known.

torch knows what its caching allocator holds. What lies beyond that is known to the driver alone, as one number
for the process; it is split by measuring what it grew by while a known cause was at work. Where the driver's
processes cannot be told apart (other PID namespaces, MIG), the causes beyond torch are left out.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from rl_memory_plugins.memory.cuda_device import gpu_name
from rl_memory_plugins.memory.segments import Segment

#: torch's pool of everything that is allocated in no other.
DEFAULT_POOL = (0, 0)

_grown: dict[tuple[int, str], int] = {}  # (GPU, cause) → bytes


def process_bytes(index: int) -> int | None:
    """All GPU memory of this process, by the driver's own account; None where that cannot be known."""
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()  # counts references; nothing is done where it was called before
        handle = nvml.nvmlDeviceGetHandleByUUID(gpu_name(index))
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except Exception:  # no NVML, or none for this GPU: NVML has an exception for each of its codes
        return None
    used: dict[int, int | None] = {process.pid: process.usedGpuMemory for process in processes}
    if len(used) == 1:  # in a container the number is the host's, and cannot be compared
        return next(iter(used.values()))
    return used.get(os.getpid())


def bytes_beyond_torch(index: int) -> int | None:
    """What this process holds that torch's caching allocator does not, while no region is released."""
    used = process_bytes(index)
    return None if used is None else max(used - torch.cuda.memory_reserved(index), 0)


@contextmanager
def attributed(cause: str) -> Iterator[None]:
    """What this process comes to hold on its current GPU inside, beyond torch's allocator, has this cause."""
    if not torch.cuda.is_available():
        yield
        return
    index = torch.cuda.current_device()
    before = bytes_beyond_torch(index)
    yield
    after = bytes_beyond_torch(index)
    if before is not None and after is not None:
        _grown[index, cause] = _grown.get((index, cause), 0) + max(after - before, 0)


class ResidualMemory:
    """The account of one GPU. It is opened before any region is: what is there then is the context's.

    Args:
        index: torch's ordinal of the GPU.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        beyond = bytes_beyond_torch(index)
        self._causes = {cause: grown for (gpu, cause), grown in _grown.items() if gpu == index and grown}
        if beyond is not None:
            self._causes["context"] = max(beyond - sum(self._causes.values()), 0)

    def __call__(
        self, by_pool: Mapping[tuple[int, int], Sequence[Segment]], own: set[tuple[int, int]], resident_bytes: int
    ) -> dict[str, int]:
        """Bytes by cause: `context`, `nccl`, `workspace`, `graphs` and `other`.

        What no tensor uses of torch's cache is left out: it does not stay (`memory/reclaim.py`).

        Args:
            by_pool: torch's segments by pool.
            own: The pools of the regions.
            resident_bytes: What of the regions has memory now.
        """
        others = {pool: segments for pool, segments in by_pool.items() if pool not in own}
        outside = others.pop(DEFAULT_POOL, ())
        cached = sum(segment.nbytes for segment in outside if not segment.active_bytes)
        named = {
            "workspace": sum(segment.nbytes for segment in outside) - cached,
            "graphs": sum(segment.nbytes for segments in others.values() for segment in segments),
        }
        used = process_bytes(self._index)
        if used is not None:
            named |= self._causes
            named["other"] = max(used - resident_bytes - cached - sum(named.values()), 0)
        return {cause: nbytes for cause, nbytes in named.items() if nbytes}
