"""How long the caller of a call waits for its answer: in a process a context variable, between hosts a header.

A relay asks its engines, and one of them may be a relay too. Each gives up a little before its caller does, so that the
caller hears which engine is silent, and does not take all of them for silent.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

HEADER = "RL-Memory-Answer-Within"
"""In seconds."""

SHARE = 0.9
"""Of the caller's time, for those who are asked in turn. The answer takes the rest."""

_until: ContextVar[float] = ContextVar("rl_memory_answer_until", default=math.inf)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """The body is for a caller who gives up after so many seconds, if none does before."""
    token = _until.set(min(_until.get(), time.monotonic() + seconds))
    try:
        yield
    finally:
        _until.reset(token)


def left() -> float:
    """How many seconds the caller still waits; `math.inf` without a limit."""
    return max(_until.get() - time.monotonic(), 0.0)


def told(limit_s: float | None) -> dict[str, str]:
    """The header that tells a server how long it is waited for. `limit_s` is the limit of this one call."""
    seconds = left() if limit_s is None else min(left(), limit_s)
    return {} if seconds == math.inf else {HEADER: f"{seconds:.3f}"}


def heard(headers: Mapping[str, str]) -> float:
    """The seconds that the header of a request tells; `math.inf` without a header that does."""
    value = headers.get(HEADER, "")
    return float(value) if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", value) else math.inf
