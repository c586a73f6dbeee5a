"""What an event says of a transition."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_control import FakeControl, rank_status

from rl_memory_plugins import operations
from rl_memory_plugins.commands import Sleep
from rl_memory_plugins.errors import DeviceMemoryError, HostMemoryError, StateConflictError
from rl_memory_plugins.observing import Course, trying_again
from rl_memory_plugins.records import EngineStatus, Report, StepTime, TagStatus
from rl_memory_plugins.tags import Content, TagState
from rl_memory_plugins.timeline.recorder import Recorder, event_of, steps_of
from rl_memory_plugins.timeline.records import Event, Step, Timeline


def run(control: FakeControl, command: Any) -> Any:
    return asyncio.run(control.run(control.transition(command)))


def events(control: FakeControl, since: int = 0) -> list[Event]:
    return control.recorder.timeline(since, control.status_now()).events


def test_a_sleep_and_a_wake_with_the_bytes_around_them() -> None:
    control = FakeControl()
    start_ns = time.time_ns()
    run(control, operations.sleep(1, tags=["weights"], mode="keep"))
    run(control, operations.wake_up())
    slept, woken = events(control)
    assert (slept.seq, slept.operation, slept.outcome, slept.error) == (1, "sleep", "completed", None)
    assert (slept.level, slept.tags, slept.mode, slept.idle) == (1, ["weights"], "keep", False)
    assert start_ns <= slept.start_ns <= woken.start_ns <= time.time_ns()
    assert slept.duration_ns > 0
    [before], [after] = slept.before, slept.after
    assert (before.engine, before.rank, before.device) == (0, 0, "cpu:0")
    assert before.tags == {"weights": 4096, "kv_cache": 4096, "cuda_graph": 4096}
    assert after.tags == {"weights": 0, "kv_cache": 4096, "cuda_graph": 4096}
    assert woken.before == slept.after and woken.after == slept.before
    assert (woken.level, woken.mode, woken.weight_version, woken.content) == (None, None, "v7", Content.VALID)
    assert events(control, since=1) == [woken]


def test_a_failure_with_the_type_of_its_error() -> None:
    control = FakeControl()
    control.failure = HostMemoryError("full")
    with pytest.raises(HostMemoryError):
        run(control, operations.sleep())
    control.failure = None
    [failed] = events(control)
    assert (failed.outcome, failed.error, failed.message, failed.steps) == ("failed", "HostMemoryError", "full", [])


def test_a_refusal_during_an_update_has_the_state_of_that_moment() -> None:
    control = FakeControl()
    [status] = control.status_now()
    control.engines = [msgspec.structs.replace(status, busy="update_weights")]
    with pytest.raises(StateConflictError):
        run(control, operations.wake_up())
    timeline = control.recorder.timeline(0, control.engines)
    [failed] = timeline.events
    assert failed.error == "StateConflictError" and failed.after == failed.before != []
    assert timeline.present is not None and timeline.present.reason == "updating"
    assert [(one.engine, one.operation) for one in timeline.present.under_way] == [(0, "update_weights")]


def test_an_engine_that_turns_out_not_to_be_idle_is_no_event() -> None:
    control = FakeControl()
    control.failure = StateConflictError("it had requests")
    with pytest.raises(StateConflictError):
        run(control, operations.sleep_if_idle(5.0))
    control.failure = None
    assert events(control) == []
    run(control, operations.sleep_if_idle(5.0))
    assert [event.idle for event in events(control)] == [True]


def test_a_wake_that_is_tried_again_is_no_event_until_it_ends() -> None:
    control = FakeControl()
    control.failure = DeviceMemoryError("another engine has the memory")
    with trying_again(), pytest.raises(DeviceMemoryError):
        run(control, operations.wake_up())
    assert events(control) == []
    with pytest.raises(DeviceMemoryError):
        run(control, operations.wake_up())
    assert [event.error for event in events(control)] == ["DeviceMemoryError"]


def test_an_update_counts_what_all_ranks_of_all_engines_received() -> None:
    course = Course(operations.update_weights({"*": "/s"}, "token"))
    course.ends()
    ranks = [{"rank": 0, "bytes": 10, "transport": "shm"}, {"rank": 1, "bytes": 20, "transport": "cuda_ipc"}]
    course.report = Report([], {"total": 0.0}, {"engines": [{"ranks": ranks}, {"ranks": ranks[:1]}]})
    event = event_of(1, course)
    assert (event.received_bytes, event.transports) == (40, ["cuda_ipc", "shm"])
    assert (event.before, event.content, event.weight_version) == ([], None, None), "the engines were not known"


def test_steps_lie_where_each_rank_has_measured_them() -> None:
    ran = [
        StepTime("drain", None, 10_000, 10_200, 2e-7),
        StepTime("total", None, 10_000, 11_000, 1e-6),
        StepTime("backup", 0, 10_300, 10_900, 3e-7),
        StepTime("release", 0, 10_500, 10_950, 1e-7),
        StepTime("backup", 1, 10_250, 10_400, 1.5e-7, engine=1),
    ]
    assert steps_of(Report([], {"total": 1.0}, steps=ran)) == [
        Step("drain", 10_000, 200, seconds=2e-7),
        Step("backup", 10_250, 150, engine=1, rank=1, seconds=1.5e-7),
        Step("backup", 10_300, 600, rank=0, seconds=3e-7),
        Step("release", 10_500, 450, rank=0, seconds=1e-7),
    ]


def test_a_flood_of_refused_calls_is_one_event() -> None:
    """64 ranks of a trainer call an engine that an update keeps busy, and a client retries."""
    control = FakeControl()
    run(control, operations.wake_up())
    control.failure = StateConflictError("a weight update is running; retry when it has ended")
    for _ in range(64):
        with pytest.raises(StateConflictError):
            run(control, operations.sleep())
    control.failure = None
    run(control, operations.sleep())
    woken, refused, slept = events(control)
    assert (woken.seq, refused.seq, slept.seq) == (1, 65, 66)
    assert (refused.count, refused.first_seq, refused.error) == (64, 2, "StateConflictError")
    assert [event.seq for event in events(control, since=30)] == [65, 66]


def test_what_a_rank_holds_by_owner() -> None:
    tags = {"weights": TagStatus(TagState.PRESERVED, 100, host_bytes=80), "kv_cache": TagStatus(TagState.RESIDENT, 7)}
    rank = msgspec.structs.replace(rank_status(3), tags=tags, left={"context": 5}, host_arena_bytes=90)
    recorder = Recorder()
    [memory] = recorder.timeline(0, [EngineStatus([rank], engine_rank=2)]).present.memory  # type: ignore[union-attr]
    assert (memory.engine, memory.rank, memory.device) == (2, 3, "cpu:3")
    assert memory.tags == {"weights": 0, "kv_cache": 7}
    assert (memory.host, memory.host_arena_bytes, memory.left) == ({"weights": 80, "kv_cache": 0}, 90, {"context": 5})


def test_dropped_events_count() -> None:
    control = FakeControl()
    control.recorder._ring._kept_bytes = 4096
    for _ in range(20):
        run(control, operations.wake_up())
    timeline = control.recorder.timeline(3, [])
    assert timeline.next == 20 and timeline.present is None
    assert timeline.dropped > 0 and timeline.dropped + len(timeline.events) == 17
    assert control.recorder.timeline(20, []).dropped == 0


def test_servers_of_one_engine_share_a_timeline_and_others_do_not(tmp_path: Path) -> None:
    first, second, other = Recorder(), Recorder(), Recorder()
    for recorder, engine in ((first, "4711-x"), (second, "4711-x"), (other, "4712-y")):
        recorder.share(str(tmp_path), engine)
    course = Course(Sleep())
    first.note(course)
    second.note(course)
    assert [event.seq for event in second.timeline(0, []).events] == [1, 2]
    assert first.timeline(0, []).timeline == second.timeline(0, []).timeline
    assert other.timeline(0, []).events == []


def test_a_timeline_that_cannot_be_shared_or_written_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder()
    recorder.share(str(tmp_path / "none"), "4711-x")
    recorder.note(Course(Sleep()))
    assert len(recorder.timeline(0, []).events) == 1
    recorder._ring.close()
    recorder.note(Course(Sleep()))
    assert "could not be kept" in caplog.text


def test_an_engine_in_python_tells_its_timeline() -> None:
    control = FakeControl()
    run(control, operations.sleep())
    timeline: Timeline = asyncio.run(control.run(control.timeline()))
    assert [event.operation for event in timeline.events] == ["sleep"]
    assert timeline.present is not None and not timeline.present.admitting
