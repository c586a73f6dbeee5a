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
_installed: Any = None
"""What stands in `ThreadPoolExecutor.submit`, in the place of `_original`, for as long as anybody watches."""


@contextmanager
def intercepted(instead: Callable[[Submit, Call], Future[Any]]) -> Iterator[None]:
    """What this thread submits to any thread pool goes to `instead`.

    Others may replace `ThreadPoolExecutor.submit` meanwhile, as instrumentation does: what they put there stays.
    """
    global _users, _original, _installed
    with _lock:
        if _users == 0:
            _original = ThreadPoolExecutor.submit
            _installed = _wrapped(_original)
            ThreadPoolExecutor.submit = _installed  # type: ignore[method-assign]
        _users += 1
    before, _here.instead = _here.instead, instead
    try:
        yield
    finally:
        _here.instead = before
        with _lock:
            _users -= 1
            if _users == 0:
                if ThreadPoolExecutor.submit is _installed:
                    ThreadPoolExecutor.submit = _original  # type: ignore[method-assign]
                _installed = None


def _wrapped(original: Callable[..., Future[Any]]) -> Callable[..., Future[Any]]:
    """A `submit` that asks `_here` first. It only passes calls on once it is no longer the installed one."""

    @functools.wraps(original)
    def submit(pool: ThreadPoolExecutor, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        instead = _here.instead
        if instead is None or submit is not _installed:
            return original(pool, call, *args, **kwargs)
        return instead(functools.partial(original, pool), functools.partial(call, *args, **kwargs))

    return submit


def inline(submit: Submit, call: Call) -> Future[Any]:
    """Run a call at once and in this thread."""
    done: Future[Any] = Future()
    try:
        done.set_result(call())
    except Exception as error:
        done.set_exception(error)
    return done
