"""What an engine API tells of its transitions, to whoever counts or keeps them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from rl_memory_plugins.commands import Transition
from rl_memory_plugins.records import EngineStatus, Report

_tries_again: ContextVar[bool] = ContextVar("rl_memory_tries_again", default=False)


@contextmanager
def trying_again() -> Iterator[None]:
    """The caller of the transitions in the body tries them again for as long as there is no memory."""
    token = _tries_again.set(True)
    try:
        yield
    finally:
        _tries_again.reset(token)


def tries_again() -> bool:
    """Whether this code runs for a transition of `trying_again`."""
    return _tries_again.get()


class Observer:
    """Notes the end of each transition. This one notes nothing; `server/event_metrics.py` counts."""

    def completed(self, command: Transition, report: Report) -> None:
        """All engines have run the transition. Must not raise."""

    def failed(self, command: Transition, error: Exception) -> None:
        """The caller gets this error. Must not raise."""


class Course:
    """One transition, as the client that runs it sees it. It begins now.

    Attributes:
        before, after: The engines; empty if they are not known.
        report, error: One of both, once the transition has ended.
    """

    def __init__(self, command: Transition) -> None:
        self.command = command
        self.before: list[EngineStatus] = []
        self.after: list[EngineStatus] = []
        self.report: Report | None = None
        self.error: Exception | None = None
        self.start_ns = time.time_ns()
        self.duration_ns = 0
        self._start = time.perf_counter_ns()

    def ends(self) -> None:
        """All engines have answered. What follows, such as a look at their state, does not count."""
        self.duration_ns = self.duration_ns or time.perf_counter_ns() - self._start
