"""Interception of calls that a loader submits to thread pools. Several threads may load at the same time."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any

Call = Callable[[], Any]
Submit = Callable[[Call], "Future[Any]"]  # to the original pool


class _ThreadState(threading.local):
    handler: Callable[[Submit, Call], Future[Any]] | None = None


_thread = _ThreadState()
_lock = threading.Lock()
_users = 0
_original = ThreadPoolExecutor.submit
_installed: Any = None
"""The replacement of `ThreadPoolExecutor.submit`; `None` while no thread intercepts."""


@contextmanager
def intercepted(handler: Callable[[Submit, Call], Future[Any]]) -> Iterator[None]:
    """Call `handler` for each call that this thread submits to any thread pool.

    Instrumentation may replace `ThreadPoolExecutor.submit` meanwhile. Its replacement then stays.
    """
    global _users, _original, _installed
    with _lock:
        if _users == 0:
            _original = ThreadPoolExecutor.submit
            _installed = _wrapped(_original)
            ThreadPoolExecutor.submit = _installed  # type: ignore[method-assign]
        _users += 1
    before, _thread.handler = _thread.handler, handler
    try:
        yield
    finally:
        _thread.handler = before
        with _lock:
            _users -= 1
            if _users == 0:
                if ThreadPoolExecutor.submit is _installed:
                    ThreadPoolExecutor.submit = _original  # type: ignore[method-assign]
                _installed = None


def _wrapped(original: Callable[..., Future[Any]]) -> Callable[..., Future[Any]]:
    """A `submit` that intercepts calls while it is the installed one, and otherwise passes them on."""

    @functools.wraps(original)
    def submit(pool: ThreadPoolExecutor, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        handler = _thread.handler
        if handler is None or submit is not _installed:
            return original(pool, call, *args, **kwargs)
        return handler(functools.partial(original, pool), functools.partial(call, *args, **kwargs))

    return submit


def inside(context: Callable[[], AbstractContextManager[None]]) -> Callable[[Submit, Call], Future[Any]]:
    """For `intercepted`: run each call in its pool, inside a new context."""

    def submitted(submit: Submit, call: Call) -> Future[Any]:
        def run() -> Any:
            with context():
                return call()

        return submit(run)

    return submitted


def inline(submit: Submit, call: Call) -> Future[Any]:
    """Run a call now, in this thread, instead of in the pool."""
    done: Future[Any] = Future()
    try:
        done.set_result(call())
    except Exception as error:
        done.set_exception(error)
    return done
