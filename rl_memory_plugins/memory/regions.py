"""Shared code of the allocators on top of torch's memory pools: nested regions, and objects that outlive Python."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any


class RegionStack(threading.local):
    """Makes the inner of two nested regions win.

    torch's versions differ in which of a thread's active pools they prefer, and all of them refuse to enter a pool
    twice. The stack therefore keeps at most one pool active: it leaves the outer region while an inner region is open.
    """

    def __init__(self) -> None:
        self._open: list[_Suspendable] = []

    @contextmanager
    def enter(self, activate: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
        """Make a region active.

        Args:
            activate: Returns a new context that directs allocations to the region. Called at each entry.
        """
        outer = self._open[-1] if self._open else None
        inner = _Suspendable(activate)
        if outer is not None:
            outer.suspend()
        try:
            inner.resume()
            self._open.append(inner)
            try:
                yield
            finally:
                self._open.pop()
                inner.suspend()
        finally:
            if outer is not None:
                outer.resume()


class _Suspendable:
    def __init__(self, activate: Callable[[], AbstractContextManager[Any]]) -> None:
        self._activate = activate
        self._active: AbstractContextManager[Any] | None = None

    def resume(self) -> None:
        context = self._activate()
        context.__enter__()
        self._active = context

    def suspend(self) -> None:
        context, self._active = self._active, None
        if context is not None:
            context.__exit__(None, None, None)


def keep_forever(thing: object) -> None:
    """Keep an object alive through the interpreter's shutdown, which drops the globals of modules."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
