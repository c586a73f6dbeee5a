"""The timelines of several engines and the handoffs of their trainers, side by side for an export."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from rl_memory_plugins.errors import InvalidRequestError, RLMemoryError
from rl_memory_plugins.timeline.records import Event, Handoff, RankMemory, Step, Timeline


class Spanning(Protocol):
    """What has a begin and an end."""

    @property
    def start_ns(self) -> int: ...

    @property
    def duration_ns(self) -> int: ...


S = TypeVar("S", bound=Spanning)


class Point(NamedTuple):
    """The memory of one rank from this moment on."""

    at_ns: int
    memory: RankMemory


@dataclass(frozen=True)
class History:
    """What an export draws.

    Attributes:
        engines: By name, e.g. the address of a server.
        trainers: By name, e.g. of a file: the handoffs of one trainer process.
    """

    engines: Mapping[str, Timeline]
    trainers: Mapping[str, Sequence[Handoff]] = field(default_factory=dict)

    def times(self) -> list[int]:
        """When anything begins or ends, in nanoseconds since 1970, and the moments of the answers; sorted."""
        found = []
        for timeline in self.engines.values():
            found += [timeline.clock.now_ns]
            for event in timeline.events:
                parts: list[Spanning] = [event, *event.steps]  # the clock of a rank's host may be behind the server's
                found += [at for part in parts for at in (part.start_ns, part.start_ns + part.duration_ns)]
        for handoffs in self.trainers.values():
            for step in (step for handoff in handoffs for step in handoff.steps):
                found += [step.start_ns, step.start_ns + step.duration_ns]
        return sorted(found)


def timeline_in(answer: Mapping[str, Any]) -> Timeline:
    """The timeline in an answer of a server.

    Raises:
        RLMemoryError: it is none.
    """
    try:
        return msgspec.convert(answer, Timeline)
    except msgspec.ValidationError as error:
        raise RLMemoryError(f"the server did not answer with a timeline: {error}") from None


def read_handoffs(file: Path) -> list[Handoff]:
    """The handoffs in a file that `HandoffReport.append_to` has written.

    Raises:
        InvalidRequestError: the file cannot be read, or holds something else.
    """
    try:
        lines = file.read_bytes().splitlines()
        return [msgspec.json.decode(line, type=Handoff) for line in lines if line.strip()]
    except (OSError, msgspec.MsgspecError) as error:
        raise InvalidRequestError(
            f"cannot read handoffs from {file}: {error}", field="handoff", got=str(file)
        ) from None


def points_of(timeline: Timeline) -> dict[tuple[int, int], list[Point]]:
    """By engine and rank: the memory at the starts and the ends of all transitions, and at the end the present."""
    found: dict[tuple[int, int], list[Point]] = {}

    def add(at_ns: int, memories: Iterable[RankMemory]) -> None:
        for memory in memories:
            found.setdefault((memory.engine, memory.rank), []).append(Point(at_ns, memory))

    for event in timeline.events:
        add(event.start_ns, event.before)
        add(event.start_ns + event.duration_ns, event.after)
    for points in found.values():
        points.sort(key=lambda point: point.at_ns)
    if timeline.present is not None:
        add(timeline.clock.now_ns, timeline.present.memory)
    return {place: _with_left(points) for place, points in sorted(found.items())}


def _with_left(points: list[Point]) -> list[Point]:
    """What is left is measured soon after a sleep, so the next point knows it of the former."""
    known = [*points]
    for place in range(len(known) - 2, -1, -1):
        memory, later = known[place].memory, known[place + 1].memory
        if not memory.left and later.left and memory.tags == later.tags:
            known[place] = Point(known[place].at_ns, msgspec.structs.replace(memory, left=later.left))
    return known


class Stretch(NamedTuple):
    """A step of a transition on all ranks."""

    name: str
    start_ns: int  # when the first rank began
    duration_ns: int  # until the last rank ended
    longest: Step  # of the rank that took longest from begin to end


def stretches_of(event: Event) -> list[Stretch]:
    """The steps of an event, each over all ranks, by their starts."""
    by_name: dict[str, list[Step]] = {}
    for step in event.steps:
        by_name.setdefault(step.name, []).append(step)
    found = []
    for name, steps in by_name.items():
        start_ns = min(step.start_ns for step in steps)
        end_ns = max(step.start_ns + step.duration_ns for step in steps)
        longest = max(steps, key=lambda step: step.duration_ns)
        found.append(Stretch(name, start_ns, end_ns - start_ns, longest))
    return sorted(found, key=lambda stretch: stretch.start_ns)


def lanes_of(spans: Iterable[S]) -> list[list[S]]:
    """Events or steps in as few rows as possible, such that those of a row do not overlap. Several clients overlap."""
    lanes: list[list[S]] = []
    for span in sorted(spans, key=lambda span: span.start_ns):
        for lane in lanes:
            if lane[-1].start_ns + lane[-1].duration_ns <= span.start_ns:
                lane.append(span)
                break
        else:
            lanes.append([span])
    return lanes
