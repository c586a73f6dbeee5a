"""What newly mapped memory holds: the driver's zeros, or what a wake leaves, with poison and without."""

from __future__ import annotations

import time

import pytest
import torch

from rl_memory_plugins.memory.allocator import Block
from rl_memory_plugins.memory.arena import PagedArena
from rl_memory_plugins.memory.cuda_vmm import CudaVmmAllocator
from rl_memory_plugins.memory.manager import MemoryManager
from rl_memory_plugins.memory.torch_saver import TorchSaverAllocator
from rl_memory_plugins.tags import PUBLIC_TAGS, Level, Tag

pytestmark = pytest.mark.gpu


def test_mapped_memory_reads_as_zeros():
    """`CudaVmmAllocator.maps_zeroed` claims it, and a wake without poison relies on it.

    Nearly all memory of the GPU is written, so the driver has no other to hand out again. It comes back at once, after
    a while, and after others' use.
    """
    allocator = CudaVmmAllocator(0)
    chunks = (torch.cuda.mem_get_info(0)[0] - (3 << 30)) >> 30
    with allocator.region(Tag.KV_CACHE):
        tensors = [torch.empty(1 << 30, dtype=torch.uint8, device="cuda:0") for _ in range(chunks)]

    def used_by_torch():
        torch.full((chunks // 2 << 30,), 0xFF, dtype=torch.uint8, device="cuda:0")
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    for meanwhile in (lambda: None, lambda: time.sleep(0.5), allocator.reclaim, used_by_torch):
        for tensor in tensors:
            tensor.fill_(0xFF)
        torch.cuda.synchronize()
        allocator.release(Tag.KV_CACHE)
        meanwhile()
        allocator.reserve(Tag.KV_CACHE).commit()
        for tensor in tensors:
            assert not tensor.view(torch.int64).any()
    del tensor
    tensors.clear()
    allocator.close()


@pytest.mark.parametrize("kind", [CudaVmmAllocator, TorchSaverAllocator])
@pytest.mark.parametrize("poison", [True, False])
def test_a_wake_restores_what_is_kept_and_zeroes_what_is_read(kind, poison):
    """Of the cache SGLang reads the table of requests, and vLLM masked entries, before they are written."""
    allocator, arena = kind(0), PagedArena()
    with allocator.region(Tag.WEIGHTS):
        weights = torch.full((64 << 20,), 1, dtype=torch.uint8, device="cuda:0")
        scales = torch.full((8 << 20,), 2, dtype=torch.uint8, device="cuda:0")
    with allocator.region(Tag.KV_CACHE):
        cache = torch.full((64 << 20,), 3, dtype=torch.uint8, device="cuda:0")

    def discardable(tag):
        storages = [tensor.untyped_storage() for tensor in {Tag.WEIGHTS: [weights], Tag.KV_CACHE: [cache]}.get(tag, [])]
        return [Block(storage.data_ptr(), storage.nbytes()) for storage in storages]

    manager = MemoryManager(0, allocator, arena, discardable, poison=poison, zero_on_wake=(Tag.KV_CACHE,))
    for level, content in ((Level.PRESERVE, 1), (Level.DISCARD, 0xFF if poison else None)):
        manager.prepare_sleep(level, PUBLIC_TAGS)
        manager.commit_sleep()
        manager.prepare_wake(PUBLIC_TAGS)
        manager.commit_wake()
        if content is not None:
            assert int(weights.min()) == int(weights.max()) == content
        assert int(scales.min()) == int(scales.max()) == 2
        assert int(cache.count_nonzero()) == 0
        cache.fill_(3)
    torch.cuda.synchronize()
    for tag in PUBLIC_TAGS:
        allocator.release(tag)
    arena.close()
