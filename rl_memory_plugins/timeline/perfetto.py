"""A history in the Chrome trace event format, which ui.perfetto.dev and chrome://tracing show.

Each engine server and each trainer process is a process of the trace: its transitions are slices, the steps of each
rank are slices of threads of their own, and the bytes by owner are counters. Times are microseconds since
`baseTimeNanoseconds`, a field that torch's profiler writes too.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from rl_memory_plugins.timeline.history import History, lanes_of, points_of
from rl_memory_plugins.timeline.records import Event, Handoff, RankMemory, Step, Timeline

TraceEvent = dict[str, Any]


def perfetto_trace(history: History) -> str:
    """The JSON text of the trace."""
    base_ns = next(iter(history.times()), 0)
    events: list[TraceEvent] = []
    names = [*history.engines, *history.trainers]
    for pid, name in enumerate(names, start=1):
        events.append(_named("process_name", pid, 0, name))
        if name in history.engines:
            events += _of_engine(history.engines[name], pid, base_ns)
        else:
            events += _of_trainer(history.trainers[name], pid, base_ns)
    hosts = {name: timeline.clock.host for name, timeline in history.engines.items()}
    hosts |= {name: handoffs[0].host for name, handoffs in history.trainers.items() if handoffs}
    return json.dumps(
        {
            "traceEvents": events,
            "displayTimeUnit": "ms",
            "baseTimeNanoseconds": base_ns,
            "otherData": {"clock": "the wall clock of each host", "hosts": hosts},
        }
    )


def _of_engine(timeline: Timeline, pid: int, base_ns: int) -> Iterator[TraceEvent]:
    threads = itertools.count(1)
    for number, lane in enumerate(lanes_of(timeline.events)):
        tid = next(threads)
        yield _named("thread_name", pid, tid, "transitions of other clients" if number else "transitions")
        for event in lane:
            yield _slice(event.operation, pid, tid, event.start_ns - base_ns, event.duration_ns, _about(event))
    for place, steps in _steps_by_place(timeline).items():
        for number, ran in enumerate(lanes_of(steps)):
            tid = next(threads)
            yield _named("thread_name", pid, tid, f"{place}, at the same time ({number})" if number else place)
            for step in ran:
                about = {"seconds": step.seconds}
                yield _slice(step.name, pid, tid, step.start_ns - base_ns, step.duration_ns, about)
    for (engine, rank), points in points_of(timeline).items():
        place = f"engine {engine} rank {rank}"
        owners = {owner: 0 for point in points for owner in owners_of(point.memory)}
        for at_ns, memory in points:
            yield _counter(f"device bytes, {place}", pid, at_ns - base_ns, owners | owners_of(memory))
            yield _counter(f"host bytes, {place}", pid, at_ns - base_ns, memory.host)


def _steps_by_place(timeline: Timeline) -> dict[str, list[Step]]:
    """The steps of each engine as a whole, and of each of its ranks."""
    steps = [step for event in timeline.events for step in event.steps]
    places: dict[str, list[Step]] = {}
    for step in sorted(steps, key=lambda step: (step.engine, -1 if step.rank is None else step.rank)):
        rank = "" if step.rank is None else f" rank {step.rank}"
        places.setdefault(f"steps of engine {step.engine}{rank}", []).append(step)
    return places


def _of_trainer(handoffs: Sequence[Handoff], pid: int, base_ns: int) -> Iterator[TraceEvent]:
    yield _named("thread_name", pid, 1, "handoffs")
    for handoff in handoffs:
        if not handoff.steps:
            continue
        start_ns = handoff.steps[0].start_ns
        end_ns = max(step.start_ns + step.duration_ns for step in handoff.steps)
        about = {"trainer rank": handoff.trainer_rank, "device": handoff.device, "moved bytes": handoff.moved_bytes}
        yield _slice("handoff", pid, 1, start_ns - base_ns, end_ns - start_ns, about)
        for step in handoff.steps:
            about = {} if step.error is None else {"error": step.error}
            yield _slice(step.name, pid, 1, step.start_ns - base_ns, step.duration_ns, about)
            before, after = {"trainer": step.trainer_bytes_before}, {"trainer": step.trainer_bytes_after}
            yield _counter("device bytes, trainer", pid, step.start_ns - base_ns, before)
            yield _counter("device bytes, trainer", pid, step.start_ns + step.duration_ns - base_ns, after)


def owners_of(memory: RankMemory) -> dict[str, int]:
    """Bytes on the device by owner: the tags, and what is left beside them."""
    return {**memory.tags, **{f"left: {cause}": held for cause, held in memory.left.items()}}


def _about(event: Event) -> dict[str, Any]:
    """The fields of an event that a slice does not show otherwise."""
    shown = {"start_ns", "duration_ns", "steps", "before", "after", "operation", "first_seq"}
    fields: dict[str, Any] = msgspec.to_builtins(event)
    return {name: value for name, value in fields.items() if name not in shown and value not in (None, [], False)}


def _named(kind: str, pid: int, tid: int, name: str) -> TraceEvent:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}}


def _slice(
    name: str, pid: int, tid: int, at_ns: int, took_ns: int, about: Mapping[str, Any] | None = None
) -> TraceEvent:
    times = {"ts": at_ns / 1000, "dur": took_ns / 1000}
    return {"ph": "X", "cat": "rl_memory", "name": name, "pid": pid, "tid": tid, **times, "args": dict(about or {})}


def _counter(name: str, pid: int, at_ns: int, values: Mapping[str, int]) -> TraceEvent:
    return {"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": at_ns / 1000, "args": dict(values)}
