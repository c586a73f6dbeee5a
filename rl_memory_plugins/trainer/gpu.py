"""The GPU of this process, if it uses one. These functions never initialise CUDA."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def own_device() -> torch.device:
    """The current GPU, or the CPU if this process has not initialised CUDA."""
    import torch

    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else torch.device("cpu")


def own_gpu() -> str | None:
    """The UUID of the current GPU, by which engines name it too; None if this process uses no GPU."""
    device = own_device()
    if device.type != "cuda":
        return None
    from rl_memory_plugins.memory.cuda_device import gpu_name

    return gpu_name(device.index)
