"""Fleets of toy engines: which engines are left out of a call, and what follows. Needs Ray, and no cluster."""

from __future__ import annotations

import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rl_memory_plugins.errors import EngineLostError, HostMemoryError, StateConflictError, WeightUpdateError
from rl_memory_plugins.ray import EngineFleet
from rl_memory_plugins.ray import fleet as fleet_module
from rl_memory_plugins.trainer import handoff as handoff_module
from rl_memory_plugins.trainer import push_from_all
from rl_memory_plugins.trainer.offloading import Moved
from rl_memory_plugins.trainer.outcomes import Outcome

UNIT = Path(__file__).parents[1] / "unit"
sys.path[:0] = [str(UNIT), str(UNIT / "trainer"), str(UNIT / "weights")]

from helpers import interrupts  # noqa: E402
from toy_engine import ToyEngine  # noqa: E402
from toys import checkpoint, loaded  # noqa: E402

OPTIONS = {"bucket_bytes": 256, "timeout_s": 30.0}


class Engine(ToyEngine):
    """Leaves and joins a fleet."""

    def __init__(self, number: int) -> None:
        super().__init__(first_device=number)
        self.number = number
        self.state = "started"

    def sleep(self, level: Any = 1, tags: Any = None, mode: Any = "abort", keep: Any = None) -> None:
        super().sleep(level, tags, mode)

    def start(self, closed: bool = False, timeout_s: float | None = None) -> None:
        self._call("start", closed, timeout_s)

    def leave(self) -> None:
        self.state = "joining"
        self.awake.clear()

    def join(self) -> None:
        self.state = "started"

    def end(self) -> None:
        self.state = "empty"
        self.awake.clear()


class Fleet(EngineFleet):
    def _phases(self) -> list[str]:
        return [engine.state for engine in self.engines]  # type: ignore[attr-defined]


@pytest.fixture
def fleet() -> Any:
    return Fleet([Engine(number) for number in (4, 5, 6)])  # type: ignore[arg-type]


def assert_serve(fleet: Any, version: str, tensors: Any, *numbers: int) -> None:
    for engine in fleet.engines:
        assert engine.open == (engine.number in numbers) == (engine.state == "started")
        if engine.open:
            assert engine.version == version
            engine.ranks[0].model.assert_unchanged(loaded(tensors))


FAILURES = [("sleep", HostMemoryError("full")), ("post_update", EngineLostError("has died", engine=5))]


@pytest.mark.parametrize(("call", "error"), FAILURES, ids=["sleep", "update"])
def test_a_handoff_goes_on_without_an_engine_that_fails(fleet: Any, call: str, error: Exception) -> None:
    tensors = checkpoint(3)
    fleet.engines[1].fail[call] = error
    with fleet.handoff(tensors, **OPTIONS).training("3") as report:
        pass
    assert [(one.engine, type(one.error)) for one in report.failed] == [(5, type(error))]
    assert_serve(fleet, "3", tensors, 4, 6)
    assert fleet.replace(tensors, **OPTIONS) == [5]
    assert_serve(fleet, "3", tensors, 4, 5, 6)


@pytest.mark.parametrize("call", ["update", "handoff"])
def test_an_engine_whose_link_breaks_for_a_moment_has_ended_when_it_is_back(fleet: Any, call: str) -> None:
    tensors, broken = checkpoint(3), fleet.engines[1]

    def link_comes_back() -> None:
        if broken.state == "lost":
            broken.state = "started"

    broken.state = "lost"
    if call == "update":
        fleet.update(tensors, "3", **OPTIONS)
        link_comes_back()
    else:
        with fleet.handoff(tensors, **OPTIONS).training("3"):
            assert not broken.awake  # the trainer has the memory
            link_comes_back()
    assert_serve(fleet, "3", tensors, 4, 6)
    assert fleet.replace(tensors, **OPTIONS) == [5]
    assert_serve(fleet, "3", tensors, 4, 5, 6)


class Stays:
    """A part of a trainer that cannot leave the device."""

    def load(self) -> Moved:
        return Moved(0, 0.0)

    def offload(self) -> Moved:
        raise HostMemoryError("full")


def test_an_engine_that_missed_an_update_is_left_out_also_if_the_handoff_fails_later(fleet: Any) -> None:
    tensors = checkpoint(3)
    handoff = fleet.handoff(tensors, level=1, weights=[Stays()], **OPTIONS)
    fleet.engines[1].fail["post_update"] = StateConflictError("busy")
    with pytest.raises(HostMemoryError), handoff.training("3"):
        pass
    fleet.wake_up()
    assert_serve(fleet, "3", tensors, 4, 6)


@pytest.mark.parametrize("call", ["update", "handoff"])
def test_an_engine_that_missed_an_update_is_left_out_also_if_the_update_fails_in_this_process(
    fleet: Any, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """As where this process of several has failed, and the others have brought the weights to their engines."""
    tensors = checkpoint(3)

    def fails(engines: Any, *arguments: Any, **options: Any) -> Any:
        push_from_all([engines[0]], *arguments, **options)
        busy = StateConflictError("busy").to_record()
        outcomes = [Outcome(0, 4), *(Outcome(0, number, busy) for number in (5, 6))]
        raise WeightUpdateError("broken", engines=msgspec.to_builtins(outcomes))

    monkeypatch.setattr({"update": fleet_module, "handoff": handoff_module}[call], "push_from_all", fails)
    with pytest.raises(WeightUpdateError, match="broken"):
        if call == "update":
            fleet.update(tensors, "3", **OPTIONS)
        else:
            with fleet.handoff(tensors, level=1, **OPTIONS).training("3"):
                pass
    monkeypatch.undo()
    if call == "handoff":
        fleet.wake_up()
    assert_serve(fleet, "3", tensors, 4)
    assert fleet.replace(tensors, **OPTIONS) == [5, 6]
    assert_serve(fleet, "3", tensors, 4, 5, 6)


@pytest.mark.parametrize("call", ["update", "handoff"])
@pytest.mark.parametrize("times", [1, 2])
def test_all_engines_leave_after_an_interrupted_update_and_come_back_alike(
    fleet: Any, monkeypatch: pytest.MonkeyPatch, times: int, call: str
) -> None:
    """One has the new weights, the others would serve the former ones. The second interrupt comes while they leave."""
    tensors, leaving, end = checkpoint(4), threading.Event(), threading.Event()
    fleet.update(checkpoint(3), "3", **OPTIONS)

    def interrupted(engines: Any, *arguments: Any, **options: Any) -> Any:
        push_from_all([engines[0]], *arguments, **options)
        raise KeyboardInterrupt

    def hangs(engine: Engine) -> None:
        if engine is fleet.engines[2] and not leaving.is_set():
            leaving.set()
            end.wait(60)
        else:
            leave(engine)

    leave = Engine.leave
    monkeypatch.setattr({"update": fleet_module, "handoff": handoff_module}[call], "push_from_all", interrupted)
    if times == 2:
        monkeypatch.setattr(Engine, "leave", hangs)
    with interrupts(leaving) if times == 2 else nullcontext(), pytest.raises(KeyboardInterrupt):
        if call == "update":
            fleet.update(tensors, "4", **OPTIONS)
        else:
            with fleet.handoff(tensors, level=1, **OPTIONS).training("4"):
                pass
    monkeypatch.undo()
    assert_serve(fleet, "4", tensors)
    end.set()
    assert fleet.replace(tensors, **OPTIONS) == [4, 5, 6]
    assert_serve(fleet, "4", tensors, 4, 5, 6)


def test_an_update_reaches_each_engine_once(fleet: Any) -> None:
    tensors = checkpoint(4)
    fleet.engines[1].fail["post_update"] = EngineLostError("has died", engine=5)
    report = fleet.update(tensors, **OPTIONS)
    assert [one.engine for one in report["failed"]] == [5]
    assert [call for call in fleet.engines[0].log if call[0] == "post_update"] == [("post_update", "1")]
    assert_serve(fleet, "1", tensors, 4, 6)
    part = {"norm.weight": tensors["norm.weight"] + 1}
    fleet.update(part, "2", partial=True, **OPTIONS)
    assert fleet.replace({**tensors, **part}, **OPTIONS) == [5]
    assert_serve(fleet, "2", {**tensors, **part}, 4, 5, 6)


def test_former_weights_of_an_engine_that_comes_back_go_before_it_wakes(fleet: Any) -> None:
    back = fleet.engines[0]
    back.fail["post_update"] = StateConflictError("busy")
    fleet.update(checkpoint(4), **OPTIONS)
    back.log.clear()
    fleet.replace(checkpoint(4), start_timeout_s=77.0, **OPTIONS)
    assert back.log[0] == ("start", True, 77.0)
    assert [call[:2] for call in back.log[1:3]] == [("sleep", 2), ("wake_up", ["weights"])]


def test_an_engine_that_cannot_start_keeps_no_other_from_coming_back(
    fleet: Any, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = checkpoint(3)
    gone, back, _ = fleet.engines
    for engine in (gone, back):
        engine.fail["post_update"] = StateConflictError("busy")
    fleet.update(tensors, "3", **OPTIONS)
    gone.fail["start"] = EngineLostError("its node is gone", engine=4)
    assert fleet.replace(tensors, **OPTIONS) == [5]
    assert_serve(fleet, "3", tensors, 5, 6)
    assert [record.getMessage() for record in caplog.records] == ["engine 4 is not replaced: its node is gone"]
    gone.fail["start"] = EngineLostError("its node is gone", engine=4)
    with pytest.raises(EngineLostError, match="its node is gone"):
        fleet.replace(tensors, **OPTIONS)
    assert_serve(fleet, "3", tensors, 5, 6)
    assert fleet.replace(tensors, **OPTIONS) == [4]
    assert_serve(fleet, "3", tensors, 4, 5, 6)


def test_a_call_of_all_is_made_once_and_goes_on_without_a_lost_engine(fleet: Any) -> None:
    fleet.engines[2].fail["sleep"] = EngineLostError("has died", engine=6)
    assert sorted(fleet.sleep(1)) == [4, 5]
    assert [len(engine.log) for engine in fleet.engines] == [1, 1, 1]
    fleet.engines[0].fail["wake_up"] = HostMemoryError("full")
    with pytest.raises(HostMemoryError) as caught:
        fleet.wake_up()
    assert caught.value.details["engine"] == 4
    assert sorted(fleet.wake_up()) == [4, 5]


def test_without_an_engine_left(fleet: Any) -> None:
    for engine in fleet.engines:
        engine.fail["sleep"] = EngineLostError("has died", engine=engine.number)
    with pytest.raises(StateConflictError, match="no engine of the fleet is up"):
        fleet.sleep()
    with pytest.raises(StateConflictError, match="no engine of the fleet is up"):
        fleet.update(checkpoint(4), **OPTIONS)
