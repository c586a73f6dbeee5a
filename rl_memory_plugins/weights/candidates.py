"""Which transports a rank may take, the best first."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

NEED_UNIX_SOCKET = ("cuda_direct", "shm_pinned", "shm")
"""Transports with file descriptors, or with a lease that only the connection to a process of this host can hold."""


def candidate_transports(
    wanted: str,
    device: str,
    gpus: Collection[str],
    source_gpu: str | None,
    *,
    local: bool = True,
) -> list[str]:
    """The transports to try for a rank, the best first.

    Args:
        wanted: A transport, or `auto`.
        device: The rank's device.
        gpus: The GPUs that this process can use; none if it has not used one yet.
        source_gpu: The GPU that holds all tensors; `None` if they are spread or on the host.
        local: Whether the rank has connected over a Unix socket.
    """
    if wanted != "auto":
        return [wanted]
    found = ["cuda_direct"] if device == source_gpu and local else []
    found += ["cuda_ipc"] if device in gpus else []
    if not local:
        # Not `nccl`: it connects two GPUs only at their first transfer. Where it cannot, e.g. for want of a link or an
        # open port, the update would fail after the offer, and not fall back to TCP. No two hosts have run it.
        return [*found, "tcp"]
    return [*found, "shm_pinned", "shm"] if _is_gpu(device) else ["shm"]


def left_out(wanted: str, device: str, gpus: Collection[str]) -> dict[str, str]:
    """Why `auto` tries no transport between GPUs for a rank on a GPU, by transport. Arguments as above."""
    if wanted != "auto" or device in gpus or not _is_gpu(device):
        return {}
    return {
        "cuda_ipc": "this process does not see the rank's GPU" if gpus else "this process has not used a GPU",
        "nccl": "it is used only if it is named: where it cannot connect two GPUs, it fails after the offer",
    }


def _is_gpu(device: str) -> bool:
    return device.startswith(("GPU-", "MIG-"))


def current_gpu(gpus: Mapping[str, int]) -> str | None:
    """The name of the current GPU; `None` if this process uses none."""
    if not torch.cuda.is_initialized():
        return None
    current = torch.cuda.current_device()
    return next((name for name, index in gpus.items() if index == current), None)


def gpu_of_all(tensors: Sequence[torch.Tensor] | None, local: Mapping[str, int]) -> str | None:
    """The name of the GPU that holds all tensors; `None` if they are spread, on the host, or not known."""
    indices = {tensor.get_device() for tensor in tensors or ()}  # -1 for the host
    return next((name for name, index in local.items() if indices == {index}), None)
