"""Seconds by step, as reports have them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

LONGEST_S = 7 * 24 * 3600.0
"""The longest wait that can be asked for: the system counts the milliseconds of some in 31 bits."""


@contextmanager
def timed(seconds: dict[str, float], step: str) -> Iterator[None]:
    """Add what the body takes to its step, also where it raises."""
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds[step] = seconds.get(step, 0.0) + time.perf_counter() - start
