"""The GPU that this process works on, if any. CUDA is never initialised here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def own_gpu() -> str | None:
    """The UUID of the current GPU, as engines name theirs."""
    import torch

    if not torch.cuda.is_initialized():
        return None
    from rl_memory_plugins.memory.cuda_device import gpu_name

    return gpu_name(torch.cuda.current_device())


def on_this_gpu(run: Callable[[], T]) -> Callable[[], T]:
    """`run` for another thread, which would otherwise work on GPU 0."""
    import torch

    if not torch.cuda.is_initialized():
        return run
    index = torch.cuda.current_device()

    def on_gpu() -> T:
        torch.cuda.set_device(index)
        return run()

    return on_gpu
