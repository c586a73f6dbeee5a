"""Counters and histograms of what has happened: transitions, updates, refusals, errors.

They are ordinary metrics of `prometheus_client` in its default registry, so the engine's own `/metrics` shows them.
Each event is counted once, in the server process that coordinated the transition or answered the request. Where an
engine has several server processes, it gives `prometheus_client` a directory (`PROMETHEUS_MULTIPROC_DIR`), and a scrape
of any of them sums what all have counted.

`prometheus_client` looks for that directory when it is imported, and SGLang sets it only at its start. So no module
that is imported earlier may import this one.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import ParamSpec

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram

from rl_memory_plugins import errors
from rl_memory_plugins.admission import REASONS
from rl_memory_plugins.commands import Sleep, Transition
from rl_memory_plugins.errors import (
    DeviceMemoryError,
    EngineAsleepError,
    RLMemoryError,
    as_rl_memory_error,
)
from rl_memory_plugins.observing import Observer, tries_again
from rl_memory_plugins.records import Report
from rl_memory_plugins.timeline.recorder import received_by
from rl_memory_plugins.transition import STEPS

logger = logging.getLogger(__name__)

P = ParamSpec("P")

#: Of the histograms, in seconds: from the release of a small model to an update that waits for its trainer.
BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)

#: The label of a refusal that is not for the state of the engine, e.g. of an adapter that was removed meanwhile.
OTHER = "other"

#: The reasons of refusals.
REFUSED = (*REASONS, "starting", OTHER)

#: The types of errors that a server answers. The others are raised by clients, or are only bases.
TYPES = tuple(
    name
    for name in vars(errors)
    if name.endswith("Error") and name not in ("RLMemoryError", "OutOfMemoryError", "NoAnswerError", "EngineLostError")
)


def _never_raising(count: Callable[P, None]) -> Callable[P, None]:
    """A metric that cannot be written, as on a full disk, must not change an answer."""

    @functools.wraps(count)
    def counted(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            count(*args, **kwargs)
        except Exception:
            logger.exception("an event could not be counted")

    return counted


class EventMetrics(Observer):
    """The metrics of one server process.

    Args:
        registry: Where they are registered.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._seconds = Histogram(
            "rl_memory_transition_seconds",
            "Seconds of a completed transition by step; on each step the slowest rank counts.",
            ["operation", "level", "step"],
            buckets=BUCKETS,
            registry=registry,
        )
        self._failures = Counter(
            "rl_memory_transition_failures",
            "Transitions that ended with an error, by type of the error.",
            ["operation", "type"],
            registry=registry,
        )
        self._retries = Counter(
            "rl_memory_wake_retries",
            "Wakes for a request that found no memory, and are tried again while the request waits.",
            registry=registry,
        )
        self._update_seconds = Histogram(
            "rl_memory_update_seconds",
            "Seconds of a completed update in the slowest rank, from its connection to its last byte, by transport.",
            ["operation", "transport"],
            buckets=BUCKETS,
            registry=registry,
        )
        self._update_bytes = Counter(
            "rl_memory_update_bytes",
            "Bytes that ranks have received in completed updates, by transport.",
            ["operation", "transport"],
            registry=registry,
        )
        self._refusals = Counter(
            "rl_memory_refusals",
            "Generation requests that were refused, by reason.",
            ["reason"],
            registry=registry,
        )
        self._errors = Counter(
            "rl_memory_errors",
            "Error answers of the control routes, by type of the error.",
            ["type"],
            registry=registry,
        )
        self._begin_at_zero()

    def _begin_at_zero(self) -> None:
        """Show counters that have counted nothing: Prometheus sees no increase in a series that was not there."""
        for reason in REFUSED:
            self._refusals.labels(reason)
        for error in TYPES:
            self._errors.labels(error)
            for operation in STEPS:
                self._failures.labels(operation, error)

    @_never_raising
    def completed(self, command: Transition, report: Report) -> None:
        level = str(int(command.level)) if isinstance(command, Sleep) else ""
        for step, seconds in report.seconds.items():
            if seconds > 0:  # else it did not run
                self._seconds.labels(command.name, level, step).observe(seconds)
        slowest: dict[str, float] = {}
        for rank in received_by(report):
            transport = rank["transport"]
            self._update_bytes.labels(command.name, transport).inc(rank["bytes"])
            slowest[transport] = max(slowest.get(transport, 0.0), sum(rank["seconds"].values()))
        for transport, seconds in slowest.items():
            self._update_seconds.labels(command.name, transport).observe(seconds)

    @_never_raising
    def failed(self, command: Transition, error: Exception) -> None:
        if tries_again() and isinstance(error, DeviceMemoryError):
            self._retries.inc()
            return
        self._failures.labels(command.name, as_rl_memory_error(error).code).inc()

    @_never_raising
    def refused(self, error: RLMemoryError) -> None:
        """A generation request got this error in place of an answer."""
        is_closed = isinstance(error, EngineAsleepError)
        self._refusals.labels(error.details.get("reason", OTHER) if is_closed else OTHER).inc()

    @_never_raising
    def answered_error(self, error: RLMemoryError) -> None:
        """A control route has answered this error."""
        self._errors.labels(error.code).inc()


@functools.cache
def event_metrics() -> EventMetrics:
    """The metrics of this process. They are made when an enabled engine is there."""
    return EventMetrics()
