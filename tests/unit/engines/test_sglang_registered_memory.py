"""Registered memory over sleeps and wakes, with a TransferEngine that may refuse."""

from __future__ import annotations

import pytest
from helpers import FakeRank

from rl_memory_plugins.engines.sglang.registered_memory import RegisteredMemory
from rl_memory_plugins.errors import EngineFaultError, StateConflictError
from rl_memory_plugins.rank import RankAgent
from rl_memory_plugins.tags import Tag


class Engine:
    """A TransferEngine. It refuses what is in `refused`."""

    def __init__(self) -> None:
        self.held: dict[int, int] = {}
        self.refused: set[int] = set()

    def register_memory(self, address: int, nbytes: int) -> int:
        if address in self.refused or address in self.held:
            return -1
        self.held[address] = nbytes
        return 0

    def unregister_memory(self, address: int) -> int:
        if address in self.refused:
            return -1
        del self.held[address]
        return 0


ALL = {100: 8, 200: 16, 300: 24}


class World:
    def __init__(self) -> None:
        self.rank = FakeRank()
        self.engine = Engine()
        self.registered = RegisteredMemory()
        for address, nbytes in ALL.items():
            self.engine.register_memory(address, nbytes)
            self.registered.note(self.engine, address, nbytes)
        self.agent = RankAgent(
            self.rank.manager,
            self.rank.receiver,
            self.rank.names,  # type: ignore[arg-type]
            before_sleep=lambda tags: self.registered.suspend() if Tag.WEIGHTS in tags else None,
            after_wake=lambda tags: self.registered.resume() if Tag.WEIGHTS in tags else None,
        )

    def sleep(self, level: int, *tags: str) -> None:
        self.agent.prepare_sleep(level, list(tags))
        self.agent.commit_sleep()

    def wake(self, *tags: str) -> None:
        self.agent.prepare_wake(list(tags))
        self.agent.commit_wake()


@pytest.fixture
def world() -> World:
    return World()


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleep_of_the_weights_ends_the_registrations_until_the_wake(world: World, level: int) -> None:
    for _ in range(2):
        world.sleep(level, "kv_cache", "weights")
        assert world.engine.held == {}
        world.sleep(level, "weights")
        world.wake("kv_cache")
        assert world.engine.held == {}
        world.wake("weights")
        assert world.engine.held == ALL
        world.wake("weights")
        assert world.engine.held == ALL


def test_other_sleeps_leave_them(world: World) -> None:
    world.sleep(1, "kv_cache")
    assert world.engine.held == ALL
    world.sleep(0, "kv_cache", "weights", "cuda_graph")
    assert world.engine.held == ALL


def test_memory_that_stays_registered_is_not_released(world: World) -> None:
    world.engine.refused = {100}
    with pytest.raises(EngineFaultError, match="registered"):
        world.sleep(1, "weights")
    assert world.rank.manager.state(Tag.WEIGHTS) == "resident"
    assert world.engine.held == ALL
    world.engine.refused = set()
    world.sleep(1, "weights")
    assert world.engine.held == {}


def test_a_sleep_that_fails_registers_again_at_the_next_wake(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(tag: Tag) -> int:
        raise EngineFaultError("the driver failed")

    with monkeypatch.context() as patch:
        patch.setattr(world.rank.allocator, "release", fail)
        with pytest.raises(EngineFaultError):
            world.sleep(1, "weights")
    assert world.rank.manager.state(Tag.WEIGHTS) == "resident"
    world.wake("weights")
    assert world.engine.held == ALL


def test_a_registration_that_fails_is_tried_again_by_the_next_wake(world: World) -> None:
    world.sleep(1, "weights")
    world.engine.refused = {200}
    with pytest.raises(EngineFaultError, match="again"):
        world.wake("weights")
    world.engine.refused = set()
    world.wake("weights")
    assert world.engine.held == ALL


def test_without_a_prepared_sleep_nothing_ends(world: World) -> None:
    with pytest.raises(StateConflictError):
        world.agent.commit_sleep()
    assert world.engine.held == ALL
