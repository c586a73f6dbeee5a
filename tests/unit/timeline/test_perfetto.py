"""The trace keeps the rules of the Chrome trace event format."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from histories import BASE_NS, EXAMPLE, event, handoff, history

from rl_memory_plugins.timeline.history import History
from rl_memory_plugins.timeline.perfetto import perfetto_trace
from rl_memory_plugins.timeline.records import Step


def no_json(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def assert_valid(text: str) -> list[dict[str, Any]]:
    """Check the rules by which ui.perfetto.dev and chrome://tracing read a trace. Returns its events."""
    loaded = json.loads(text, parse_constant=no_json)
    assert isinstance(loaded["traceEvents"], list)
    assert loaded["displayTimeUnit"] in ("ms", "ns")
    open_slices: dict[tuple[int, int], list[tuple[float, float]]] = {}
    series: dict[tuple[int, str], set[str]] = {}
    for entry in loaded["traceEvents"]:
        assert entry["ph"] in ("M", "X", "C")
        assert isinstance(entry["name"], str) and entry["name"]
        assert isinstance(entry["pid"], int) and isinstance(entry["tid"], int)
        assert isinstance(entry["ts"], (int, float)) and entry["ts"] >= 0
        if entry["ph"] == "M":
            assert entry["name"] in ("process_name", "thread_name") and isinstance(entry["args"]["name"], str)
        elif entry["ph"] == "X":
            assert entry["dur"] >= 0
            open_slices.setdefault((entry["pid"], entry["tid"]), []).append((entry["ts"], entry["dur"]))
        else:
            assert all(isinstance(value, (int, float)) for value in entry["args"].values())
            known = series.setdefault((entry["pid"], entry["name"]), set(entry["args"]))
            assert known == set(entry["args"]), "a series that is not there keeps its former value"
    for slices in open_slices.values():
        assert_nested(slices)
    return list(loaded["traceEvents"])


def assert_nested(slices: list[tuple[float, float]]) -> None:
    """Slices of a thread either lie within one another or do not meet: others are dropped or drawn wrongly."""
    ends: list[float] = []
    for start, duration in sorted(slices, key=lambda one: (one[0], -one[1])):
        while ends and ends[-1] <= start + 1e-3:
            ends.pop()
        assert not ends or start + duration <= ends[-1] + 1e-3
        ends.append(start + duration)


def slices(events: list[dict[str, Any]], pid: int) -> list[str]:
    return [entry["name"] for entry in events if entry["ph"] == "X" and entry["pid"] == pid]


def test_transitions_with_their_steps_and_handoffs_on_one_clock() -> None:
    events = assert_valid(perfetto_trace(history()))
    assert slices(events, 1) == ["sleep", "wake_up", "drain", "backup", "synchronize", "release"]
    assert slices(events, 1) == slices(events, 2)
    assert slices(events, 3) == ["handoff", "sleep", "load"]
    starts = {(entry["pid"], entry["name"]): entry["ts"] for entry in events if entry["ph"] == "X"}
    assert starts[3, "handoff"] == 0.0
    assert starts[1, "sleep"] == 1000.0, "the engine's sleep begins a millisecond after the handoff's"
    names = [entry["args"]["name"] for entry in events if entry["name"] == "process_name"]
    assert names == ["http://a:1", "http://b:2", "trainer.jsonl"]
    assert json.loads(perfetto_trace(history()))["baseTimeNanoseconds"] == BASE_NS - 1_000_000


def test_counters_by_owner() -> None:
    events = assert_valid(perfetto_trace(history()))
    device = [
        entry["args"] for entry in events if entry["name"] == "device bytes, engine 0 rank 0" and entry["pid"] == 1
    ]
    assert device[0]["weights"] == 15231233024 and device[0]["left: context"] == 0
    assert device[1]["weights"] == 0 and device[1]["left: context"] == 613416960, "measured soon after the sleep"
    trainer = [entry["args"]["trainer"] for entry in events if entry["name"] == "device bytes, trainer"]
    assert trainer == [7 << 30, 7 << 30, 7 << 30, 9 << 30]


def test_failures_name_their_errors() -> None:
    events = assert_valid(perfetto_trace(history()))
    errors = [entry["args"]["error"] for entry in events if "error" in entry["args"]]
    assert errors == ["DeviceMemoryError", "DeviceMemoryError", "HostMemoryError"]


def test_calls_of_several_clients_that_overlap_get_threads_of_their_own() -> None:
    long = event(1, start_ns=BASE_NS, duration_ns=10_000)
    refused = event(2, start_ns=BASE_NS + 5_000, duration_ns=9_000, error="StateConflictError", steps=[])
    later = event(3, start_ns=BASE_NS + 10_000, duration_ns=10)
    timeline = msgspec.structs.replace(EXAMPLE, events=[long, refused, later])
    events = assert_valid(perfetto_trace(History({"a": timeline})))
    threads = {entry["ts"]: entry["tid"] for entry in events if entry["ph"] == "X" and entry["name"] == "sleep"}
    assert threads == {0.0: 1, 5.0: 2, 10.0: 1}


def test_the_steps_of_each_rank_have_threads_of_their_own() -> None:
    """Parts of a backup and a release alternate, so a rank's steps overlap; the clock of another host differs."""
    steps = [
        Step("drain", BASE_NS, 100),
        Step("backup", BASE_NS + 200, 500, rank=0),
        Step("release", BASE_NS + 300, 500, rank=0, seconds=3e-7),
        Step("backup", BASE_NS - 400, 300, engine=1, rank=0),
    ]
    timeline = msgspec.structs.replace(EXAMPLE, events=[event(1, steps=steps)])
    events = assert_valid(perfetto_trace(History({"a": timeline})))
    names = {entry["tid"]: entry["args"]["name"] for entry in events if entry["name"] == "thread_name"}
    places = {(entry["name"], entry["ts"], entry["dur"]): names[entry["tid"]] for entry in events if entry["ph"] == "X"}
    assert places == {
        ("sleep", 0.4, 1.0): "transitions",
        ("drain", 0.4, 0.1): "steps of engine 0",
        ("backup", 0.6, 0.5): "steps of engine 0 rank 0",
        ("release", 0.7, 0.5): "steps of engine 0 rank 0, at the same time (1)",
        ("backup", 0.0, 0.3): "steps of engine 1 rank 0",
    }


def test_the_check_of_nesting_can_fail() -> None:
    with pytest.raises(AssertionError):
        assert_nested([(0.0, 1.0), (0.5, 1.0)])


def test_a_flood_of_refusals_is_one_slice() -> None:
    events = assert_valid(perfetto_trace(history()))
    [refused] = [entry for entry in events if entry["pid"] == 1 and entry["name"] == "wake_up"]
    assert (refused["args"]["count"], refused["dur"]) == (3, 2_003_000.0)


def test_nothing_has_happened_yet() -> None:
    assert_valid(perfetto_trace(History({"a": msgspec.structs.replace(EXAMPLE, events=[], next=0, present=None)})))
    assert_valid(perfetto_trace(History({}, {"t": [handoff()]})))
    assert_valid(perfetto_trace(History({}, {"t": []})))
