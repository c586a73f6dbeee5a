"""A fleet of two engines: every call that one engine has, and engines that die meanwhile."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch
from rich.console import Console

from integration.waiting import wait_until
from rl_memory_plugins.errors import (
    EngineAsleepError,
    EngineLostError,
    InvalidRequestError,
    ManifestError,
    StateConflictError,
)
from rl_memory_plugins.ray import EngineActorHandle, EngineDescription, EngineFleet, status, table
from rl_memory_plugins.trainer import PausableMemory, StreamSource, TensorSpec
from tests.ray.conftest import OPTIONS, SEED, in_engine, kill, model_of, tokens
from tests.vllm.calls import PROMPT
from tests.vllm.conftest import greedy


@pytest.fixture(scope="module")
def running(cluster: None, description: EngineDescription) -> Iterator[EngineFleet]:
    with EngineFleet.start(description, 2) as fleet:
        yield fleet


@pytest.fixture
def fleet(running: EngineFleet, folder: Path) -> Iterator[EngineFleet]:
    """All engines serve before and after each test."""
    yield running
    running.replace(model_of(folder, SEED))
    running.wake_up()
    running.update(model_of(folder, SEED))
    assert [one.state for one in status(running)] == ["serves", "serves"]


def test_options_travel_as_arguments(fleet: EngineFleet) -> None:
    for engine in fleet.engines:
        assert in_engine(engine, lambda actor: actor._engine.api._drain_timeout_s) == OPTIONS["drain_timeout_s"]
        assert not in_engine(engine, lambda actor: [name for name in os.environ if name.startswith("RL_MEMORY")])


def test_sleep_and_wake_of_all(fleet: EngineFleet, folder: Path) -> None:
    before = status(fleet)
    answers = fleet.sleep(1)
    assert [answers[number]["status"] for number in (0, 1)] == ["sleeping", "sleeping"]
    asleep = status(fleet)
    assert [(one.state, one.reason) for one in asleep] == [("closed", "asleep")] * 2
    assert all(
        one.resident_bytes == 0 and one.asleep_bytes == was.resident_bytes > 0
        for one, was in zip(asleep, before, strict=True)
    )
    with pytest.raises(EngineAsleepError) as caught:
        tokens(fleet, PROMPT)
    assert caught.value.details["reason"] == "asleep"
    fleet.wake_up(["weights"])
    assert [one.state for one in status(fleet)] == ["closed", "closed"]
    fleet.wake_up()
    assert tokens(fleet, PROMPT) == [greedy(model_of(folder, SEED))] * 4


def test_errors_are_those_of_one_engine(fleet: EngineFleet) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        fleet.sleep(7)
    assert caught.value.details["allowed"] == [0, 1, 2]
    with pytest.raises(ManifestError):
        fleet.update({"no.such.weight": torch.zeros(1)})
    assert [one.state for one in status(fleet)] == ["serves", "serves"]


def test_an_update_of_all(fleet: EngineFleet, folder: Path) -> None:
    model = model_of(folder, 2)
    report = fleet.update(model, "two")
    assert [answer["weight_version"] for answer in report["engines"]] == ["two", "two"]
    assert tokens(fleet, PROMPT) == [greedy(model)] * 4
    sampling = {"temperature": 0, "max_tokens": 3, "ignore_eos": True, "logprobs": True}
    for answer in fleet.generate([PROMPT] * 2, sampling):
        assert answer.weight_version == ("two", "two")
        assert answer.finish_reason == "length"
        assert len(answer.logprobs) == 3 and max(answer.logprobs) < 0


def reached(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The answers of the engines that an update has reached."""
    return [answer for answer in report["engines"] if answer is not None]


def memory_of(model: torch.nn.Module) -> tuple[torch.optim.Optimizer, PausableMemory]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return optimizer, PausableMemory(model, optimizer)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.tensor([PROMPT])).logits.square().mean().backward()
    optimizer.step()


def test_a_handoff_goes_on_without_an_engine_that_dies_asleep(fleet: EngineFleet, folder: Path) -> None:
    model = model_of(folder, 3)
    optimizer, memory = memory_of(model)
    handoff = fleet.handoff(model, weights=[memory.part("parameters")], others=[memory.part("gradients", "optimizer")])
    with handoff.training("first"):
        assert [one.state for one in status(fleet)] == ["closed", "closed"]
        step(model, optimizer)
    assert [(one.state, one.weight_version) for one in status(fleet)] == [("serves", "first")] * 2
    with handoff.training("second") as report:
        step(model, optimizer)
        os.kill(fleet.engines[0].about().pid, 9)
    wait_until(lambda: status(fleet)[0].state == "empty", "Ray restarts the actor")
    assert (status(fleet)[1].state, status(fleet)[1].weight_version) == ("serves", "second")
    assert len(reached(report.update)) == 1
    expected = greedy_of_sleeping(memory, model)
    assert tokens(fleet, PROMPT) == [expected] * 4
    assert fleet.replace(model) == [0]
    assert [(one.state, one.weight_version) for one in status(fleet)] == [("serves", "second")] * 2
    assert tokens(fleet, PROMPT) == [expected] * 4
    with handoff.training("third") as report:
        step(model, optimizer)
    assert len(reached(report.update)) == 2
    memory.close()


def greedy_of_sleeping(memory: PausableMemory, model: torch.nn.Module) -> list[int]:
    memory.wake(["parameters"])
    try:
        return greedy(model)
    finally:
        memory.sleep(["parameters"])


class Rank:
    """A trainer of two processes, each with one engine of the fleet."""

    def __init__(self, rank: int, engine: EngineActorHandle, folder: Path, store: Path) -> None:
        torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
        self.fleet = EngineFleet([engine])
        self.model = model_of(folder, 7)
        optimizer, memory = memory_of(self.model)
        others = [memory.part("gradients", "optimizer")]
        self.handoff = self.fleet.handoff(self.model, weights=[memory.part("parameters")], others=others)

    def train(self, version: str, kills: bool) -> int:
        """The number of this process's engines that got the weights."""
        with self.handoff.training(version) as report:
            if kills:
                os.kill(self.fleet.engines[0].about().pid, 9)
        return len(reached(report.update))

    def replace(self) -> list[int]:
        return self.fleet.replace(self.model)


def test_a_trainer_of_two_processes_goes_on_together(fleet: EngineFleet, folder: Path, tmp_path: Path) -> None:
    make = ray.remote(num_cpus=0)(Rank)
    ranks = [make.remote(rank, fleet.engines[rank], folder, tmp_path / "store") for rank in (0, 1)]
    try:
        assert ray.get([rank.train.remote("1", False) for rank in ranks]) == [1, 1]
        assert ray.get([rank.train.remote("2", kills) for rank, kills in zip(ranks, (True, False), strict=True)]) == [
            0,
            1,
        ]
        assert tokens(fleet, PROMPT) == [greedy(model_of(folder, 7))] * 4
        assert ray.get([rank.replace.remote() for rank in ranks]) == [[0], []]
        assert [(one.state, one.weight_version) for one in status(fleet)] == [("serves", "2")] * 2
        assert ray.get([rank.train.remote("3", False) for rank in ranks]) == [1, 1]
        assert tokens(fleet, PROMPT) == [greedy(model_of(folder, 7))] * 4
    finally:
        for rank in ranks:
            ray.kill(rank)


def test_the_rest_serves_while_an_engine_is_replaced(fleet: EngineFleet, folder: Path) -> None:
    model = model_of(folder, 4)
    fleet.update(model, "four")
    kill(fleet.engines[1])
    assert rows_of(fleet) == [["0", "serves", "valid", "four"], ["1", "empty", "", ""]]
    replacing = threading.Thread(target=fleet.replace, args=(model,))
    replacing.start()
    states, answers = set(), 0
    while replacing.is_alive():
        states.add(status(fleet)[1].state)
        assert tokens(fleet, PROMPT, 1) == [greedy(model)]
        answers += 1
    replacing.join()
    assert answers > 2 and "starting" in states
    assert rows_of(fleet) == [["0", "serves", "valid", "four"], ["1", "serves", "valid", "four"]]
    assert in_engine(fleet.engines[1], lambda actor: actor._engine.api._drain_timeout_s) == OPTIONS["drain_timeout_s"]
    assert tokens(fleet, PROMPT) == [greedy(model)] * 4


def rows_of(fleet: EngineFleet) -> list[list[str]]:
    """The printed table: the engine, its state, and the content and version of its weights."""
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(table(status(fleet)))
    lines = [line for line in console.export_text().splitlines() if "│" in line]
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines]
    assert all(row[6].endswith("MiB") == (row[3] == "serves") for row in cells)
    return [[row[0], *row[3:6]] for row in cells]


def test_prompts_of_an_engine_that_dies_go_to_the_rest(fleet: EngineFleet, folder: Path) -> None:
    """The engine that replaces it has the checkpoint's weights when it starts, which nobody may meet."""
    model = model_of(folder, 6)
    fleet.update(model, "six")
    killing = threading.Timer(0.5, os.kill, (fleet.engines[1].about().pid, 9))
    killing.start()
    answers = fleet.generate([PROMPT] * 8, {"temperature": 0, "max_tokens": 300, "ignore_eos": True})
    killing.join()
    assert all(len(answer.token_ids) == 300 for answer in answers)
    assert len({tuple(answer.token_ids) for answer in answers}) == 1
    wait_until(lambda: status(fleet)[1].state == "empty", "Ray restarts the actor")
    with pytest.raises(ManifestError):
        fleet.replace({"no.such.weight": torch.zeros(1)})
    joining = status(fleet)[1]
    assert (joining.state, joining.reason, joining.content) == ("joining", "stale", "stale")
    with pytest.raises(EngineAsleepError):
        fleet.engines[1].generate(PROMPT, {"max_tokens": 1})
    assert tokens(fleet, PROMPT) == [greedy(model)] * 4
    assert fleet.replace(model) == [1]
    assert [one.weight_version for one in status(fleet)] == ["six", "six"]
    assert tokens(fleet, PROMPT) == [greedy(model)] * 4


def test_an_engine_that_dies_in_an_update_keeps_no_other_from_it(fleet: EngineFleet, folder: Path) -> None:
    model = model_of(folder, 5)
    weights = dict(model.named_parameters())
    victims = [fleet.engines[0].about().pid]

    def make() -> Iterator[tuple[str, torch.Tensor]]:
        for number, (name, tensor) in enumerate(weights.items()):
            if number == 10 and victims:
                os.kill(victims.pop(), 9)
            yield name, tensor

    specs = [TensorSpec(name, "float32", tuple(tensor.shape)) for name, tensor in weights.items()]
    report = fleet.update(StreamSource(specs, make), "five", bucket_bytes=1 << 20)
    assert [answer["weight_version"] for answer in reached(report)] == ["five"]
    assert [(failure.engine, type(failure.error)) for failure in report["failed"]] == [(0, EngineLostError)]
    assert tokens(fleet, PROMPT) == [greedy(model)] * 4
    assert [one.number for one in status(fleet) if one.state == "serves"] == [1]


def test_an_engine_that_fails_an_update_and_lives_leaves_the_fleet_until_it_is_replaced(
    fleet: EngineFleet, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing, pid = fleet.engines[1], fleet.engines[1].about().pid

    def refuse(body: dict[str, Any], **options: Any) -> None:
        raise StateConflictError("not now")

    model = model_of(folder, 8)
    with monkeypatch.context() as patch:
        patch.setattr(failing, "post_update", refuse)
        report = fleet.update(model, "eight")
    assert [(failure.engine, str(failure.error)) for failure in report["failed"]] == [(1, "not now")]
    left = status(fleet)[1]
    assert (left.state, left.reason) == ("joining", "paused")
    with pytest.raises(EngineAsleepError):
        failing.generate(PROMPT, {"max_tokens": 1})
    assert tokens(fleet, PROMPT) == [greedy(model)] * 4
    assert fleet.replace(model) == [1]
    assert failing.about().pid == pid
    assert [(one.state, one.weight_version) for one in status(fleet)] == [("serves", "eight")] * 2
    assert tokens(fleet, PROMPT) == [greedy(model)] * 4


def test_an_actor_ends_with_its_engine(fleet: EngineFleet, folder: Path) -> None:
    """vLLM's core is another process than the actor's."""
    engine = fleet.engines[0]
    pid = engine.about().pid
    for child in psutil.Process(pid).children(recursive=True):
        child.kill()
    wait_until(lambda: status(fleet)[0].state == "empty", "Ray restarts the actor")
    assert engine.about().pid != pid
    with pytest.raises(EngineLostError) as caught:
        engine.sleep()
    assert caught.value.details["engine"] == 0
    assert set(fleet.sleep()) == {1}
