"""One call at a time. A call that is made within another one would wait for ever, and is refused."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from rl_memory_plugins.errors import StateConflictError
from rl_memory_plugins.full_collections import postponed

_within: ContextVar[tuple[_Call, ...]] = ContextVar("rl_memory_within", default=())
"""The calls of this context. Threads and tasks that work for a call run with a copy of its context."""


class _Call:
    """A call that runs, or waits for its turn."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self.is_over = False


class Turns:
    """The turns of the calls of one object."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """A context for the body of a call. It waits for the call before.

        No full pass of the garbage collector begins in the body: engines wait for it.

        Raises:
            StateConflictError: the call before makes this one.
        """
        before, call = _within.get(), _Call(self)
        if any(one.turns is self and not one.is_over for one in before):
            raise StateConflictError(
                "a step of this handoff, or a signal handler during it, has called the handoff: call it once the step "
                "is over"
            )
        try:
            _within.set((*before, call))
            with self._lock, postponed():
                yield
        finally:
            call.is_over = True
            _within.set(before)
