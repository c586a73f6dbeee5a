"""Regions of the `vmm` allocator on a pretended GPU: what they ask of torch, and what an interrupt leaves."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from contextlib import ExitStack, nullcontext, suppress
from types import SimpleNamespace

import pytest
import torch
from helpers import InterruptedLock

from rl_memory_plugins.errors import UnsupportedError
from rl_memory_plugins.memory import cuda_vmm, torch_settings
from rl_memory_plugins.memory.cuda_vmm import CudaVmmAllocator
from rl_memory_plugins.memory.regions import DeviceRegions

OURS = "release_lock_on_cudamalloc:True"


class Torch:
    """torch's settings, the latest last. With expandable segments it ignores the allocators of pools."""

    def __init__(self):
        self.settings = [OURS]
        self.is_capturing = False
        self.reads_settings = True  # whether the snapshot has them
        self.never_asks = False

    def options(self):
        expandable = "expandable_segments:True" in self.settings[-1]
        text = {"PYTORCH_ALLOC_CONF": self.settings[-1]} if self.reads_settings else {}
        return {**text, "expandable_segments": expandable}

    def asks_pools(self):
        return not self.never_asks and "expandable_segments:True" not in self.settings[-1]


@pytest.fixture
def gpu(monkeypatch):
    found = Torch()
    for module in (torch_settings, cuda_vmm):
        monkeypatch.setattr(module, "torch_options", found.options)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", found.settings.append, raising=False)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: found.is_capturing)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", lambda pool, index: nullcontext())
    return found


@pytest.fixture
def vmm(gpu):
    allocator = object.__new__(CudaVmmAllocator)
    allocator.index, allocator._lock, allocator._regions = 0, threading.Lock(), DeviceRegions()
    allocator._idle_pools, allocator._known_unused = defaultdict(list), {}
    allocator._new_pool = lambda tag: object()
    allocator._return_pool = lambda tag, pool: allocator._idle_pools[tag].append(pool)

    def is_used_by_torch():
        with allocator._region("runtime"):
            return gpu.asks_pools()

    allocator._is_used_by_torch = is_used_by_torch
    return allocator


@pytest.mark.parametrize("settings", ["", "expandable_segments:True", "expandable_segments:False,max_split_size_mb:64"])
def test_a_region_mends_the_settings_that_other_code_has_replaced(gpu, vmm, settings):
    gpu.settings.append(settings)
    with vmm.region("masters"):
        assert OURS in gpu.settings[-1]
        assert gpu.asks_pools()
    assert ("max_split_size_mb:64" in gpu.settings[-1]) == ("max_split_size_mb:64" in settings)
    count = len(gpu.settings)
    with vmm.region("masters"):
        pass
    assert len(gpu.settings) == count


def test_a_region_that_torch_would_pass_by_is_refused(gpu, vmm):
    gpu.settings.append("")
    gpu.never_asks = True
    with pytest.raises(UnsupportedError, match="does not allocate through custom pools"):
        vmm.region("masters")


def test_a_capture_gets_no_probe(gpu, vmm):
    gpu.settings.append("")
    gpu.is_capturing = True
    with vmm.region("masters"):
        assert gpu.settings[-1] == ""
    gpu.is_capturing = False
    with vmm.region("masters"):
        assert gpu.settings[-1] == OURS


def test_the_probe_of_a_region_needs_no_probe(gpu, vmm, monkeypatch):
    """Also where torch does not tell its settings."""
    gpu.settings.append("")
    gpu.reads_settings = False
    probe = torch.empty(1, dtype=torch.uint8)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: probe)
    vmm.blocks = lambda tag: [cuda_vmm.Block(probe.data_ptr(), 1)]
    del vmm._is_used_by_torch  # the real one
    with vmm.region("masters"):
        assert gpu.settings[-1] == OURS


def test_an_interrupt_at_the_lock_leaves_no_region_open(vmm):
    regions = vmm._regions
    for at in itertools.count():
        regions.lock = InterruptedLock(threading.Lock(), at)
        with suppress(KeyboardInterrupt), vmm.region("masters"):
            assert regions.open
        assert not regions.open, at
        if not regions.lock.interrupted:
            break
    assert at >= 2


def test_what_is_unused_is_not_kept_of_pools_whose_region_closes_meanwhile(vmm):
    """Its pool is not among those that were read."""
    region, read = ExitStack(), []
    vmm._retired_pools = defaultdict(list)

    def of(pools):
        read.append(len(pools))
        region.close()
        return [SimpleNamespace(unused=("block",)) for _ in pools]

    vmm._segments = SimpleNamespace(of=of)
    region.enter_context(vmm.region("masters"))
    assert vmm.unused("masters") == []
    assert vmm.unused("masters") == vmm.unused("masters") == ["block"]
    assert read == [0, 1]
