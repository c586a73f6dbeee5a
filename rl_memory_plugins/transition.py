"""One transition of an engine, from its command to its report."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

import msgspec

from rl_memory_plugins.records import Reply, Report, TagChange

#: Every report names all steps of its operation; those that did not run stay 0.0.
STEPS = {
    "sleep": ("drain", "synchronize", "backup", "release", "total"),
    "wake_up": ("reserve", "map", "restore", "total"),
    "update_weights": ("drain", "connect", "validate", "wait", "load", "finish", "total"),
}


class Held(NamedTuple):
    """A transition between its two phases; the engines of all data-parallel ranks decide on the second together."""

    ticket: str
    name: str
    finish: Callable[[bool], Any]


class Transition:
    """One transition from its command to its reply.

    Args:
        ticket: Where data-parallel engines do it together: none of them resumes by itself after it.
        call: Names it for `CancelDrain`.
    """

    def __init__(self, name: str, ticket: str = "", call: str = "") -> None:
        self.name = name
        self.ticket = ticket
        self.call = call
        self.reply: Future[bytes] = Future()
        self.seconds = dict.fromkeys(STEPS[name], 0.0)
        self.cancelled = False
        self._start = time.perf_counter()

    def elapsed(self) -> float:
        return time.perf_counter() - self._start

    def add_seconds(self, replies: list[Reply[Any]]) -> None:
        """Add the steps the ranks ran; the slowest rank counts."""
        for reply in replies:
            for step, seconds in reply.result["seconds"].items():
                self.seconds[step] = max(self.seconds.get(step, 0.0), seconds)

    def report(self, replies: list[Reply[Any]], **details: Any) -> Report:
        """The answer, once all ranks have acted.

        Args:
            replies: The ranks' own: the tags that each has changed, and its seconds by step.
        """
        self.add_seconds(replies)
        self.seconds["total"] = self.elapsed()
        changes = [
            msgspec.convert(change, TagChange) for reply in replies for change in reply.result.get("changes", ())
        ]
        return Report(changes=changes, seconds=self.seconds, details=details)
