"""Optimisers whose state is quantised, as trainers use them where memory is short: it sleeps like any other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import bitsandbytes
import pytest
import torch
import torchao.optim

from rl_memory_plugins.trainer import PausableMemory

Make = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]

OPTIMISERS: dict[str, Make] = {
    "bitsandbytes, 8 bits": lambda parameters: bitsandbytes.optim.AdamW8bit(parameters, lr=1e-3, min_8bit_size=256),
    "torchao, 8 bits": lambda parameters: torchao.optim.AdamW8bit(parameters, lr=1e-3, block_size=64),
    "torchao, 4 bits": lambda parameters: torchao.optim.AdamW4bit(parameters, lr=1e-3),
}


class Training:
    """A small model that learns."""

    def __init__(self, make: Make) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 64))
        self.optimizer = make(self.model.parameters())
        self.losses: list[float] = []

    def step(self) -> None:
        data = torch.randn(8, 256, generator=torch.Generator().manual_seed(len(self.losses)))
        loss = self.model(data).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())

    def state(self) -> list[torch.Tensor]:
        """The tensors that hold memory, also those inside torchao's."""
        found: list[torch.Tensor] = []
        for value in (value for state in self.optimizer.state.values() for value in state.values()):
            if hasattr(value, "__tensor_flatten__"):
                found += [getattr(value, name) for name in value.__tensor_flatten__()[0]]
            elif isinstance(value, torch.Tensor) and value.numel() > 1:
                found.append(value)
        return found


@pytest.mark.parametrize("adopted", ["before the first step", "afterwards"])
@pytest.mark.parametrize("name", OPTIMISERS)
def test_the_state_sleeps_and_training_goes_on_as_without_a_sleep(name: str, adopted: str) -> None:
    plain, sleeping = Training(OPTIMISERS[name]), Training(OPTIMISERS[name])
    if adopted == "afterwards":
        sleeping.step()
    memory = PausableMemory(sleeping.model, sleeping.optimizer, device="cpu")
    if adopted != "afterwards":
        sleeping.step()
    addresses = [tensor.data_ptr() for tensor in sleeping.state()]
    for _ in range(3):
        memory.sleep()
        status: Any = memory.status()["optimizer"]
        assert status.state == "preserved"
        memory.wake()
        sleeping.step()
    for _ in sleeping.losses:
        plain.step()
    assert sleeping.losses == plain.losses  # bit by bit
    assert [tensor.data_ptr() for tensor in sleeping.state()] == addresses
    values = sum(parameter.numel() for parameter in sleeping.model.parameters())
    held = sum(tensor.nbytes for tensor in sleeping.state())
    assert held < 2.5 * values  # two moments of a byte or less, and their scales
    assert status.bytes > 0.8 * held  # in host memory only whole pages leave
    memory.close()
