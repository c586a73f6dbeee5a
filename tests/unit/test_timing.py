"""The steps of a report, and where they lie on the wall clock."""

from __future__ import annotations

import time

import pytest

from rl_memory_plugins.timing import Moment, Steps, timed


def test_a_step_is_placed_where_it_ran() -> None:
    steps = Steps(["drain", "load"])
    before = time.time_ns()
    with timed(steps, "load"):
        inside = time.time_ns()
    start, end = steps.places["load"]
    assert before <= start <= inside <= end <= time.time_ns()
    assert steps["load"] > 0 and steps["drain"] == 0.0
    assert "drain" not in steps.places, "it did not run"


def test_the_parts_of_a_step_are_one_place() -> None:
    steps = Steps()
    for step in ("wait", "load", "wait"):
        with timed(steps, step):
            time.sleep(0.002)
    (start, end), (inner_start, inner_end) = steps.places["wait"], steps.places["load"]
    assert start < inner_start < inner_end < end
    assert steps["wait"] < (end - start) / 1e9, "the load lies between its parts"


def test_a_step_that_fails_is_placed_too() -> None:
    steps = Steps()
    with pytest.raises(ValueError), timed(steps, "load"):
        raise ValueError
    assert "load" in steps.places


def test_a_clock_that_is_set_back_leaves_no_step_that_ends_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, start = Steps(), Moment.now()
    monkeypatch.setattr(time, "time_ns", lambda: start.wall_ns - 5_000_000_000)
    steps.add("load", start)
    assert steps.places["load"] == (start.wall_ns, start.wall_ns)
    assert steps["load"] > 0


def test_a_copy_does_not_change_with_the_original() -> None:
    steps = Steps()
    with timed(steps, "load"):
        pass
    copied = steps.copy()
    with timed(steps, "load"):
        pass
    assert copied.places["load"] != steps.places["load"] and copied != steps


def test_plain_seconds_are_counted_as_before() -> None:
    seconds: dict[str, float] = {}
    for _ in range(2):
        with timed(seconds, "sync"):
            pass
    assert seconds.keys() == {"sync"} and seconds["sync"] > 0
