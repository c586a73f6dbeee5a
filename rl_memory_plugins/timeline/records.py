"""The records of a timeline, as a server answers them and as exports read them.

All times are nanoseconds since 1970 by the wall clock of the host (`time.time_ns`), so a trainer and an engine on one
host share a clock. A JavaScript reader rounds them to 256 ns.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from rl_memory_plugins.records import EngineStatus
from rl_memory_plugins.tags import Content, TagState

VERSION = 1
"""Of the form of these records."""


class Step(msgspec.Struct, frozen=True):
    """A step of a transition on one rank, as the rank has measured it. Steps of a rank may overlap."""

    name: str
    start_ns: int
    duration_ns: int
    engine: int = 0  # the number of the data-parallel engine
    rank: int | None = None  # `None` for a step of the engine as a whole
    seconds: float = 0.0  # less than the duration if the step ran in several parts


class RankMemory(msgspec.Struct, frozen=True):
    """The memory of one rank at one moment, in bytes."""

    engine: int  # the number of the data-parallel engine
    rank: int
    device: str
    tags: dict[str, int]  # on the device, by tag: 0 for a tag that sleeps
    left: dict[str, int]  # on the device beside the tags, by cause; known while a tag sleeps, and only on GPUs
    host: dict[str, int]  # content in host memory, by tag
    host_arena_bytes: int  # host memory of the rank for copies, in use or kept for the next sleep
    device_free_bytes: int  # when the latest transition ended
    device_total_bytes: int


class Event(msgspec.Struct, frozen=True):
    """A transition that has ended, or several equal calls that were refused."""

    seq: int  # rises; an event that takes up another call gets a new number
    operation: str  # a key of `transition.STEPS`
    start_ns: int  # of the first call
    duration_ns: int  # up to the end of the last call
    outcome: Literal["completed", "failed"]
    steps: list[Step]  # that ran, on each rank, by their starts; empty after a failure
    before: list[RankMemory]
    after: list[RankMemory]  # a sleep ends before `left` is measured: the next event's `before` has it
    weight_version: str | None  # afterwards; `None` if the engines did not tell
    content: Content | None  # afterwards, the worst of all ranks
    error: str | None = None  # the type of the error
    message: str | None = None  # of the error
    level: int | None = None  # of a sleep
    tags: list[str] | None = None  # that the call names, of a sleep or a wake
    mode: str | None = None  # what happened to running requests, of a sleep or an update
    idle: bool = False  # a sleep because no request came
    received_bytes: int = 0  # by all ranks, in an update
    transports: list[str] = []  # of an update
    count: int = 1  # calls that the event stands for
    first_seq: int = 0  # the number of the first of them. The event takes the place of any other that has the same


class UnderWay(msgspec.Struct, frozen=True):
    engine: int
    operation: str  # as `EngineStatus.busy`


class Present(msgspec.Struct, frozen=True):
    """The state at the moment of the answer, as `GET /memory` tells it in full."""

    admitting: bool
    reason: str | None  # why a generation request would be refused
    weight_version: str
    content: Content
    under_way: list[UnderWay]
    memory: list[RankMemory]


class Clock(msgspec.Struct, frozen=True):
    now_ns: int  # when the answer was made
    host: str  # whose clock it is


class Timeline(msgspec.Struct, frozen=True):
    """The events that a timeline still holds, and the present state."""

    version: int
    timeline: str  # a random name; another one: the server has started again, and counts from 1
    clock: Clock
    events: list[Event]  # by rising `seq`
    next: int  # the `since` of the next question: the number of the latest event
    dropped: int  # calls after `since` up to the last one whose event is gone; a kept event may stand for some of them
    present: Present | None  # `None` before the server knows its engines


def memory_of(engines: Iterable[EngineStatus]) -> list[RankMemory]:
    """The memory of all ranks of these engines."""
    return [
        RankMemory(
            engine=engine.engine_rank,
            rank=rank.rank,
            device=rank.device,
            tags={name: tag.bytes if tag.state is TagState.RESIDENT else 0 for name, tag in rank.tags.items()},
            left=rank.left,
            host={name: tag.host_bytes for name, tag in rank.tags.items()},
            host_arena_bytes=rank.host_arena_bytes,
            device_free_bytes=rank.device_free_bytes,
            device_total_bytes=rank.device_total_bytes,
        )
        for engine in engines
        for rank in engine.ranks
    ]


class HandoffStep(msgspec.Struct, frozen=True):
    """A step of a trainer's handoff that ran. `trainer_bytes`: of the parts that it moves, on the device."""

    name: str  # one of `trainer.handoff_report.STEPS`, or `training`
    start_ns: int
    duration_ns: int
    trainer_bytes_before: int
    trainer_bytes_after: int
    error: str | None = None  # the type of the error with which the step ended


class Handoff(msgspec.Struct, frozen=True):
    """A line of a trainer's file: one handoff of one of its processes."""

    version: int
    host: str  # whose clock it is
    trainer_rank: int
    device: str  # as engines name it
    steps: list[HandoffStep]  # by their starts
    seconds: dict[str, float]  # by step, as in `HandoffReport`
    moved_bytes: dict[str, int]
    failed_engines: list[str] = []  # the type of the error of each engine that was left out
