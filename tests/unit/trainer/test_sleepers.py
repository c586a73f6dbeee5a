"""The memories of this process in which tensors can be asleep."""

from __future__ import annotations

import gc

import pytest
import torch

from rl_memory_plugins.trainer import sleepers as module
from rl_memory_plugins.trainer.offloading import host_view
from rl_memory_plugins.trainer.sleepers import Sleepers


class Memory:
    def __init__(self, *, may_sleep=False):
        self.may_sleep = may_sleep
        self.asked = 0

    def host_bytes(self, storage):
        self.asked += 1


@pytest.fixture
def memories(monkeypatch):
    found = Sleepers()
    monkeypatch.setattr(module, "sleepers", found)
    monkeypatch.setattr(module, "remnants", set())
    return found


def test_a_memory_is_there_until_it_ends(memories):
    first, second = Memory(), Memory()
    memories.add(first)
    memories.add(second)
    assert list(memories) == [first, second]
    del first
    gc.collect()
    assert list(memories) == [second]
    memories.discard(second)
    memories.discard(second)
    assert list(memories) == []


def test_a_memory_with_the_id_of_one_that_has_ended_stays(memories, monkeypatch):
    monkeypatch.setattr(module, "id", lambda memory: 7, raising=False)
    first, second = Memory(), Memory()
    memories.add(first)
    memories.add(second)
    del first
    gc.collect()
    assert list(memories) == [second]


def test_a_tensor_is_looked_for_only_where_something_may_sleep(memories):
    awake, asleep = Memory(), Memory(may_sleep=True)
    tensor = torch.ones(3)
    memories.add(awake)
    assert host_view(tensor) is tensor
    memories.add(asleep)
    assert host_view(tensor) is tensor
    assert (awake.asked, asleep.asked) == (0, 1)
