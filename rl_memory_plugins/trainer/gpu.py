"""The GPU of this process, if it uses one. Only `with_index` may initialise CUDA."""

from __future__ import annotations

import torch

from rl_memory_plugins.memory.cuda_device import gpu_name


def own_device() -> torch.device:
    """The current GPU, or the CPU if this process has not initialised CUDA."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else torch.device("cpu")


def own_gpu() -> str | None:
    """The UUID of the current GPU, by which engines name it too; None if this process uses no GPU."""
    return gpu_name(torch.cuda.current_device()) if torch.cuda.is_initialized() else None


def is_capturing() -> bool:
    """Whether this thread captures a CUDA graph on its current stream."""
    return torch.cuda.is_initialized() and bool(torch.cuda.is_current_stream_capturing())


def with_index(device: torch.device | str | None) -> torch.device:
    """The device with its index. Default: the current GPU, or the CPU without a GPU."""
    found = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return found
