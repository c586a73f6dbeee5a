"""Actors that hang, have thousands of requests, or whose start is cancelled. They have no engine."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import ray
from ray.util.placement_group import placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from integration.waiting import wait_until
from rl_memory_plugins.errors import EngineLostError, InvalidRequestError, NoAnswerError, StateConflictError
from rl_memory_plugins.ray import EngineActorHandle, EngineDescription, EngineFleet, actor, fleet, handle

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from helpers import interrupts

REQUESTS, AT_A_TIME = 40, 10


class Actor:
    """What an `EngineActor` answers while its engine is busy."""

    async def about(self) -> dict[str, Any]:
        return {"phase": "started", "node": "here", "pid": os.getpid()}

    async def generate(self, prompt: list[int], sampling: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(3600)
        return {}

    async def leave(self) -> None: ...


@pytest.fixture
def handles(cluster: None) -> Any:
    made = ray.remote(concurrency_groups={handle.REQUESTS: AT_A_TIME})(Actor)
    actors = [made.options(max_restarts=-1, num_cpus=0, max_concurrency=AT_A_TIME).remote() for _ in range(2)]
    yield [EngineActorHandle(one, number) for number, one in enumerate(actors)]
    for one in actors:
        ray.kill(one)


def test_calls_of_the_fleet_wait_for_no_request(handles: list[EngineActorHandle]) -> None:
    references = [handles[0].ask([1], {}) for _ in range(REQUESTS)]
    assert handles[0].about(timeout_s=60).phase == "started"
    assert EngineFleet(handles).up() == handles
    assert not ray.wait(references, timeout=0)[0]


def test_an_actor_that_hangs_is_ended_and_the_others_go_on(
    handles: list[EngineActorHandle], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "STATUS_S", 5.0)
    monkeypatch.setattr(handle, "LEAVE_S", 1.0)
    well, hung = handles
    pid = hung.about(timeout_s=60).pid
    well.about(timeout_s=60)
    os.kill(pid, signal.SIGSTOP)
    assert EngineFleet(handles).up() == [well]
    await_another(hung, pid)


def test_an_actor_that_cannot_be_reached_is_ended_before_a_call_of_the_others(
    handles: list[EngineActorHandle], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The actor does not notice that the link to it is broken, and the link may be back the next moment."""
    well, lost = handles
    well.about(timeout_s=60)
    pid, result = lost.about(timeout_s=60).pid, EngineActorHandle.result

    def breaks(engine: EngineActorHandle, reference: Any, timeout_s: float | None) -> Any:
        if engine is lost:
            raise EngineLostError("cannot be reached", engine=1, restarting=True)
        return result(engine, reference, timeout_s)

    with monkeypatch.context() as patch:
        patch.setattr(EngineActorHandle, "result", breaks)
        assert EngineFleet(handles).present() == [well]
    await_another(lost, pid)


def await_another(engine: EngineActorHandle, pid: int) -> None:
    """Wait until Ray has restarted the actor whose process was `pid`."""

    def is_another() -> bool:
        try:
            return engine.about(timeout_s=60).pid != pid
        except EngineLostError:  # Ray is restarting it
            return False

    wait_until(is_another, "Ray to restart the actor", 120)


@pytest.mark.parametrize(("refusals", "ends"), [(2, False), (1000, True)])
def test_an_engine_that_still_ends_an_update_leaves_without_a_new_start(
    monkeypatch: pytest.MonkeyPatch, refusals: int, ends: bool
) -> None:
    """An interrupted update breaks off there, and refuses to be paused meanwhile."""
    left, ended = list(range(refusals)), []

    def sleep(*_: Any, **__: Any) -> None:
        if left:
            left.pop()
            raise StateConflictError("an update runs")

    monkeypatch.setattr(handle, "LEAVE_S", 0.5)
    monkeypatch.setattr(EngineActorHandle, "result", lambda *_: {"phase": "joining", "node": "here", "pid": 1})
    monkeypatch.setattr(EngineActorHandle, "sleep", sleep)
    monkeypatch.setattr(EngineActorHandle, "end", lambda engine: ended.append(engine))
    call = SimpleNamespace(remote=lambda: None)
    EngineActorHandle(SimpleNamespace(leave=call, about=call), 0).leave()
    assert bool(ended) == ends == bool(left)


def test_all_actors_that_hang_share_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []

    class Hung:
        actor = type("Actor", (), {"about": type("About", (), {"remote": staticmethod(lambda: None)})})

        def phase(self, reference: Any, timeout_s: float) -> str:
            waited.append(timeout_s)
            time.sleep(timeout_s)
            return "lost"

    monkeypatch.setattr(fleet, "STATUS_S", 0.3)
    assert EngineFleet([Hung() for _ in range(4)]).up() == []  # type: ignore[misc]
    assert waited[0] > 0 and waited[1:] == [0, 0, 0]


class Restarted(Actor):
    """An actor that takes a while to restart.

    Args:
        marks: A folder. The first `start` ends the process, as one does that finds a dead engine.
    """

    def __init__(self, marks: Path) -> None:
        self._marks = marks
        if (marks / "begun").exists():
            time.sleep(1.5)
        (marks / "begun").touch()

    async def start(self, closed: bool) -> dict[str, Any]:
        if not (self._marks / "started").exists():
            (self._marks / "started").touch()
            os._exit(1)
        return {"answer": None}


@pytest.mark.parametrize("dies", ["before", "in the call"])
def test_a_start_waits_until_ray_has_restarted_the_actor(cluster: None, tmp_path: Path, dies: str) -> None:
    """Ray refuses the calls of an actor that it restarts, also those that it may retry (ray#44719)."""
    made: Any = ray.remote(concurrency_groups={handle.REQUESTS: AT_A_TIME})(Restarted)
    engine = EngineActorHandle(made.options(max_restarts=-1, num_cpus=0).remote(tmp_path), 0)
    pid = engine.about(timeout_s=60).pid
    if dies == "before":
        (tmp_path / "started").touch()
        os.kill(pid, signal.SIGKILL)
    engine.start()
    assert engine.about().pid != pid
    ray.kill(engine.actor)


def test_a_start_of_an_actor_that_is_gone_is_an_error(cluster: None, tmp_path: Path) -> None:
    made: Any = ray.remote(concurrency_groups={handle.REQUESTS: AT_A_TIME})(Restarted)
    engine = EngineActorHandle(made.options(num_cpus=0).remote(tmp_path), 0)
    engine.about(timeout_s=60)
    ray.kill(engine.actor)
    with pytest.raises(EngineLostError) as caught:
        engine.start()
    assert "restarting" not in caught.value.details


class Stuck(Actor):
    """An actor whose first engine never starts."""

    def __init__(self, marks: Path) -> None:
        self._is_first = not (marks / "begun").exists()
        (marks / "begun").touch()

    async def start(self, closed: bool) -> dict[str, Any]:
        await asyncio.sleep(3600 if self._is_first else 0)
        return {"answer": None}


def test_a_start_that_hangs_ends_and_the_next_one_is_another(cluster: None, tmp_path: Path) -> None:
    made: Any = ray.remote(concurrency_groups={handle.REQUESTS: AT_A_TIME})(Stuck)
    engine = EngineActorHandle(made.options(max_restarts=-1, num_cpus=0).remote(tmp_path), 3)
    pid = engine.about(timeout_s=60).pid
    with pytest.raises(NoAnswerError, match="engine 3 has not started within 2 s") as caught:
        engine.start(timeout_s=2.0)
    assert caught.value.details == {"timeout_s": 2.0, "engine": 3}
    engine.start(timeout_s=60.0)
    assert engine.about().pid != pid
    ray.kill(engine.actor)


class Hanging(Actor):
    """An actor whose engine never starts. With `{"marks": FOLDER}` the first one has a wrong argument instead."""

    def __init__(self, engine: str, arguments: dict[str, Any], rl_memory: Any) -> None:
        self._is_wrong = False
        if "marks" in arguments:
            with suppress(FileExistsError):
                Path(arguments["marks"], "begun").mkdir()
                self._is_wrong = True

    async def start(self, closed: bool) -> dict[str, Any]:
        if self._is_wrong:
            return {"error": InvalidRequestError("a wrong argument").to_record()}
        await asyncio.sleep(3600)
        return {}


@pytest.mark.parametrize("end", ["the first error", "the deadline", "an interrupt"])
def test_nothing_is_left_of_a_fleet_that_does_not_start(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """Neither do the engines that hang keep the caller waiting for an hour."""
    monkeypatch.setattr(fleet, "EngineActor", Hanging)
    before = set(placement_group_table())
    arguments = {"marks": str(tmp_path)} if end == "the first error" else {}
    options = {"start_timeout_s": 3.0} if end == "the deadline" else {}
    waiting, awaited, engines = threading.Event(), EngineActorHandle._await_restart, set()

    def noted(engine: EngineActorHandle, until: float) -> None:
        engines.add(engine)
        awaited(engine, until)
        waiting.set()

    monkeypatch.setattr(EngineActorHandle, "_await_restart", noted)
    error = {"the first error": InvalidRequestError, "the deadline": NoAnswerError, "an interrupt": KeyboardInterrupt}
    with interrupts(waiting) if end == "an interrupt" else nullcontext(), pytest.raises(error[end]):
        EngineFleet.start(EngineDescription("vllm", arguments), 2, **options)
    (made,) = set(placement_group_table()) - before
    wait_until(lambda: placement_group_table()[made]["state"] == "REMOVED", "the placement group is removed")
    assert len(engines) == 2
    for engine in engines:
        with pytest.raises(EngineLostError) as caught:
            engine.about(timeout_s=60)
        assert "restarting" not in caught.value.details


def test_a_fleet_that_ray_cannot_place_is_an_error(cluster: None) -> None:
    before = set(placement_group_table())
    description = EngineDescription("vllm", {}, resources={"CPU": 1, "GPU": 999})
    with pytest.raises(NoAnswerError, match="reserved .*999.* within 1 s"):
        EngineFleet.start(description, 1, start_timeout_s=1.0)
    (made,) = set(placement_group_table()) - before
    wait_until(lambda: placement_group_table()[made]["state"] == "REMOVED", "the placement group is removed")


UNMADE = [
    ({"runtime_env": {"working_dir": "."}}, ValueError),
    ({"arguments": {"lock": threading.Lock()}}, TypeError),
    ({}, KeyboardInterrupt),
]


@pytest.mark.parametrize(("change", "error"), UNMADE, ids=["options", "arguments", "an interrupt"])
def test_no_placement_group_is_left_of_a_fleet_whose_actors_cannot_be_made(
    cluster: None, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], error: type[BaseException]
) -> None:
    if error is KeyboardInterrupt:  # once the group is reserved

        def options(description: EngineDescription) -> None:
            raise error

        monkeypatch.setattr(EngineDescription, "options", options)
    before = set(placement_group_table())
    with pytest.raises(error):
        EngineFleet.start(EngineDescription("vllm", **{"arguments": {}, **change}), 1)
    (made,) = set(placement_group_table()) - before
    wait_until(lambda: placement_group_table()[made]["state"] == "REMOVED", "the placement group is removed")


def test_an_actor_that_ray_cannot_place_is_left_out(handles: list[EngineActorHandle]) -> None:
    """Ray's error of it is none of an actor that has died."""
    nowhere = NodeAffinitySchedulingStrategy("ab" * 28, soft=False)
    placed = ray.remote(concurrency_groups={handle.REQUESTS: AT_A_TIME})(Actor).options(
        num_cpus=0, scheduling_strategy=nowhere
    )
    lost = EngineActorHandle(placed.remote(), 2)
    assert EngineFleet([*handles, lost]).up() == handles
    with pytest.raises(EngineLostError, match="cannot run"):
        lost.about()


def test_engines_that_are_replaced_open_together_or_not_at_all(handles: list[EngineActorHandle]) -> None:
    with pytest.raises(InvalidRequestError, match="on_failure|all of them"):
        EngineFleet(handles).replace({}, on_failure="continue")


class Api:
    fails = True
    calls: ClassVar[list[str]] = []

    async def run(self, call: Any) -> None:
        Api.calls.append(call)
        if Api.fails and call == "wake_up":
            raise MemoryError("no room")

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: name


class Slow:
    """An engine that takes a while to start."""

    made = 0
    api = Api()

    def __init__(self, arguments: Any, rl_memory: Any) -> None:
        Slow.made += 1
        time.sleep(0.5)

    def lives(self) -> bool:
        return True


@pytest.mark.parametrize("broken", ["cancelled", "failed"])
def test_a_start_that_breaks_off_is_gone_on_with_and_makes_no_second_engine(
    monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    monkeypatch.setattr(actor, "engine_class", lambda name: Slow)
    monkeypatch.setattr(Slow, "made", 0)
    monkeypatch.setattr(Api, "fails", broken == "failed")

    async def starts() -> list[str]:
        one = actor.EngineActor("vllm", {}, True)
        phases = []
        first = asyncio.create_task(one.start(True))
        if broken == "cancelled":  # as a task of Ray is, whose parent is cancelled
            await asyncio.sleep(0.1)
            first.cancel()
            await asyncio.wait([first])
        else:
            assert "error" in await first
        phases.append(one._phase())
        Api.fails = False
        assert "answer" in await one.start(True)
        phases.append(one._phase())
        return phases

    assert asyncio.run(starts()) == ["starting" if broken == "cancelled" else "joining", "joining"]
    assert Slow.made == 1
    assert Api.calls[-3:] == ["status", "sleep", "wake_up"]  # to the end
