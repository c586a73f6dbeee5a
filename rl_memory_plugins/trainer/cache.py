"""Empties torch's cache of device memory in this process."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, field

import torch

GIB = 1 << 30


@dataclass
class CacheClearing:
    """The result of `aggressive_empty_cache`.

    Attributes:
        freed_bytes: Bytes of device memory that each round has freed. Empty if this process uses no GPU.
        collected: The number of objects that Python's garbage collector found unreachable.
        seconds: The duration of the call.
    """

    freed_bytes: list[int] = field(default_factory=list)
    collected: int = 0
    seconds: float = 0.0


def aggressive_empty_cache(
    max_rounds: int = 3, threshold_bytes: int = GIB, in_use_bytes: int | None = None
) -> CacheClearing:
    """Empty torch's cache. Then, in rounds, collect garbage and empty the cache again.

    One round may not suffice: blocks of a collected object become free only when the device has finished with them. If
    this process uses no GPU, the function collects garbage once. In a large process a collection takes tenths of a
    second.

    Args:
        max_rounds: The most rounds; with 0 the function only empties the cache.
        threshold_bytes: The first round that frees fewer bytes is the last.
        in_use_bytes: Bytes of device memory that this process needs. If torch holds less than `threshold_bytes` beyond
            them, no round runs, because it could not free enough.
    """
    start = time.perf_counter()
    clearing = CacheClearing()
    if not torch.cuda.is_initialized():  # is_available() is true even if this process uses no GPU
        clearing.collected = gc.collect() if max_rounds else 0
    else:
        torch.cuda.empty_cache()  # so that the first round counts only memory that its collection has freed
        if in_use_bytes is not None and torch.cuda.memory_reserved() - in_use_bytes < threshold_bytes:
            max_rounds = 0
        for _ in range(max_rounds):
            before = torch.cuda.memory_reserved()
            clearing.collected += gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.synchronize()
            clearing.freed_bytes.append(before - torch.cuda.memory_reserved())
            if clearing.freed_bytes[-1] < threshold_bytes:
                break
    clearing.seconds = time.perf_counter() - start
    return clearing
