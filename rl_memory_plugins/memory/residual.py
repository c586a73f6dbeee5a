"""The GPU memory of a process outside its regions, by cause. This memory stays on the GPU during a sleep.

torch reports the memory of its caching allocator. The driver reports the rest as one number for the process. To split
that number, `attributed` measures its growth while a known cause runs. If the driver's report cannot be assigned to
this process (other PID namespaces, MIG), the causes outside torch are omitted.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from rl_memory_plugins.memory.cuda_device import gpu_name
from rl_memory_plugins.memory.nccl import bytes_of_groups, growth_of_own
from rl_memory_plugins.memory.segments import DEFAULT_POOL, Segment, cached_bytes

_grown: dict[tuple[int, str], int] = {}  # (GPU, cause) → bytes


def process_bytes(index: int) -> int | None:
    """All GPU memory of this process in bytes, as the driver reports it; None if the driver cannot tell."""
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()  # counts references: a second call does no harm
        handle = nvml.nvmlDeviceGetHandleByUUID(gpu_name(index))
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except Exception:  # NVML is absent or does not know this GPU; it has an exception class for each error code
        return None
    used: dict[int, int | None] = {process.pid: process.usedGpuMemory for process in processes}
    if len(used) == 1:  # in a container NVML shows the host's PID, which is not comparable with os.getpid()
        return next(iter(used.values()))
    return used.get(os.getpid())


def bytes_beyond_torch(index: int) -> int | None:
    """Bytes that this process holds outside torch's caching allocator; None if unknown. No region is released."""
    beyond = _beyond(index)
    return None if beyond is None else max(beyond, 0)


def _beyond(index: int) -> int | None:
    """As `bytes_beyond_torch`, less the bytes of released regions, which torch counts and the driver does not."""
    used = process_bytes(index)
    return None if used is None else used - torch.cuda.memory_reserved(index)


@contextmanager
def moved(cause: str) -> Iterator[None]:
    """Attribute to `cause` what the process's memory on its current GPU grows or shrinks by.

    Regions may be released, but must stay as they are meanwhile. Memory of torch's allocator does not count: the cache
    may be emptied in the background.
    """
    if not torch.cuda.is_available():
        yield
        return
    index = torch.cuda.current_device()
    before = _beyond(index)
    try:
        yield
    finally:
        after = _beyond(index)
        if before is not None and after is not None:
            _grown[index, cause] = _grown.get((index, cause), 0) + after - before


def communicator_bytes(index: int) -> int:
    """Bytes of the NCCL communicators of this process.

    What the engine's own communicators took when they were made, and what they gave back since, is measured. Their
    later growth, and the memory of torch's communicators, is counted by NCCL.
    """
    return max(_grown.get((index, "nccl"), 0) + growth_of_own(index) + bytes_of_groups(index), 0)


@contextmanager
def attributed(cause: str) -> Iterator[None]:
    """Attribute to `cause` the growth of the process's memory on its current GPU, outside torch's allocator."""
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
    """Counts the residual memory of one GPU. Make it before the first region: it takes the present memory, less the
    attributed memory, for the CUDA context.

    Args:
        index: torch's ordinal of the GPU.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        beyond = bytes_beyond_torch(index)
        self._context = 0 if beyond is None else max(beyond - communicator_bytes(index), 0)

    def __call__(
        self, by_pool: Mapping[tuple[int, int], Sequence[Segment]], own: set[tuple[int, int]], resident_bytes: int
    ) -> dict[str, int]:
        """Bytes by cause: `context`, `nccl`, `workspace`, `graphs` and `other`.

        Unused segments of torch's cache are not counted, because `memory/reclaim.py` frees them soon.

        Args:
            by_pool: torch's segments by pool.
            own: The pools of the regions.
            resident_bytes: Bytes of the regions that have physical memory now.
        """
        others = {pool: segments for pool, segments in by_pool.items() if pool not in own}
        outside = others.pop(DEFAULT_POOL, ())
        cached = cached_bytes(outside)
        named = {
            "workspace": sum(segment.nbytes for segment in outside) - cached,
            "graphs": sum(segment.nbytes for segments in others.values() for segment in segments),
        }
        used = process_bytes(self._index)
        if used is not None:
            named |= {"nccl": communicator_bytes(self._index), "context": self._context}
            rest = used - resident_bytes - cached - sum(named.values())
            for cause in ("nccl", "context"):  # NCCL counts what communicators share for each of them
                named[cause] = max(named[cause] + min(rest, 0), 0)
                rest = used - resident_bytes - cached - sum(named.values())
            named["other"] = max(rest, 0)
        return {cause: nbytes for cause, nbytes in named.items() if nbytes}
