"""What is read of torch's snapshot, and when; on a pretended GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rl_memory_plugins.memory.allocator import Block
from rl_memory_plugins.memory.segments import Segments

POOL = SimpleNamespace(id=(0, 7))


class Torch:
    """One segment of a pool, and one of another GPU."""

    def __init__(self) -> None:
        self.stats = {"active.all.allocated": 3, "reserved_bytes.all.freed": 0}
        self.states = ["active_allocated", "inactive", "active_pending_free", "inactive"]
        self.reads = 0

    def snapshot(self):
        self.reads += 1
        parts = [{"address": 1000 + 10 * at, "size": 10, "state": state} for at, state in enumerate(self.states)]
        segment = {"address": 1000, "total_size": 40, "active_size": 20, "segment_pool_id": POOL.id, "blocks": parts}
        return {"segments": [{"device": 0, **segment}, {"device": 1, **segment}]}


@pytest.fixture
def gpu(monkeypatch):
    found = Torch()
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda index: found.stats)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", found.snapshot)
    return found


def test_unused_is_what_neither_a_tensor_nor_the_device_needs(gpu):
    (segment,) = Segments(0).of([POOL])
    assert (segment.address, segment.nbytes, segment.active_bytes) == (1000, 40, 20)
    assert segment.unused == (Block(1010, 10), Block(1030, 10))


@pytest.mark.parametrize("count", ["active.all.allocated", "active.all.freed", "reserved_bytes.all.freed"])
def test_segments_are_read_again_only_after_a_change(gpu, count):
    segments = Segments(0)
    for _ in range(2):
        assert segments.of([POOL]) == segments.by_pool()[POOL.id]
    assert gpu.reads == 1
    gpu.stats = {**gpu.stats, count: 9}
    gpu.states[0] = "inactive"
    (segment,) = segments.of([POOL])
    assert gpu.reads == 2 and segment.unused[0] == Block(1000, 10)


def test_other_pools_have_none_of_them(gpu):
    assert Segments(0).of([SimpleNamespace(id=(0, 8))]) == []
