"""`RolloutHandoff` of a trainer that sleeps as the engine does: weights and an optimiser's states keep their places."""

from __future__ import annotations

import copy

import pytest
import torch

from integration.engines.base import Server
from rl_memory_plugins.trainer import ModelSource, PausableMemory, RolloutHandoff
from tests.conformance.conftest import PROMPT, Weights, greedy
from tests.conformance.trainers import BUCKET_BYTES


def asleep(memory: PausableMemory) -> set[str]:
    return {tag for tag, status in memory.status().items() if status.state != "resident" and status.bytes}


@pytest.mark.parametrize("overlap", [False, True])
def test_steps_of_a_trainer_that_sleeps(server: Server, weights: Weights, overlap: bool) -> None:
    """The states that the optimiser had before a rollout are those with which it goes on."""
    model = copy.deepcopy(weights.first)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    memory = PausableMemory(model, optimizer)
    handoff = RolloutHandoff(
        server.control,
        ModelSource(model),
        weights=[memory.part("parameters")],
        others=[memory.part("gradients", "optimizer")],
        overlap=overlap,
        bucket_bytes=BUCKET_BYTES,
    )
    places = [parameter.data_ptr() for parameter in model.parameters()]
    left: list[torch.Tensor] = []
    for number, wanted in enumerate((weights.other, weights.first)):
        with handoff.training(f"pausable-{overlap}-{number}"):
            assert server.post(PROMPT).status_code == 503
            model.load_state_dict(wanted.state_dict())
            torch.manual_seed(number)
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()  # with overlap it waits for the states
            averages = [optimizer.state[parameter]["exp_avg"] for parameter in model.parameters()]
            gradients = [parameter.grad for parameter in model.parameters()]
            for average, gradient, before in zip(averages, gradients, left or averages, strict=True):
                expected = 0.1 * gradient + (0.9 * before if left else 0.0)
                torch.testing.assert_close(average, expected)
            left = [average.clone() for average in averages]
            optimizer.zero_grad()
        memory.wait()
        assert {"parameters", "optimizer"} <= asleep(memory)
        assert server.generate(PROMPT) == greedy(wanted, PROMPT)
    memory.close()
    assert [parameter.data_ptr() for parameter in model.parameters()] == places
    assert all(map(torch.equal, model.parameters(), weights.first.parameters()))
