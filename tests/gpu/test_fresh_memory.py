"""The driver hands out zeroed memory, which `CudaVmmAllocator.maps_zeroed` claims and a wake relies on."""

from __future__ import annotations

import pytest
import torch

from rl_memory_plugins.memory.cuda_vmm import CudaVmmAllocator
from rl_memory_plugins.tags import Tag

pytestmark = pytest.mark.gpu


def test_mapped_memory_reads_as_zeros():
    allocator = CudaVmmAllocator(0)
    with allocator.region(Tag.KV_CACHE):
        tensors = [torch.empty(1 << 30, dtype=torch.uint8, device="cuda:0") for _ in range(8)]
    for _ in range(3):
        for tensor in tensors:
            tensor.fill_(0xFF)
        torch.cuda.synchronize()
        allocator.release(Tag.KV_CACHE)
        allocator.reserve(Tag.KV_CACHE).commit()
        for tensor in tensors:
            assert int(tensor.view(torch.int64).count_nonzero()) == 0
