"""Postpones full passes of Python's garbage collector while an engine is closed.

A full pass looks at every object of the process and holds up all of its threads: 150 ms in a trainer with some 20,000
tensors, up to 900 in an engine. An update of so many tensors makes enough objects to start one each time.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_NEVER = 2**31 - 1
"""As the threshold of the oldest generation, whose count no process reaches."""

_lock = threading.Lock()
_entered = 0
_former = gc.get_threshold()


@contextmanager
def postponed() -> Iterator[None]:
    """Let no full pass begin in the body, in any thread of this process. Young objects are collected as before.

    What becomes garbage when it is old is collected after the body. Bodies may be nested, and run in several threads.
    Thresholds that somebody else sets meanwhile stay.
    """
    global _entered, _former
    with _lock:
        if not _entered:
            _former = gc.get_threshold()
            gc.set_threshold(*_former[:2], _NEVER)
        _entered += 1
    try:
        yield
    finally:
        with _lock:
            _entered -= 1
            if not _entered and gc.get_threshold() == (*_former[:2], _NEVER):
                gc.set_threshold(*_former)
