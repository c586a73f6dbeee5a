"""What is read of torch's snapshot, and when; on a pretended GPU."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

from rl_memory_plugins.memory.allocator import Block
from rl_memory_plugins.memory.cuda_vmm import CudaVmmAllocator
from rl_memory_plugins.memory.segments import Segments
from rl_memory_plugins.memory.torch_saver import TorchSaverAllocator

POOL = SimpleNamespace(id=(0, 7))


class Torch:
    """One segment of a pool, and one of another GPU."""

    def __init__(self) -> None:
        self.stats = {"active.all.allocated": 3, "reserved_bytes.all.freed": 0}
        self.states = ["active_allocated", "inactive", "active_pending_free", "inactive"]
        self.active = 20
        self.reads = 0

    def snapshot(self):
        self.reads += 1
        parts = [{"address": 1000 + 10 * at, "size": 10, "state": state} for at, state in enumerate(self.states)]
        sizes = {"total_size": 40, "active_size": self.active}
        segment = {"address": 1000, **sizes, "segment_pool_id": POOL.id, "blocks": parts}
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


@pytest.mark.parametrize(("address", "active", "used"), [(1000, 20, True), (1000, 0, False), (2000, 20, False)])
def test_released_memory_is_used_while_a_tensor_is_in_it(gpu, address, active, used):
    """Also that of an allocator whose memory has ended: the block stays until a wake."""
    gpu.active = active
    vmm, saver = object.__new__(CudaVmmAllocator), object.__new__(TorchSaverAllocator)
    vmm._lock, vmm._mappings = threading.Lock(), {"mine": {address: SimpleNamespace(mapped=False)}}
    saver._names = {"mine": ["rl_memory.mine.0"]}
    pool = POOL if address == 1000 else SimpleNamespace(id=(0, 8))
    saver._saver = SimpleNamespace(_impl=SimpleNamespace(_mem_pools={"rl_memory.mine.0": pool}))
    for allocator in (vmm, saver):
        allocator._segments = Segments(0)
        assert allocator.is_used("mine") is used


def test_other_pools_have_none_of_them(gpu):
    assert Segments(0).of([SimpleNamespace(id=(0, 8))]) == []
