"""The controller and adapters: versions, all ranks or none, and when former versions are forgotten."""

from __future__ import annotations

from typing import Any

import pytest
from helpers import FakeRank, LocalRanks
from test_controller import Engine

from rl_memory_plugins import admission, commands, operations
from rl_memory_plugins.adapters import MOST_ADAPTERS, number_of
from rl_memory_plugins.capabilities import Capabilities
from rl_memory_plugins.commands import decode_reply, encode_command
from rl_memory_plugins.controller import Controller
from rl_memory_plugins.errors import (
    EngineFaultError,
    InvalidRequestError,
    StateConflictError,
    UnsupportedError,
    WeightUpdateError,
    from_record,
)
from rl_memory_plugins.rank import RankAgent
from rl_memory_plugins.records import EngineStatus
from rl_memory_plugins.transition import STEPS


class Slots:
    """The adapters of one rank, as its calls. `failure` is raised by the next one."""

    def __init__(self) -> None:
        self.numbers: set[int] = set()
        self.failure: Exception | None = None
        self.busy_while_receiving: str | None = None
        self.during: Any = lambda: None

    def prepare_adapter(self, name: str, number: int, **given: Any) -> dict[str, Any]:
        self.during()
        self.given = given
        if self.failure is not None:
            raise self.failure
        self.numbers.add(number)
        return {"rank": 0, "bytes": 64, "seconds": {"connect": 0.1, "add": 0.2}}

    def abort_adapter(self, number: int) -> None:
        self.numbers.discard(number)

    def forget_adapters(self, numbers: list[int]) -> None:
        if self.failure is not None:
            raise self.failure
        self.numbers -= set(numbers)


class World:
    def __init__(self, capabilities: Capabilities | None = None) -> None:
        self.ranks = [FakeRank(0), FakeRank(1)]
        self.slots = [Slots(), Slots()]
        names = ("prepare_adapter", "abort_adapter", "forget_adapters")
        agents = [
            RankAgent(rank.manager, rank.receiver, rank.names, calls={name: getattr(slots, name) for name in names})
            for rank, slots in zip(self.ranks, self.slots, strict=True)
        ]
        self.engine = Engine()
        self.controller = Controller(
            LocalRanks(agents), self.engine, None, update_timeout_s=7.5, capabilities=capabilities or Capabilities()
        )

    def run(self, command: commands.AnyCommand) -> Any:
        reply = decode_reply(self.controller.execute(encode_command(command)).result(timeout=1))
        if reply.error is not None:
            raise from_record(reply.error)
        return reply.result

    def update(self, name: str = "policy", token: str = "t", **options: Any) -> Any:
        return self.run(operations.update_adapter(name, {"r": 4}, {"*": "/s"}, token, **options))

    def remove(self, name: str = "policy") -> Any:
        return self.run(operations.remove_adapter(name))

    @property
    def held(self) -> list[set[int]]:
        return [slots.numbers for slots in self.slots]

    @property
    def listed(self) -> dict[str, str]:
        return {adapter.name: adapter.version for adapter in self.controller.status.adapters}


def numbers(*tokens: str) -> set[int]:
    return {number_of(token) for token in tokens}


@pytest.fixture
def world() -> World:
    return World()


def test_an_update_adds_a_version_and_touches_neither_requests_nor_weights(world: World) -> None:
    before = world.controller.status
    report = world.update()
    assert report["details"]["adapter_version"] == "1" and report["seconds"]["add"] == 0.2
    assert set(report["seconds"]) == set(STEPS["update_adapter"])
    assert world.listed == {"policy": "1"} and world.held == [numbers("t")] * 2
    assert world.engine.calls in ([], ["resume"])
    after = world.controller.status
    assert (after.weight_version, after.ranks) == (before.weight_version, before.ranks)


def test_requests_are_admitted_during_an_update(world: World) -> None:
    seen = []

    def look() -> None:
        seen.append((world.controller.status.busy, world.controller.refusal()))

    world.slots[0].during = look
    world.update()
    assert seen == [("update_adapter", None)]
    assert admission.refusal(EngineStatus([], busy="sleep")) is not None


def test_versions_count_by_name_or_are_named(world: World) -> None:
    for token in "abc":
        world.update("one", token)
    world.update("two", "d")
    world.update("three", "e", adapter_version="step 5")
    assert world.listed == {"one": "3", "two": "1", "three": "step 5"}


def test_an_adapter_for_other_weights_is_refused(world: World) -> None:
    with pytest.raises(StateConflictError, match="version '7'"):
        world.update("one", "a", base_version="7")
    world.update("one", "b", base_version="default")
    assert world.listed == {"one": "1"}


def test_a_former_version_goes_at_a_later_change_once_no_request_uses_it(world: World) -> None:
    world.update(token="a")
    world.update(token="b")
    assert world.held == [numbers("a", "b")] * 2  # a request of "a" may be on its way
    assert all(world.controller.adapters.knows(number) for number in numbers("a", "b"))
    world.engine.used_adapters = numbers("a")
    world.update(token="c")
    assert world.held == [numbers("a", "b", "c")] * 2
    world.engine.used_adapters = numbers("b")
    world.update("other", token="d")
    assert world.held == [numbers("b", "c", "d")] * 2
    world.engine.used_adapters = set()
    world.remove("other")
    assert world.held == [numbers("c")] * 2
    assert not world.controller.adapters.knows(number_of("b"))


def test_a_removed_adapter_stays_for_the_requests_that_use_it(world: World) -> None:
    world.update(token="a")
    world.engine.used_adapters = numbers("a")
    assert world.remove()["details"]["adapter_version"] == "1"
    assert world.listed == {} and world.held == [numbers("a")] * 2
    world.engine.used_adapters = set()
    world.update(token="b")
    assert world.held == [numbers("b")] * 2


def test_one_rank_that_fails_leaves_the_former_version_on_all(world: World) -> None:
    world.update(token="a")
    world.slots[1].failure = WeightUpdateError("the trainer stalled")
    with pytest.raises(WeightUpdateError) as caught:
        world.update(token="b")
    assert caught.value.details["rank"] == 1
    assert world.listed == {"policy": "1"} and world.held == [numbers("a")] * 2
    assert world.controller.refusal() is None
    world.slots[1].failure = None
    world.update(token="c")
    assert world.listed == {"policy": "2"}


def test_a_token_makes_one_version(world: World) -> None:
    world.update(token="a")
    with pytest.raises(InvalidRequestError, match="token"):
        world.update(token="a")
    world.update(token="b")
    with pytest.raises(InvalidRequestError, match="token"):
        world.update("other", token="a")
    assert world.listed == {"policy": "2"} and world.held == [numbers("a", "b")] * 2


def test_memory_that_could_not_be_freed_is_freed_later(world: World) -> None:
    world.update(token="a")
    world.slots[0].failure = RuntimeError("busy")
    world.remove()
    assert world.listed == {} and number_of("a") in world.slots[0].numbers
    world.slots[0].failure = None
    world.update(token="b")
    assert world.held == [numbers("b")] * 2


def test_data_parallel_engines_agree(world: World) -> None:
    world.update(token="a")
    for commit, listed, held in ((False, {"policy": "1"}, numbers("a")), (True, {"policy": "2"}, numbers("a", "b"))):
        command = operations.update_adapter("policy", {"r": 4}, {"*": "/s"}, "b")
        held_command = commands.UpdateAdapter("policy", {"r": 4}, {"*": "/s"}, "b", hold="ticket")
        assert command.hold == "" and world.run(held_command) == {"held": True}
        with pytest.raises(StateConflictError):
            world.update("other", "c")
        world.run(commands.Decide("ticket", commit=commit))
        assert (world.listed, world.held) == (listed, [held] * 2)
    assert world.run(commands.RemoveAdapter("policy", hold="ticket")) == {"held": True}
    world.run(commands.Decide("ticket", commit=False))
    assert world.listed == {"policy": "2"}


def test_while_the_weights_sleep_adapters_may_go_and_not_come(world: World) -> None:
    world.update(token="a")
    world.run(commands.Sleep())
    with pytest.raises(StateConflictError, match="asleep"):
        world.update(token="b")
    world.remove()
    assert world.listed == {}


def test_what_is_not_there_cannot_be_removed(world: World) -> None:
    world.update("here")
    with pytest.raises(InvalidRequestError) as caught:
        world.remove("absent")
    assert caught.value.details["allowed"] == ["here"]


def test_an_engine_has_a_limit_of_adapters(world: World) -> None:
    for index in range(MOST_ADAPTERS):
        world.update(f"adapter {index}", f"{index}")
    with pytest.raises(InvalidRequestError, match="remove one"):
        world.update("one more", "x")
    world.update("adapter 0", "y")
    assert len(world.listed) == MOST_ADAPTERS


def test_the_option_decides_how_long_a_trainer_may_be_silent_unless_the_update_does(world: World) -> None:
    world.update(token="a")
    assert world.slots[0].given["timeout_s"] == 7.5
    world.update(token="b", timeout_s=2)
    assert world.slots[0].given["timeout_s"] == 2


def test_an_engine_that_takes_no_adapters_says_why() -> None:
    world = World(Capabilities(no_adapters="it was started without --enable-lora"))
    with pytest.raises(UnsupportedError, match="--enable-lora"):
        world.update()


def test_a_rank_without_adapters_is_a_fault() -> None:
    world = World()
    del world.controller._ranks.agents[0]._methods["prepare_adapter"]  # type: ignore[attr-defined]
    with pytest.raises(EngineFaultError):
        world.update()
    assert world.listed == {}
