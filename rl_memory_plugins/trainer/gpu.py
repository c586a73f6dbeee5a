"""The GPU that this process works on, if any. CUDA is never initialised here."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def own_device() -> torch.device:
    """The current GPU if this process uses one, else the CPU."""
    import torch

    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else torch.device("cpu")


def own_gpu() -> str | None:
    """The UUID of the current GPU, as engines name theirs."""
    device = own_device()
    if device.type != "cuda":
        return None
    from rl_memory_plugins.memory.cuda_device import gpu_name

    return gpu_name(device.index)
