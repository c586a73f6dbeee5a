"""What an engine API tells of its transitions, to whoever counts them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from rl_memory_plugins.commands import Transition
from rl_memory_plugins.records import Report

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
