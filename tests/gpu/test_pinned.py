"""The page-locked host arena."""

from __future__ import annotations

import time

import pytest
import torch

from rl_memory_plugins.errors import HostMemoryError
from rl_memory_plugins.memory.allocator import Block
from rl_memory_plugins.memory.cuda_device import CudaDevice
from rl_memory_plugins.memory.fingerprint import memory_view
from rl_memory_plugins.memory.pinned import PinnedArena

MiB = 1 << 20


@pytest.fixture
def arena():
    arena = PinnedArena(0)
    yield arena
    arena.close()


def test_buffers_are_page_locked_and_carry_copies(arena):
    source = torch.randint(0, 256, (256 * MiB,), dtype=torch.uint8, device="cuda")
    address = arena.acquire(source.numel())
    assert memory_view(address, source.numel()).is_pinned()
    assert arena.notes == []
    device, block = CudaDevice(0), Block(source.data_ptr(), source.numel())
    device.begin_copy_to_host([(block, address)])()
    assert torch.equal(memory_view(address, source.numel()), source.cpu())
    expected = source.clone()
    source.zero_()
    device.copy_from_host([(block, address)])
    assert torch.equal(source, expected)


def test_what_was_prepared_costs_no_sleep_anything(arena):
    start = time.perf_counter()
    arena.prepare([2048 * MiB, 64 * MiB])
    returned = time.perf_counter() - start
    address = arena.acquire(2000 * MiB)  # waits for it
    waited = time.perf_counter() - start
    assert returned < 0.1 * waited
    assert arena.held_bytes == (2048 + 64) * MiB
    arena.release(address)
    start = time.perf_counter()
    assert arena.acquire(2048 * MiB) == address
    assert time.perf_counter() - start < 0.01 * waited


def test_the_bound_holds_in_the_background_too():
    arena = PinnedArena(0, max_bytes=128 * MiB)
    arena.prepare([256 * MiB]).join()
    assert arena.held_bytes == 0
    with pytest.raises(HostMemoryError):
        arena.acquire(256 * MiB)
    arena.release(arena.acquire(128 * MiB))
    assert arena.held_bytes == 128 * MiB
    arena.close()
    assert arena.held_bytes == 0


def test_a_refusal_to_lock_pages_is_noted_and_copies_still_work(arena, monkeypatch):
    class Refusing:
        def cudaHostRegister(self, *arguments):
            return 1

    monkeypatch.setattr(torch.cuda, "cudart", Refusing)
    address = arena.acquire(8 * MiB)
    monkeypatch.undo()
    assert len(arena.notes) == 1
    source = torch.arange(MiB, device="cuda")
    CudaDevice(0).begin_copy_to_host([(Block(source.data_ptr(), 8 * MiB), address)])()
    assert torch.equal(memory_view(address, 8 * MiB).view(torch.int64), source.cpu())
