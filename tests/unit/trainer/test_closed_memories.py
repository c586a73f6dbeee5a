"""Memory whose tensors outlive its `PausableMemory`, with an allocator that frees none of it by itself, as of a GPU."""

import gc

import pytest
import torch
from torch import nn

from rl_memory_plugins.memory import host
from rl_memory_plugins.trainer import Offloader, PausableMemory, closed_memories, pausable_tensors

WIDTH = 256


class Keeping(host.HostAllocator):
    """Keeps the block of a tensor that has ended, until `free_unused`."""

    keeps_freed = True

    def __init__(self):
        super().__init__()
        self.kept = {}  # by tag: the blocks

    def adopt(self, tag, tensors):
        super().adopt(tag, tensors)
        self.kept.setdefault(tag, set()).update(super().blocks(tag))

    def blocks(self, tag):
        return sorted(self.kept.get(tag, set()) | set(super().blocks(tag)))

    def free_unused(self, tag):
        self.kept[tag] = set(super().blocks(tag))

    def bytes(self):
        return sum(block.nbytes for tag in self.kept for block in self.blocks(tag))


@pytest.fixture
def allocators(monkeypatch):
    """Those of the memories that a test makes, in their order."""
    made = []
    choose = pausable_tensors.choose_allocator

    def chosen(*arguments):
        made.append(Keeping())
        return made[-1], choose(*arguments)[1]

    monkeypatch.setattr(pausable_tensors, "choose_allocator", chosen)
    monkeypatch.setattr(closed_memories, "_closed", {})
    return made


def closed(model):
    memory = PausableMemory(model)
    memory.close()


def ended_awake(model):
    PausableMemory(model)
    gc.collect()


@pytest.mark.parametrize("end", [closed, ended_awake])
@pytest.mark.parametrize("after", ["another memory", "an offloader"])
def test_what_no_longer_has_a_tensor_is_freed(allocators, end, after):
    model = nn.Linear(WIDTH, WIDTH)
    end(model)
    [allocator] = allocators
    assert allocator.bytes() > 0, "its tensors live"
    model.weight = nn.Parameter(torch.zeros(1))  # the old tensor ends
    if after == "another memory":
        PausableMemory(nn.Linear(WIDTH, WIDTH)).close()
    else:
        Offloader(nn.Linear(WIDTH, WIDTH), moves=lambda tensor: True).offload()
    assert allocator.bytes() == 0
    assert id(allocator) not in closed_memories._closed, "it is not looked at again"


def test_what_has_a_tensor_stays_until_that_has_ended(allocators):
    model = nn.Linear(WIDTH, WIDTH)
    closed(model)
    [allocator] = allocators
    for _ in range(2):
        closed_memories.free_closed()
        assert allocator.bytes() > 0
    assert id(allocator) in closed_memories._closed
    del model
    closed_memories.free_closed()
    assert allocator.bytes() == 0


def test_nothing_is_freed_while_a_graph_is_captured(allocators, monkeypatch):
    closed(nn.Linear(WIDTH, WIDTH))
    monkeypatch.setattr(closed_memories, "is_capturing", lambda: True)
    closed_memories.free_closed()
    assert allocators[0].bytes() > 0


def test_memory_that_ends_with_its_tensors_is_not_looked_at(monkeypatch):
    monkeypatch.setattr(closed_memories, "_closed", {})
    closed(nn.Linear(WIDTH, WIDTH))
    assert not closed_memories._closed
