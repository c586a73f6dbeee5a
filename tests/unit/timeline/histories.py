"""Timelines for tests."""

from __future__ import annotations

from typing import Any

import msgspec

from rl_memory_plugins.server import examples
from rl_memory_plugins.tags import Content
from rl_memory_plugins.timeline.history import History
from rl_memory_plugins.timeline.records import VERSION, Event, Handoff, HandoffStep, Step, Timeline

[EXAMPLE] = [msgspec.convert(answer, Timeline) for answer in examples.TIMELINE.values()]
BASE_NS = EXAMPLE.events[0].start_ns


def event(seq: int = 0, start_ns: int = BASE_NS, duration_ns: int = 1000, **fields: Any) -> Event:
    """An event of no ranks."""
    given = {
        "operation": "sleep",
        "outcome": "completed",
        "steps": [Step("drain", start_ns, duration_ns)],
        "before": [],
        "after": [],
        "weight_version": "v1",
        "content": Content.VALID,
        **fields,
    }
    return Event(seq=seq, start_ns=start_ns, duration_ns=duration_ns, **{"first_seq": seq, **given})


def handoff(name: str = "sleep", start_ns: int = BASE_NS - 1_000_000, device: str = "cuda:0") -> Handoff:
    """A handoff of two steps, of which the second failed."""
    steps = [
        HandoffStep(name, start_ns, 500_000_000, 7 << 30, 7 << 30),
        HandoffStep("load", start_ns + 500_000_000, 1_000_000_001, 7 << 30, 9 << 30, error="HostMemoryError"),
    ]
    return Handoff(VERSION, "node-1", 0, device, steps, {name: 0.5, "load": 1.0}, {"load": 2 << 30})


def history() -> History:
    return History({"http://a:1": EXAMPLE, "http://b:2": EXAMPLE}, {"trainer.jsonl": [handoff()]})
