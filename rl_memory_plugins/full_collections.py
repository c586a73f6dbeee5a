"""Postpones full passes of Python's garbage collector while an engine is closed.

A full pass looks at every object of the process and holds up all of its threads: 150 ms in a trainer with some 20,000
tensors, up to 900 in an engine. An update of so many tensors makes enough objects to start one each time.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_NEVER = 2**31 - 2
"""As the threshold of the oldest generation, whose count no process reaches. Others set 2**31 - 1 for this purpose."""

_lock = threading.Lock()
_entered = 0
_former = gc.get_threshold()[2]


@contextmanager
def postponed() -> Iterator[None]:
    """Let no full pass begin in the body, in any thread of this process. Young objects are collected as before.

    What becomes garbage when it is old is collected after the body. Bodies may be nested, and run in several threads.
    Thresholds that somebody else sets meanwhile stay.
    """
    global _entered, _former
    with _lock:
        _entered += 1
        first, second, third = gc.get_threshold()
        if third != _NEVER:
            _former = third
            gc.set_threshold(first, second, _NEVER)
    try:
        yield
    finally:
        with _lock:
            _entered -= 1
            if not _entered:
                _restore()


def _restore() -> None:
    first, second, third = gc.get_threshold()
    if third == _NEVER:
        gc.set_threshold(first, second, _former)


def _forked() -> None:
    """The threads that were in a body do not exist in the child."""
    global _lock, _entered
    _lock, _entered = threading.Lock(), 0
    _restore()


os.register_at_fork(after_in_child=_forked)
