"""Parameters that a sleep must not lose: those that no load fills, and those in host memory of the engine's own.

vLLM's `--cpu-offload-gb` points the `data` of a parameter at pinned host memory. A GPU reads it there. No sleep touches
it, and updates write it there.
"""

from __future__ import annotations

from typing import Any

import pytest
import ranks
import torch

from rl_memory_plugins.tags import Content, Level

NUMEL = 4 << 10


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.resident = torch.nn.Parameter(torch.full((NUMEL,), 1.0), requires_grad=False)
        self.offloaded = torch.nn.Parameter(torch.full((NUMEL,), 2.0), requires_grad=False)

    def load_weights(self, weights: dict[str, torch.Tensor]) -> None:
        for name, tensor in weights.items():
            self.get_parameter(name).copy_(tensor)


class Scaled(Model):
    """Has a scale that no checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.full((NUMEL,), 5.0), requires_grad=False)


class Rank(ranks.Rank[Any]):
    def __init__(self, made: type[Model] = Model, unfilled: tuple[str, ...] = ()) -> None:
        super().__init__(made, self._offload, "a model that no host has", unfilled=lambda: unfilled)

    @staticmethod
    def _offload(model: Model) -> None:
        model.offloaded.data = model.offloaded.data.clone()  # outside of the region

    def load(self, name: str, value: float) -> None:
        with self.updates.watch():
            self.model.load_weights({name: torch.full((NUMEL,), value)})


@pytest.fixture
def rank() -> Rank:
    return Rank()


@pytest.mark.parametrize("level", [Level.PRESERVE, Level.DISCARD])
def test_a_sleep_leaves_an_offloaded_parameter_where_it_is(rank: Rank, level: Level) -> None:
    address = rank.model.offloaded.data_ptr()
    rank.sleep(level)
    assert rank.model.offloaded.eq(2).all()
    rank.wake()
    assert rank.model.offloaded.eq(2).all()
    assert rank.model.offloaded.data_ptr() == address
    assert rank.model.resident.eq(1).all() == (level is Level.PRESERVE)


def test_a_complete_update_writes_it_where_it_is(rank: Rank) -> None:
    rank.sleep(Level.DISCARD)
    rank.wake()
    rank.load("resident", 3.0)
    assert rank.manager.content is Content.STALE  # the offloaded half is of the former weights
    rank.load("offloaded", 4.0)
    assert rank.manager.content is Content.VALID
    rank.sleep(Level.PRESERVE)
    rank.wake()
    assert rank.model.resident.eq(3).all() and rank.model.offloaded.eq(4).all()


def test_it_counts_for_the_identity_of_the_weights(rank: Rank) -> None:
    before = rank.agent.identity()
    rank.load("offloaded", 4.0)
    assert rank.agent.identity() != before
    rank.load("offloaded", 2.0)
    assert rank.agent.identity() == before


def test_a_discarding_sleep_keeps_what_no_load_fills() -> None:
    """Such as the scale of a KV cache that the checkpoint does not have: the engine's own load would not write it."""
    rank = Rank(Scaled, unfilled=("scale", "of another model"))
    for value in (3.0, 4.0):
        rank.sleep(Level.DISCARD)
        rank.wake()
        rank.load("resident", value)
        assert rank.manager.content is Content.STALE
        rank.load("offloaded", value)
        assert rank.manager.content is Content.VALID
        parameters = dict(rank.model.named_parameters())
        assert {name: float(one.max()) for name, one in parameters.items()} == {
            "resident": value,
            "offloaded": value,
            "scale": 5.0,
        }
