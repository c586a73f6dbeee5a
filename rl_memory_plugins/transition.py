"""One transition of an engine, from its command to its report."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

import msgspec

from rl_memory_plugins.records import Reply, Report, TagChange

#: The steps of each operation. Every report names all of them; a step that did not run stays 0.0.
STEPS = {
    "sleep": ("drain", "synchronize", "backup", "release", "total"),
    "wake_up": ("reserve", "map", "restore", "total"),
    "update_weights": ("drain", "connect", "validate", "wait", "load", "finish", "total"),
}


class Held(NamedTuple):
    """A transition between its two phases. All data-parallel engines decide together on the second phase."""

    ticket: str
    name: str
    finish: Callable[[bool], Any]


class PendingTransition:
    """One transition from its command to its reply.

    Args:
        name: A key of `STEPS`.
        ticket: The ticket of a transition of several data-parallel engines. None of them resumes by itself after it.
        call: The name for `CancelDrain`.
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
        """Add the steps that the ranks ran. The slowest rank counts."""
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
