"""Makes an event of each transition that a client runs, and the answer that lists them."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from rl_memory_plugins.admission import first_refusal
from rl_memory_plugins.commands import Transition
from rl_memory_plugins.errors import as_rl_memory_error
from rl_memory_plugins.observing import Course
from rl_memory_plugins.records import EngineStatus, Report, weight_version
from rl_memory_plugins.tags import Content
from rl_memory_plugins.timeline.records import (
    VERSION,
    Clock,
    Event,
    Present,
    Step,
    Timeline,
    UnderWay,
    memory_of,
)
from rl_memory_plugins.timeline.ring import EventRing

logger = logging.getLogger(__name__)

LONGEST_MESSAGE = 1000
"""The most characters of an error's message."""


class Recorder:
    """The timeline of one engine API."""

    def __init__(self) -> None:
        self._ring = EventRing()

    def share(self, directory: str, engine: str) -> None:
        """Keep the timeline where the other server processes of the engine keep it.

        Args:
            directory: Of all these processes.
            engine: Another one for another engine.
        """
        try:
            shared = EventRing(str(Path(directory) / f"rl_memory_{Path(engine).stem}.timeline"))
        except OSError:
            logger.exception("the timeline is that of this server process alone")
            return
        self._ring.close()
        self._ring = shared

    def note(self, course: Course) -> None:
        """Keep a transition that has ended. Never raises: a full disk must not change an answer."""
        try:
            self._ring.append(lambda seq: event_of(seq, course))
        except Exception:
            logger.exception("an event of the timeline could not be kept")

    def answer(self, since: int, engines: Sequence[EngineStatus]) -> bytes:
        """`timeline` as JSON."""
        name, last, dropped, events = self._ring.after(since)
        since = since if since <= last else 0
        answer = Timeline(
            version=VERSION,
            timeline=name,
            clock=Clock(time.time_ns(), socket.gethostname()),
            events=[msgspec.Raw(event) for event in events],  # type: ignore[misc]
            next=last,
            dropped=max(dropped - since, 0),
            present=present_of(engines) if engines else None,
        )
        return msgspec.json.encode(answer)

    def timeline(self, since: int, engines: Sequence[EngineStatus]) -> Timeline:
        """
        Args:
            since: Only events with higher numbers.
            engines: The present state; empty if it is not known.
        """
        return msgspec.json.decode(self.answer(since, engines), type=Timeline)


def event_of(seq: int, course: Course) -> Event:
    command, report = course.command, course.report
    after = course.after or course.before
    error = None if course.error is None else as_rl_memory_error(course.error)
    received = [] if report is None else received_by(report)
    return Event(
        seq=seq,
        operation=command.name,
        start_ns=course.start_ns,
        duration_ns=course.duration_ns,
        outcome="completed" if error is None else "failed",
        steps=[] if report is None else steps_of(report),
        before=memory_of(course.before),
        after=memory_of(after),
        weight_version=weight_version(after) if after else None,
        content=_content(after),
        error=None if error is None else error.code,
        message=None if error is None else error.message[:LONGEST_MESSAGE],
        received_bytes=sum(rank["bytes"] for rank in received),
        transports=sorted({rank["transport"] for rank in received if "transport" in rank}),
        first_seq=seq,
        **_call(command),
    )


def _call(command: Transition) -> dict[str, Any]:
    """The arguments of the call that an event names."""
    tags = getattr(command, "tags", None)
    mode = getattr(command, "mode", None)
    level = getattr(command, "level", None)
    return {
        "level": None if level is None else int(level),
        "tags": None if tags is None else [tag.value for tag in tags],
        "mode": None if mode is None else mode.value,
        "idle": getattr(command, "idle_s", None) is not None,
    }


def received_by(report: Report) -> list[dict[str, Any]]:
    """The records of all ranks that have received tensors; none for other transitions."""
    engines = report.details.get("engines", [report.details])
    return [rank for engine in engines for rank in engine.get("ranks", ())]


def steps_of(report: Report) -> list[Step]:
    """The steps that ran on each rank and in each engine as a whole, by their starts."""
    steps = [
        Step(step.step, step.start_ns, step.end_ns - step.start_ns, step.engine, step.rank, step.seconds)
        for step in report.steps
        if step.step != "total"
    ]
    return sorted(steps, key=lambda step: step.start_ns)


def present_of(engines: Sequence[EngineStatus]) -> Present:
    refusal = first_refusal(engines)
    return Present(
        admitting=refusal is None,
        reason=None if refusal is None else refusal.details["reason"],
        weight_version=weight_version(engines),
        content=_content(engines) or Content.VALID,
        under_way=[UnderWay(engine.engine_rank, engine.busy) for engine in engines if engine.busy],
        memory=memory_of(engines),
    )


def _content(engines: Sequence[EngineStatus]) -> Content | None:
    """The worst content of all ranks; `None` without engines."""
    if not engines:
        return None
    return EngineStatus(ranks=[rank for engine in engines for rank in engine.ranks]).content
