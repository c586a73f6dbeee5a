"""What torch keeps of the device's memory in this process: giving it back to the driver, and a limit."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, field

GIB = 1 << 30


@dataclass
class CacheClearing:
    """What `aggressive_empty_cache` did.

    Attributes:
        freed_bytes: Device memory given back by each round, beyond what was free already; empty where this
            process uses no GPU.
        collected: Objects that Python's garbage collector found unreachable.
        seconds: For all of it.
    """

    freed_bytes: list[int] = field(default_factory=list)
    collected: int = 0
    seconds: float = 0.0


def aggressive_empty_cache(
    max_rounds: int = 3, threshold_bytes: int = GIB, in_use_bytes: int | None = None
) -> CacheClearing:
    """Empty torch's cache, then collect garbage and empty it again until that frees less than `threshold_bytes`.

    One round does not always suffice: a collected object may have held the last reference to blocks that
    become free only once the device has finished with them. Without a GPU the garbage is collected, at
    most once. A collection takes tenths of a second in a large process.

    Args:
        max_rounds: How many rounds at most; 0 only empties the cache.
        threshold_bytes: A round that frees less is the last.
        in_use_bytes: Device memory of this process that is known to be needed. Where torch keeps less than
            `threshold_bytes` beside it, there is no round, since none could free more.
    """
    import torch

    start = time.perf_counter()
    clearing = CacheClearing()
    if not torch.cuda.is_initialized():  # is_available() would be true of a GPU that this process does not use
        clearing.collected = gc.collect() if max_rounds else 0
    else:
        torch.cuda.empty_cache()  # a round counts only what its collection brings
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


def limit_memory(fraction: float) -> None:
    """Let torch take at most this share of the current GPU's memory; does nothing where this process uses no GPU.

    Beyond it torch raises `OutOfMemoryError` here, in the trainer, and not later in an engine that wakes.

    Args:
        fraction: Above 0; 1 is no limit.
    """
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.set_per_process_memory_fraction(fraction)
