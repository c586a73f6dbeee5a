"""Thread pools that a loader uses: what it submits is seen, also where several threads of a process load at a time."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

Call = Callable[[], Any]
Submit = Callable[[Call], "Future[Any]"]
"""Gives a call to the pool that it was meant for."""


class _Here(threading.local):
    instead: Callable[[Submit, Call], Future[Any]] | None = None


_here = _Here()
_lock = threading.Lock()
_users = 0
_original = ThreadPoolExecutor.submit


@contextmanager
def intercepted(instead: Callable[[Submit, Call], Future[Any]]) -> Iterator[None]:
    """What this thread submits to any thread pool goes to `instead`."""
    global _users, _original
    with _lock:
        if _users == 0:
            _original = ThreadPoolExecutor.submit
            ThreadPoolExecutor.submit = _submit  # type: ignore[method-assign, assignment]
        _users += 1
    before, _here.instead = _here.instead, instead
    try:
        yield
    finally:
        _here.instead = before
        with _lock:
            _users -= 1
            if _users == 0:
                ThreadPoolExecutor.submit = _original  # type: ignore[method-assign]


def _submit(pool: ThreadPoolExecutor, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
    if _here.instead is None:
        return _original(pool, call, *args, **kwargs)
    return _here.instead(functools.partial(_original, pool), functools.partial(call, *args, **kwargs))


def inline(submit: Submit, call: Call) -> Future[Any]:
    """Run a call at once and in this thread."""
    done: Future[Any] = Future()
    try:
        done.set_result(call())
    except Exception as error:
        done.set_exception(error)
    return done
