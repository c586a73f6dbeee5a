"""One transition of an engine, from its command to its report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from rl_memory_plugins.errors import DrainTimeoutError
from rl_memory_plugins.records import Reply, Report, StepTime, TagChange
from rl_memory_plugins.timing import Moment, Steps

#: The steps of each operation. Every report names all of them; a step that did not run stays 0.0.
STEPS = {
    "sleep": ("drain", "synchronize", "backup", "release", "total"),
    "wake_up": ("reserve", "map", "restore", "total"),
    "update_weights": ("drain", "connect", "validate", "wait", "receive", "load", "finish", "total"),
    "update_adapter": ("connect", "validate", "wait", "receive", "load", "add", "total"),
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
        self.seconds = Steps(STEPS[name])
        self.cancelled = False
        self.finish: Callable[[bool], Any] = lambda commit: None  # the second phase of a transition that is held
        self._start = Moment.now()

    def note(self, step: str) -> None:
        """The step began with the transition, and has ended now."""
        self.seconds.add(step, self._start)

    def steps(self) -> list[StepTime]:
        """When the steps of the engine as a whole have run."""
        return step_times(None, self.seconds, self.seconds.places)

    def report(self, replies: list[Reply[Any]], **details: Any) -> Report:
        """The report, once all ranks have acted. In each step the slowest rank counts.

        Args:
            replies: The replies of the ranks: the tags that each has changed, and its seconds and places by step.
        """
        self.note("total")
        steps = self.steps()
        changes: list[TagChange] = []
        for reply in replies:
            changes += msgspec.convert(reply.result.get("changes", ()), list[TagChange])
            by_step = reply.result["seconds"]
            steps += step_times(reply.rank, by_step, reply.result.pop("places", {}))
            for step, seconds in by_step.items():
                self.seconds[step] = max(self.seconds.get(step, 0.0), seconds)
        return Report(changes=changes, seconds=self.seconds, details=details, steps=steps)


def step_times(rank: int | None, seconds: Mapping[str, float], places: Mapping[str, Sequence[int]]) -> list[StepTime]:
    """The steps of one rank, or of the engine itself; see `timing.Steps` for `places`."""
    return [StepTime(step, rank, start, end, seconds[step]) for step, (start, end) in places.items()]


def given_up() -> DrainTimeoutError:
    """The error of a transition that has waited for running requests too long."""
    return DrainTimeoutError(
        "running requests did not finish within drain_timeout_s, and nothing was released: "
        "use mode='abort' or mode='keep', or a larger drain_timeout_s"
    )
