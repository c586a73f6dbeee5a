"""`RolloutHandoff` on a running engine: whole steps, and steps that break off and are called again."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from integration.engines.base import Server
from rl_memory_plugins.errors import RLMemoryError
from rl_memory_plugins.trainer import AsyncRolloutHandoff, ModelSource, Moved, Offloader, RolloutHandoff
from rl_memory_plugins.trainer.handoff_report import STEPS
from tests.conformance.conftest import PROMPT, Weights, greedy
from tests.conformance.trainers import BUCKET_BYTES


class Trainer:
    """A model that "trains" by taking another's weights, and the handoff to an engine."""

    def __init__(self, server: Server, model: torch.nn.Module, make: Any = RolloutHandoff, **options: Any) -> None:
        self.model = copy.deepcopy(model)
        self.offloader = Offloader(self.model, moves=lambda tensor: True)
        self.source = Interrupted(self.model)
        self.handoff = make(
            server.control,
            self.source,
            weights=[self.offloader, *options.pop("parts", ())],
            bucket_bytes=BUCKET_BYTES,
            **options,
        )

    def train(self, wanted: torch.nn.Module) -> None:
        assert self.offloader.offloaded_bytes == 0
        self.model.load_state_dict(wanted.state_dict())


class Interrupted(ModelSource):
    """Does something once, after so many tensors."""

    after, interruption = -1, None

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, item in enumerate(super().tensors()):
            if number == self.after and self.interruption is not None:
                interruption, self.interruption = self.interruption, None
                interruption()
            yield item


def assert_closed(server: Server) -> None:
    assert server.post(PROMPT).status_code == 503


@pytest.mark.parametrize("from_host", [False, True])
def test_two_steps(server: Server, weights: Weights, from_host: bool) -> None:
    trainer = Trainer(server, weights.first, from_host=from_host)
    for number, wanted in enumerate((weights.other, weights.first)):
        with trainer.handoff.training(f"step-{number}") as report:
            assert_closed(server)
            trainer.train(wanted)
        assert trainer.offloader.offloaded_bytes > 0
        assert server.generate(PROMPT) == greedy(wanted, PROMPT)
        assert server.control.weight_version() == f"step-{number}"
        idle = {"load"} if number == 0 else set()  # the model is here
        if server.launch.device == "cpu":
            idle |= {"offload_others"}  # there is no optimiser; on a GPU what torch has cached goes in this step
        assert {step for step in STEPS if report.seconds[step] == 0.0} == idle
        assert report.update["tensors"] == len(trainer.source.specs())
    trainer.offloader.close()


def test_two_steps_on_an_event_loop(server: Server, weights: Weights) -> None:
    async def steps() -> None:
        trainer = Trainer(server, weights.first, AsyncRolloutHandoff)
        for number, wanted in enumerate((weights.other, weights.first)):
            async with trainer.handoff.training(f"async-{number}"):
                await asyncio.to_thread(assert_closed, server)
                trainer.train(wanted)
            assert await asyncio.to_thread(server.generate, PROMPT) == greedy(wanted, PROMPT)
        trainer.offloader.close()

    asyncio.run(steps())


class Once:
    """A part of the trainer whose first offload fails."""

    failed = False

    def load(self) -> Moved:
        return Moved()

    def offload(self) -> Moved:
        if not self.failed:
            self.failed = True
            raise RuntimeError("no host memory")
        return Moved()


def test_an_engine_that_cannot_sleep(server: Server, weights: Weights, fault_dir: Path) -> None:
    trainer = Trainer(server, weights.first)
    (fault_dir / f"release.{server.launch.ranks - 1}").touch()
    with pytest.raises(RLMemoryError) as caught, trainer.handoff.training():
        pytest.fail("the body ran")
    assert caught.value.details["step"] == "sleep"
    if server.launch.ranks == 1:
        assert server.generate(PROMPT) == greedy(weights.first, PROMPT)  # nothing was released: it is as it was
    else:
        assert_closed(server)  # the other rank had released its part
    with trainer.handoff.training("again"):
        trainer.train(weights.other)
    assert server.generate(PROMPT) == greedy(weights.other, PROMPT)


def out_of_memory(trainer: Trainer, fault: Callable[[], None]) -> None:
    fault()


def out_of_memory_later(trainer: Trainer, fault: Callable[[], None]) -> None:
    """The first memory that is asked for after the update is the KV cache's."""
    trainer.source.after, trainer.source.interruption = 5, fault


def broken_source(trainer: Trainer, fault: Callable[[], None]) -> None:
    def break_off() -> None:
        raise RuntimeError("the trainer broke off")

    trainer.source.after, trainer.source.interruption = 30, break_off


def nothing(trainer: Trainer, fault: Callable[[], None]) -> None:
    """The part of the trainer that cannot be offloaded is failure enough."""


@pytest.mark.parametrize(
    ("step", "arrange", "content"),
    [
        ("wake_weights", out_of_memory, "stale"),
        ("sync", broken_source, "failed"),
        ("offload", nothing, "valid"),
        ("wake_kv_cache", out_of_memory_later, "valid"),
    ],
)
def test_a_step_that_fails_is_named_and_called_again(
    server: Server, weights: Weights, fault_dir: Path, step: str, arrange: Any, content: str
) -> None:
    trainer = Trainer(server, weights.first, parts=[Once()] if step == "offload" else [])
    trainer.handoff.release()
    trainer.train(weights.other)
    arrange(trainer, (fault_dir / f"reserve.{server.launch.ranks - 1}").touch)
    with pytest.raises(RLMemoryError) as caught:
        trainer.handoff.sync("again")
    assert caught.value.details["step"] == step
    memory = server.control.memory()
    assert (memory["admitting"], memory["content"]) == (False, content)
    assert_closed(server)
    trainer.handoff.sync("again")
    assert server.control.weight_version() == "again"
    assert server.generate(PROMPT) == greedy(weights.other, PROMPT)
