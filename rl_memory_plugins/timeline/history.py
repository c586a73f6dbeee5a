"""The timelines of several engines and the handoffs of their trainers, side by side for an export."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rl_memory_plugins.errors import InvalidRequestError, RLMemoryError
from rl_memory_plugins.timeline.records import Event, Handoff, RankMemory, Timeline


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
            found += [at for event in timeline.events for at in (event.start_ns, event.start_ns + event.duration_ns)]
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


def lanes_of(events: Iterable[Event]) -> list[list[Event]]:
    """The events in as few rows as possible, such that those of a row do not overlap. Several clients overlap."""
    lanes: list[list[Event]] = []
    for event in sorted(events, key=lambda event: event.start_ns):
        for lane in lanes:
            if lane[-1].start_ns + lane[-1].duration_ns <= event.start_ns:
                lane.append(event)
                break
        else:
            lanes.append([event])
    return lanes
