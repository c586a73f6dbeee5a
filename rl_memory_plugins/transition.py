"""One transition of an engine, from its command to its report."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec

from rl_memory_plugins.errors import DrainTimeoutError
from rl_memory_plugins.records import Reply, Report, TagChange

#: The steps of each operation. Every report names all of them; a step that did not run stays 0.0.
STEPS = {
    "sleep": ("drain", "synchronize", "backup", "release", "total"),
    "wake_up": ("reserve", "map", "restore", "total"),
    "update_weights": ("drain", "connect", "validate", "wait", "load", "finish", "total"),
    "update_adapter": ("connect", "validate", "wait", "load", "add", "total"),
    "remove_adapter": ("total",),
}


class PendingTransition:
    """One transition from its command to its reply.

    Args:
        name: A key of `STEPS`.
        ticket: The ticket of a transition of several data-parallel engines. No engine resumes by itself after it.
        call: The name of the command for `CancelDrain`.
    """

    def __init__(self, name: str, ticket: str = "", call: str = "") -> None:
        self.name = name
        self.ticket = ticket
        self.call = call
        self.reply: Future[bytes] = Future()
        self.seconds = dict.fromkeys(STEPS[name], 0.0)
        self.cancelled = False
        self.finish: Callable[[bool], Any] = lambda commit: None  # the second phase of a transition that is held
        self._start = time.perf_counter()

    def elapsed(self) -> float:
        return time.perf_counter() - self._start

    def report(self, replies: list[Reply[Any]], **details: Any) -> Report:
        """The report, once all ranks have acted. In each step the slowest rank counts.

        Args:
            replies: The replies of the ranks: the tags that each has changed, and its seconds by step.
        """
        changes: list[TagChange] = []
        for reply in replies:
            changes += msgspec.convert(reply.result.get("changes", ()), list[TagChange])
            for step, seconds in reply.result["seconds"].items():
                self.seconds[step] = max(self.seconds.get(step, 0.0), seconds)
        self.seconds["total"] = self.elapsed()
        return Report(changes=changes, seconds=self.seconds, details=details)


def given_up() -> DrainTimeoutError:
    """The error of a transition that has waited for running requests too long."""
    return DrainTimeoutError(
        "running requests did not finish within drain_timeout_s, and nothing was released: "
        "use mode='abort' or mode='keep', or a larger drain_timeout_s"
    )
