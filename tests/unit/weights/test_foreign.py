"""Loads that others make, by the model's own loader."""

from __future__ import annotations

import pytest
import torch

from rl_memory_plugins.memory.backup import PagedArena
from rl_memory_plugins.memory.host import HostAllocator
from rl_memory_plugins.memory.manager import MemoryManager
from rl_memory_plugins.tags import Content
from rl_memory_plugins.weights.foreign import ForeignLoads


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Parameter(torch.zeros(8))
        self.b = torch.nn.Parameter(torch.zeros(8))

    def load_weights(self, weights):
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor)


def breaking_off_after(count):
    yield from [(name, torch.ones(8)) for name in "ab"[:count]]
    raise ConnectionError("the trainer is gone")


@pytest.fixture
def model():
    return Model()


@pytest.fixture
def manager(model):
    manager = MemoryManager(0, HostAllocator(), PagedArena(), lambda tag: [])
    ForeignLoads(manager, model)
    return manager


@pytest.mark.parametrize(("written", "content"), [(0, Content.VALID), (1, Content.FAILED), (2, Content.VALID)])
def test_a_load_that_breaks_off_half_way_leaves_no_valid_weights(model, manager, written, content):
    with pytest.raises(ConnectionError):
        model.load_weights(breaking_off_after(written))
    assert manager.content is content
    model.load_weights([("a", torch.ones(8)), ("b", torch.ones(8))])
    assert manager.content is Content.VALID


def test_the_rest_may_come_in_another_load(model, manager):
    with pytest.raises(ConnectionError):
        model.load_weights(breaking_off_after(1))
    model.load_weights([("b", torch.ones(8))])
    assert manager.content is Content.VALID
