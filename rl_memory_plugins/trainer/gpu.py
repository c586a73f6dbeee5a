"""The GPU of this process, if it uses one. These functions never initialise CUDA."""

from __future__ import annotations

import torch

from rl_memory_plugins.memory.cuda_device import gpu_name


def own_device() -> torch.device:
    """The current GPU, or the CPU if this process has not initialised CUDA."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else torch.device("cpu")


def own_gpu() -> str | None:
    """The UUID of the current GPU, by which engines name it too; None if this process uses no GPU."""
    return gpu_name(torch.cuda.current_device()) if torch.cuda.is_initialized() else None
