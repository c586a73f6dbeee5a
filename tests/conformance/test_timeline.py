"""The timeline of a real engine: what it says of transitions, and its exports beside a trainer's handoffs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner, Result

from integration.engines.base import Server
from rl_memory_plugins import cli
from rl_memory_plugins.errors import StateConflictError
from rl_memory_plugins.records import EngineStatus, StepTime
from rl_memory_plugins.timeline.history import timeline_in
from rl_memory_plugins.timeline.records import Timeline, memory_of
from tests.conformance.conftest import Weights
from tests.conformance.test_handoff import Trainer
from tests.conformance.trainers import broken_update, push


def events_since(server: Server, former: Timeline) -> Timeline:
    found = timeline_in(server.control.timeline(former.next))
    assert found.timeline == former.timeline and found.dropped == 0
    assert [event.first_seq for event in found.events] == list(range(former.next + 1, found.next + 1))
    return found


def shown(server: Server, *options: str) -> subprocess.CompletedProcess[str]:
    """`rl-memory timeline` of this server."""
    return subprocess.run(
        [sys.executable, "-m", "rl_memory_plugins", "timeline", "--url", server.url, *options],
        env={**os.environ, "RL_MEMORY_API_KEY": server.launch.api_key, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def shown_here(server: Server) -> Result:
    """The same once, in this process: a new interpreter may take longer than an update may stall."""
    variables = {"RL_MEMORY_API_KEY": server.launch.api_key, "COLUMNS": "200"}
    return CliRunner().invoke(cli.app, ["timeline", "--url", server.url, "--once"], env=variables)


@pytest.fixture
def former(server: Server) -> Timeline:
    return timeline_in(server.control.timeline())


def test_a_sleep_and_a_wake(server: Server, former: Timeline) -> None:
    slept = server.control.sleep(2, tags=["weights"])["report"]
    asleep = timeline_in(server.control.timeline(former.next))
    woken = server.control.wake_up()["report"]
    found = events_since(server, former)
    for event, operation, report in zip(found.events, ("sleep", "wake_up"), (slept, woken), strict=True):
        assert (event.operation, event.outcome) == (operation, "completed")
        ran = {step: seconds for step, seconds in report["seconds"].items() if step != "total" and seconds > 0}
        assert {step.name for step in event.steps} == set(ran)
        reported = msgspec.convert(report["steps"], list[StepTime])
        places = {(one.step, one.engine, one.rank, one.start_ns, one.end_ns) for one in reported if one.step != "total"}
        ends = {step: step.start_ns + step.duration_ns for step in event.steps}
        assert {(step.name, step.engine, step.rank, step.start_ns, end) for step, end in ends.items()} == places
        by_rank = {(step.engine, step.rank) for step in event.steps if step.rank is not None}
        assert len(by_rank) == server.launch.ranks, "each rank tells its own"
        assert event.duration_ns >= report["seconds"]["total"] * 1e9 * 0.999 or server.launch.dp > 1
        assert event.start_ns <= event.steps[0].start_ns
        assert max(ends.values()) <= event.start_ns + event.duration_ns + 50_000_000, "two clocks may part a little"
    sleep, wake = found.events
    assert (sleep.level, sleep.tags, sleep.content) == (2, ["weights"], "stale")
    assert len(sleep.before) == server.launch.ranks
    released = sum(change["bytes_released"] for change in slept["changes"] if change["tag"] == "weights")
    held = [sum(rank.tags["weights"] for rank in memories) for memories in (sleep.before, sleep.after, wake.after)]
    assert held == [released, 0, released] and released > 0
    assert sleep.start_ns + sleep.duration_ns <= wake.start_ns <= found.clock.now_ns
    assert asleep.present is not None and asleep.present.reason == "asleep"
    engines = msgspec.convert(server.control.memory()["engines"], list[EngineStatus])
    assert found.present is not None
    assert [one.tags for one in found.present.memory] == [one.tags for one in memory_of(engines)]


def test_updates_and_what_fails(server: Server, weights: Weights, former: Timeline) -> None:
    with broken_update(server, weights.other, stall=True) as update:
        with pytest.raises(StateConflictError):
            server.control.sleep()
        during = events_since(server, former)
        assert update.runs(), "the answer has not waited for the update"
        assert during.present is not None and {one.operation for one in during.present.under_way} == {"update_weights"}
        assert [(event.operation, event.error) for event in during.events] == [("sleep", "StateConflictError")]
    broken_update(server, weights.other)
    push(server, weights.other, weight_version="timeline-1")
    updates = [event for event in events_since(server, during).events if event.operation == "update_weights"]
    assert [event.error for event in updates][-2:] == ["WeightUpdateError", None]
    whole = updates[-1]
    assert (whole.weight_version, whole.content, whole.outcome) == ("timeline-1", "valid", "completed")
    assert whole.received_bytes > 0 and whole.transports
    assert {"connect", "load"} <= {step.name for step in whole.steps}


def test_refused_calls_are_one_event(server: Server, weights: Weights, former: Timeline) -> None:
    with broken_update(server, weights.other, stall=True):
        for _ in range(5):
            with pytest.raises(StateConflictError):
                server.control.sleep()
        [refused] = timeline_in(server.control.timeline(former.next)).events
        assert (refused.count, refused.first_seq, refused.seq) == (5, former.next + 1, former.next + 5)
        during = shown_here(server)
    assert during.exit_code == 0 and "5 calls" in during.output, during.output
    assert "update_weights is under way" in during.output


def test_the_command_while_the_engine_sleeps(server: Server) -> None:
    server.control.sleep(2)
    asleep = shown(server, "--once")
    assert asleep.returncode == 0 and "admits no requests (asleep)" in asleep.stdout, asleep.stderr
    assert "sleep 2 of" in asleep.stdout and " to " in asleep.stdout, "steps with begin and end"
    if server.launch.api_key:
        wrong = shown(server, "--api-key", "wrong", "--once")
        assert wrong.returncode == 1 and wrong.stderr.startswith("AuthenticationError: "), wrong.stderr


def test_a_handoff_and_its_engine_on_one_clock(
    server: Server, weights: Weights, former: Timeline, tmp_path: Path
) -> None:
    trainer = Trainer(server, weights.first)
    with trainer.handoff.training("timeline-2") as report:
        trainer.train(weights.other)
    report.append_to(tmp_path / "handoffs.jsonl")
    trainer.offloader.close()
    steps = {step.name: step for step in report.steps}
    for step, event in zip(
        ("sleep", "wake_weights", "sync", "wake_kv_cache"), events_since(server, former).events, strict=True
    ):
        assert steps[step].start_ns <= event.start_ns, step
        ends = steps[step].start_ns + steps[step].duration_ns
        assert event.start_ns + event.duration_ns <= ends + 50_000_000, "two clocks of one process may part a little"

    files = ["--html", str(tmp_path / "t.html"), "--perfetto", str(tmp_path / "t.json")]
    done = shown(server, *files, "--handoff", str(tmp_path / "handoffs.jsonl"), "--once")
    assert done.returncode == 0, done.stderr
    assert "wake_up of weights" in done.stdout and "admits requests" in done.stdout
    page = (tmp_path / "t.html").read_text()
    assert "<svg" in page and "handoffs.jsonl" in page
    assert not re.search(r"<[^>]*\b(src|href)=", page), "the page needs nothing else"
    slices: list[dict[str, Any]] = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    names = {event["name"] for event in slices if event["ph"] == "X"}
    assert {"handoff", "training", "sync", "sleep", "release", "update_weights", "load", "wake_up"} <= names
    assert {event["name"] for event in slices if event["ph"] == "C"} >= {"device bytes, engine 0 rank 0"}
