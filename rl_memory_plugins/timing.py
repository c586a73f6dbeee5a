"""Measures the steps of reports in seconds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

LONGEST_S = 7 * 24 * 3600.0
"""The longest wait that a caller may set: some system calls count milliseconds in 31 bits."""


@contextmanager
def timed(seconds: dict[str, float], step: str) -> Iterator[None]:
    """Add the duration of the body to its step, also if the body raises."""
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds[step] = seconds.get(step, 0.0) + time.perf_counter() - start
