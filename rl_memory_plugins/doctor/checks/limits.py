"""Limits of this process: host memory within its cgroups, and memory that it may lock."""

from __future__ import annotations

import os
import resource

from rl_memory_plugins.byte_size import size
from rl_memory_plugins.doctor.finding import Finding, failure, not_applicable, ok, warning
from rl_memory_plugins.doctor.machine import DEV, torch_without_gpus, why_no_gpu
from rl_memory_plugins.memory.host_memory import host_memory_info

LOCKED_BYTES = 64 << 20
MARGIN_BYTES = 256 << 20  # the default of the option host_memory_margin_bytes


def host_memory() -> Finding:
    """What sleeps of level 1 may take: the machine's memory, within the limits of the cgroups."""
    free, total = host_memory_info()
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limited = total < machine * 0.99
    seen = f"{size(free)} of {size(total)} are free"
    if limited:
        seen += f"; a memory cgroup allows {size(total)} of the machine's {size(machine)}"
    details = {"free_bytes": free, "total_bytes": total, "limited_by_cgroup": limited}
    if free < MARGIN_BYTES:
        return warning(
            f"{seen}: a level-1 sleep needs host memory of the size of the weights",
            "raise the container's memory limit, free memory, or use level=2 if an update follows",
            **details,
        )
    return ok(seen, **details)


def locked_memory() -> Finding:
    """Whether host memory can be page-locked for the GPU, and the limit that RDMA devices obey."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    limited = limit != resource.RLIM_INFINITY
    told = f"RLIMIT_MEMLOCK is {size(limit) if limited else 'unlimited'}"
    if limited and any((DEV / "infiniband").glob("uverbs*")):
        return warning(
            f"{told}, and this machine has RDMA devices: NCCL cannot register its buffers with them",
            "`docker run --ulimit memlock=-1`, or LimitMEMLOCK=infinity in the service",
            limit_bytes=limit,
        )
    missing = why_no_gpu() or torch_without_gpus()
    if missing:
        return not_applicable(f"{missing}, so nothing is page-locked; {told}")
    problem = _page_lock()
    if problem:
        return failure(
            f"{LOCKED_BYTES >> 20} MiB of host memory cannot be page-locked: {problem}; {told}",
            "raise the limit (`--ulimit memlock=-1`); until then copies of a sleep take the speed of pageable memory",
        )
    return ok(f"{LOCKED_BYTES >> 20} MiB of host memory were page-locked; {told}")


def _page_lock() -> str:
    """Page-lock memory for the first GPU. Returns the error; empty if it worked."""
    import mmap

    from rl_memory_plugins.errors import RLMemoryError
    from rl_memory_plugins.memory.arena import address_of
    from rl_memory_plugins.weights.cuda_ipc import CudaGpu

    try:
        gpu = CudaGpu(0)
        memory = mmap.mmap(-1, LOCKED_BYTES)
        gpu.register(address_of(memory), LOCKED_BYTES)
        gpu.unregister(address_of(memory))
    except (RLMemoryError, RuntimeError, AssertionError, OSError) as error:
        return str(error)
    return ""
