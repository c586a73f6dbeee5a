"""Running a function in another thread as the caller would: on its GPU and stream, and in its trace."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import copy_context
from typing import TypeVar

import torch

T = TypeVar("T")


def on_this_gpu(run: Callable[[], T]) -> Callable[[], T]:
    """Wrap `run` for another thread, on the caller's current GPU and stream. A new thread's own GPU is 0.

    The context variables are the caller's too: its trace is one of them.
    """
    context = copy_context()
    if not torch.cuda.is_initialized():
        return lambda: context.run(run)
    stream = torch.cuda.current_stream()

    def on_gpu() -> T:
        with torch.cuda.device(stream.device), torch.cuda.stream(stream):
            return context.run(run)

    return on_gpu
