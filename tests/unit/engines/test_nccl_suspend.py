"""When ranks suspend and resume their communicators: behind the phases of all ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import FakeRank, LocalRanks, ScriptedReceiver
from test_controller import Engine

from rl_memory_plugins import commands, operations
from rl_memory_plugins.commands import decode_reply, encode_command
from rl_memory_plugins.controller import Controller
from rl_memory_plugins.engines import nccl_suspend
from rl_memory_plugins.engines.nccl_suspend import SuspendingRanks
from rl_memory_plugins.errors import DeviceMemoryError, EngineFaultError, UnsupportedError, from_record
from rl_memory_plugins.memory import nccl
from rl_memory_plugins.rank import RankAgent


class Communicator:
    """The communicator of a rank. Notes each call, with the rank's mapped bytes."""

    def __init__(self, world: World, rank: FakeRank) -> None:
        self.world, self.rank = world, rank

    def suspendable_bytes(self) -> int:
        return 0

    def suspend(self) -> None:
        self._call("suspend")

    def resume(self) -> None:
        self._call("resume")

    def _call(self, name: str) -> None:
        number = self.rank.manager.rank
        self.world.log.append((name, number, self.rank.mapped_bytes()))
        if (name, number) in self.world.failures:
            raise RuntimeError("NCCL error: unhandled system error")


class World:
    """A controller over two ranks, each with a communicator.

    Attributes:
        log: The collective calls.
        failures: The calls that fail, by name and rank.
    """

    def __init__(self) -> None:
        self.log: list[tuple[str, int, int]] = []
        self.failures: set[tuple[str, int]] = set()
        self.ranks = [FakeRank(number) for number in range(2)]
        agents = []
        for rank in self.ranks:
            communicator = Communicator(self, rank)
            calls = nccl_suspend.calls_of(lambda one=communicator: [one])  # type: ignore[misc]
            calls["check_communicators"] = lambda number=rank.manager.rank: self.check(number)  # type: ignore[misc]
            agents.append(RankAgent(rank.manager, ScriptedReceiver(rank.manager), rank.names, calls=calls))  # type: ignore[arg-type]
        self.awake = self.ranks[0].device.used
        self.controller = Controller(SuspendingRanks(LocalRanks(agents)), Engine(), None, update_timeout_s=1)

    def check(self, rank: int) -> None:
        if ("check", rank) in self.failures:
            raise DeviceMemoryError("full")

    def run(self, command: commands.AnyCommand) -> Any:
        before = len(self.log)
        reply = decode_reply(self.controller.execute(encode_command(command)).result(timeout=1))
        calls = [(name, rank) for name, rank, _ in self.log[before:]]
        for name in ("suspend", "resume"):  # a rank that is alone in a collective call waits without end
            assert calls.count((name, 0)) == calls.count((name, 1)), calls
        if reply.error is not None:
            raise from_record(reply.error)
        return reply.result


def test_suspended_after_the_release_and_resumed_before_the_memory_is_mapped() -> None:
    world = World()
    for _ in range(2):
        world.run(operations.sleep(1))
        assert world.log == [("suspend", 0, 0), ("suspend", 1, 0)]
        world.log.clear()
        world.run(operations.wake_up(["weights"]))
        assert world.log == [("resume", 0, 0), ("resume", 1, 0)]
        world.run(operations.wake_up())
        world.log.clear()
    assert world.controller.refusal() is None


@pytest.mark.parametrize("command", [operations.sleep(0), operations.sleep(1, ["weights"])])
def test_a_sleep_that_releases_nothing_suspends_nothing(command: commands.Sleep) -> None:
    world = World()
    world.run(operations.sleep(2, ["weights"]))
    world.log.clear()
    world.run(command)
    assert world.log == []


def test_no_rank_suspends_if_one_has_not_released() -> None:
    world = World()
    world.ranks[1].device.fail("release")
    with pytest.raises(EngineFaultError):
        world.run(operations.sleep(1))
    assert world.log == []
    world.run(operations.wake_up())
    assert world.controller.refusal() is None


def test_no_rank_resumes_if_one_has_no_memory() -> None:
    world = World()
    world.run(operations.sleep(1))
    world.log.clear()
    world.ranks[1].device.fail("reserve", error=DeviceMemoryError("full"))
    with pytest.raises(DeviceMemoryError):
        world.run(operations.wake_up())
    assert world.log == []


def test_no_rank_resumes_if_one_has_no_memory_for_its_communicators() -> None:
    world = World()
    world.run(operations.sleep(1))
    world.log.clear()
    world.failures.add(("check", 1))
    with pytest.raises(DeviceMemoryError):
        world.run(operations.wake_up())
    assert world.log == [] and [rank.device.used for rank in world.ranks] == [0, 0]
    world.failures.clear()
    world.run(operations.wake_up())
    assert world.controller.refusal() is None


@pytest.mark.parametrize("phase", ["suspend", "resume"])
def test_a_failure_of_all_ranks_closes_the_engine_and_the_next_wake_works(phase: str) -> None:
    world = World()
    before = [rank.contents()["parameter"] for rank in world.ranks]
    world.failures |= {(phase, 0), (phase, 1)}
    with pytest.raises(EngineFaultError, match="NCCL error"):
        world.run(operations.sleep(1))
        world.run(operations.wake_up())
    assert [rank.device.used for rank in world.ranks] == [0, 0]
    refusal = world.controller.refusal()
    assert refusal is not None and refusal.details["reason"] == "asleep"
    world.failures.clear()
    world.run(operations.wake_up())
    assert world.controller.refusal() is None
    assert [rank.contents()["parameter"] for rank in world.ranks] == before


@pytest.mark.parametrize("phase", ["suspend", "resume"])
def test_after_a_failure_of_one_rank_no_rank_makes_a_collective_call_alone(phase: str) -> None:
    world = World()
    world.failures.add((phase, 1))
    with pytest.raises(EngineFaultError, match=r"NCCL error.*start the engine again"):
        world.run(operations.sleep(1))
        world.run(operations.wake_up())
    world.failures.clear()
    world.log.clear()
    for _ in range(2):
        with pytest.raises(EngineFaultError, match="start the engine again"):
            world.run(operations.wake_up())
    assert world.log == [] and [rank.device.used for rank in world.ranks] == [0, 0]


def library(version: str, **functions: Any) -> Any:
    return SimpleNamespace(lib=SimpleNamespace(**functions), ncclGetVersion=lambda: version)


def parallel_state(*coordinators: Any) -> Any:
    """As the module of both engines, which knows its groups by weak references. One group is gone."""
    return SimpleNamespace(
        _groups={"gone": lambda: None, **{str(n): lambda one=one: one for n, one in enumerate(coordinators)}}
    )


def coordinator(own: Any = None, *, vllm: bool = False, backend: str = "cuda:nccl") -> Any:
    group = SimpleNamespace(config=backend)
    if vllm:
        return SimpleNamespace(device_communicator=SimpleNamespace(pynccl_comm=own), device_group=group)
    return SimpleNamespace(pynccl_comm=own, device_group=group)


@pytest.fixture
def torch_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "why_not", lambda: "NCCL 2.28.9 is older than 2.29.7")
    monkeypatch.setattr(nccl, "has_nccl", lambda group: "nccl" in group.config)


@pytest.mark.parametrize("vllm", [True, False])
def test_an_engine_with_an_older_nccl_is_refused(vllm: bool, torch_cannot: None) -> None:
    new = SimpleNamespace(available=True, nccl=library("2.30.7", ncclCommSuspend=None))
    old = SimpleNamespace(available=True, nccl=library("2.28.9"))
    alone = SimpleNamespace(available=False)  # the only rank of its group
    nccl_suspend.require_suspend(parallel_state(coordinator(alone, vllm=vllm), coordinator(new, vllm=vllm)))
    with pytest.raises(UnsupportedError, match="loaded NCCL 2.28.9"):
        nccl_suspend.require_suspend(parallel_state(coordinator(new, vllm=vllm), coordinator(old, vllm=vllm)))
    with pytest.raises(UnsupportedError, match="NCCL 2.28.9 is older"):
        nccl_suspend.require_suspend(parallel_state(coordinator(vllm=vllm)))


def test_an_engine_without_nccl_has_nothing_to_suspend(torch_cannot: None) -> None:
    nccl_suspend.require_suspend(parallel_state(coordinator(backend="cpu:gloo,cuda:gloo")))


def test_the_errors_say_what_state_the_memory_is_in() -> None:
    world = World()
    communicator = Communicator(world, world.ranks[0])
    calls = nccl_suspend.calls_of(lambda: [communicator])
    world.failures.add(("suspend", 0))
    with pytest.raises(EngineFaultError, match=r"is released, but .* NCCL error") as caught:
        calls["suspend_communicators"]()
    assert caught.value.details["suspended"] == 0
    world.failures = {("resume", 0)}
    assert calls["suspend_communicators"]() == 1
    with pytest.raises(EngineFaultError, match=r"nothing was mapped: NCCL error") as caught:
        calls["resume_communicators"]()
    assert caught.value.details["suspended"] == 1
    world.failures.clear()
    assert calls["resume_communicators"]() == 0


def test_the_current_gpu_must_have_memory_for_the_communicators(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(nccl.Suspension, "require_memory", lambda self, device: asked.append(device))
    check = nccl_suspend.calls_of(list)["check_communicators"]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    check()
    assert asked == []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    check()
    assert asked == [torch.device("cuda", 1)]
