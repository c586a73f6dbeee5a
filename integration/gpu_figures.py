"""Figures of a GPU that several benchmarks measure."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

Result = TypeVar("Result")
SCRATCH_BYTES = 2 << 30  # larger than the GPU's cache


def copy_floor(tensors: dict[str, torch.Tensor], repeats: int) -> Iterator[float]:
    """Seconds to copy all the bytes on the GPU, and nothing else."""
    some = next(iter(tensors.values()))
    elements = max(max(tensor.numel() for tensor in tensors.values()), SCRATCH_BYTES // some.element_size())
    scratch = torch.empty(elements, dtype=some.dtype, device="cuda")
    pairs, start = [], 0
    for tensor in tensors.values():
        start = 0 if start + tensor.numel() > elements else start
        pairs.append((scratch[start : start + tensor.numel()].view(tensor.shape), tensor))
        start += tensor.numel()
    for number in range(repeats + 1):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for destination, tensor in pairs:
            destination.copy_(tensor)
        torch.cuda.synchronize()
        if number:  # the first one warms up
            yield time.perf_counter() - begin


def peak_extra_bytes(run: Callable[[], Result]) -> tuple[int, Result]:
    """The peak of the GPU memory that all processes together take during `run`, beyond what they held; the result."""
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    lowest, over = [before], threading.Event()

    def watch() -> None:
        while not over.wait(0.0005):
            lowest.append(torch.cuda.mem_get_info()[0])

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        result = run()
    finally:
        over.set()
        thread.join()
    return before - min(lowest), result
