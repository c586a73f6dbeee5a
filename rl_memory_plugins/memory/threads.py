"""Work handed to another thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def on_this_gpu(run: Callable[[], T]) -> Callable[[], T]:
    """`run` for another thread, on the GPU and the stream that are current here; a thread's own are GPU 0's."""
    if not torch.cuda.is_initialized():
        return run
    stream = torch.cuda.current_stream()

    def on_gpu() -> T:
        with torch.cuda.device(stream.device), torch.cuda.stream(stream):
            return run()

    return on_gpu
