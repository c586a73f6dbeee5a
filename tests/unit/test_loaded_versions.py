"""The version of weights that a call of the engine has loaded without a name, on two ranks in fake memory."""

from __future__ import annotations

import pytest
from helpers import FakeRank, LocalRanks, sleep, wake
from test_controller import Engine

from rl_memory_plugins.capabilities import Capabilities
from rl_memory_plugins.controller import Controller
from rl_memory_plugins.loaded_versions import PREFIX, LoadedVersions
from rl_memory_plugins.tags import Content, Level


class World:
    def __init__(self, **capabilities: bool) -> None:
        self.ranks = [FakeRank(0), FakeRank(1)]  # with the bytes 1 and 17
        group = LocalRanks([rank.agent for rank in self.ranks])
        self.controller = Controller(
            group, Engine(), None, update_timeout_s=5, capabilities=Capabilities(**capabilities)
        )
        self.versions = LoadedVersions(group, self.controller)

    def write(self, *values: int) -> None:
        for rank, value in zip(self.ranks, values, strict=True):
            rank.allocator.write(rank.parameter, bytes([value]) * rank.parameter.nbytes)

    def load(self, *values: int, given: str | None = None) -> str:
        """Load a byte on each rank. Returns the version that the controller then shows."""
        for rank, value in zip(self.ranks, values, strict=True):
            with rank.agent.loading("somewhere"):
                rank.allocator.write(rank.parameter, bytes([value]) * rank.parameter.nbytes)
                rank.manager.note_foreign_load(True)
        self.controller.note_foreign_changes(self.versions.after_load(given))
        return self.controller.status.weight_version

    def update(self, *values: int, version: str | None) -> None:
        self.write(*values)
        self.controller.note_foreign_changes(version)


@pytest.fixture
def world() -> World:
    return World()


def test_equal_weights_keep_their_version_and_others_change_it(world: World) -> None:
    world.update(5, 6, version="step-5")
    assert world.load(5, 6) == "step-5"
    other = world.load(5, 7)  # one rank differs
    assert other.startswith(PREFIX)
    assert world.load(8, 8) not in (other, "step-5", "default")
    assert world.load(5, 7) == other
    assert world.load(5, 6) == "step-5"


def test_a_load_of_the_first_weights_is_initial(world: World) -> None:
    world.update(5, 6, version="step-5")
    assert world.load(1, 17) == "default"


def test_engines_name_equal_weights_equally() -> None:
    assert World().load(8, 9) == World().load(8, 9)


def test_weights_that_a_trainer_has_loaded_unnamed_do_not_lend_their_version(world: World) -> None:
    world.update(5, 6, version=None)
    assert world.load(1, 17) != "default"


def test_the_bytes_count_after_a_level_2_sleep(world: World) -> None:
    for rank in world.ranks:
        sleep(rank, Level.DISCARD)
        wake(rank)
    assert world.load(1, 17) == "default"
    world.update(5, 6, version="step-5")
    for rank in world.ranks:
        sleep(rank, Level.DISCARD)
        wake(rank)
    assert world.load(5, 6).startswith(PREFIX)  # nobody has read the weights of step-5


def test_a_given_version_counts(world: World) -> None:
    assert world.load(5, 6, given="mine") == "mine"
    assert world.load(1, 17) == "default"
    assert world.load(5, 6) == "mine"


def test_a_load_that_leaves_undefined_weights_names_nothing(world: World) -> None:
    for rank in world.ranks:
        with rank.agent.loading("somewhere"):
            rank.manager.mark_failed()
    assert world.versions.after_load() is None
    assert world.ranks[0].manager.content is Content.FAILED


def test_nothing_was_loaded(world: World) -> None:
    assert world.versions.after_load() is None
    with pytest.raises(FileNotFoundError), world.ranks[0].agent.loading("nowhere"):
        raise FileNotFoundError
    world.ranks[0].agent.forget_load()
    assert world.versions.after_load() is None


def test_a_load_of_one_pipeline_stage_changes_the_version(world: World) -> None:
    world.update(5, 6, version="step-5")

    def load(value: int) -> str | None:
        rank = world.ranks[1]
        with rank.agent.loading("somewhere"):
            rank.allocator.write(rank.parameter, bytes([value]) * rank.parameter.nbytes)
            rank.manager.note_foreign_load(True)
        world.controller.note_foreign_changes(world.versions.after_load())
        return world.controller.status.weight_version

    assert load(6) == "step-5"
    other = load(7)
    assert other.startswith(PREFIX)
    assert world.load(5, 6) == "step-5"
    assert load(7) == other


def test_engines_that_hold_different_experts_count_loads() -> None:
    world = World(steps_with_peers=True)
    assert world.load(1, 17) == f"{PREFIX}1"
    assert world.load(1, 17) == f"{PREFIX}2"


def test_without_memory_for_the_hash_loads_are_counted(world: World) -> None:
    for rank in world.ranks:
        rank.receiver.identity = lambda: ""
    assert world.load(1, 17) == f"{PREFIX}1"
    assert world.load(1, 17) == f"{PREFIX}2"


def test_only_so_many_versions_are_kept(world: World) -> None:
    for value in range(100, 200):
        world.load(value, value, given=f"version {value}")
    assert len(world.versions._versions) == 64
    assert world.load(199, 199) == "version 199"
    assert world.load(100, 100).startswith(PREFIX)


def test_the_log_names_the_source_and_both_versions(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.update(5, 6, version="step-5")
    version = world.load(1, 2)
    assert caplog.messages == [f"somewhere has replaced the weights 'step-5': their version is now '{version}'"]
    world.load(1, 2)
    assert len(caplog.messages) == 1
