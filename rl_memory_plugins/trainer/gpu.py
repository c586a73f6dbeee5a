"""The GPU that this process works on, if any. CUDA is never initialised here."""

from __future__ import annotations


def own_gpu() -> str | None:
    """The UUID of the current GPU, as engines name theirs."""
    import torch

    if not torch.cuda.is_initialized():
        return None
    from rl_memory_plugins.memory.cuda_device import gpu_name

    return gpu_name(torch.cuda.current_device())
