"""CUDA IPC between two processes: the second one opens memory of the first and reads it."""

from __future__ import annotations

import os
import subprocess
import sys

from rl_memory_plugins.doctor.finding import Finding, failure, not_applicable, ok, worst
from rl_memory_plugins.doctor.machine import torch_without_gpus

NBYTES = 2 << 20
PEER_S = 60.0
_REMEDY = (
    "run trainer and engine with the same IPC and PID namespaces (`--ipc=host --pid=host`), and not in different MIG "
    "instances; without CUDA IPC an update goes through host memory"
)


def between_processes() -> Finding:
    import torch

    if not torch.version.cuda:
        return not_applicable(torch_without_gpus() or "torch is a build for ROCm, on which updates use no CUDA IPC")
    if not torch.cuda.is_available():
        return failure("torch cannot use the GPU", "see the check `driver`")
    return worst([_with_peer(index) for index in range(torch.cuda.device_count())])


def _with_peer(index: int) -> Finding:
    from rl_memory_plugins.errors import RLMemoryError
    from rl_memory_plugins.weights.cuda_ipc import CudaGpu

    try:
        gpu = CudaGpu(index)
        address = gpu.allocate(NBYTES)
        gpu.view(address, NBYTES).fill_(7)
        gpu.synchronize()
        allocation = gpu.find(address)
    except RLMemoryError as error:
        return failure(f"GPU {index}: {error.message}", _REMEDY)
    if allocation is None:
        return failure(f"GPU {index}: the driver exports no handle of memory from cuMemAlloc", _REMEDY)
    command = [sys.executable, "-m", "rl_memory_plugins.doctor.checks.cuda_ipc", str(index), allocation.handle.hex()]
    try:
        peer = subprocess.run(command, capture_output=True, text=True, timeout=PEER_S, env=dict(os.environ))
    except subprocess.TimeoutExpired:
        return failure(f"GPU {index}: the other process hangs when it opens the memory", _REMEDY)
    last = (peer.stdout + peer.stderr).strip().rpartition("\n")[2]
    if peer.returncode != 0:
        return failure(f"GPU {index}: the other process cannot read the memory: {last}", _REMEDY)
    return ok(f"GPU {index}: another process has opened memory of this one and read it")


def peer() -> None:
    """The second process: opens the handle and compares what is there."""
    from rl_memory_plugins.weights.cuda_ipc import CudaGpu

    gpu = CudaGpu(int(sys.argv[1]))
    address = gpu.open(bytes.fromhex(sys.argv[2]))
    read = gpu.view(address, NBYTES).float().mean().item()
    gpu.close(address)
    if read != 7:
        raise SystemExit(f"read {read} where 7 was written")


if __name__ == "__main__":
    peer()
