"""Which allocator a rank gets."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rl_memory_plugins.config import RLMemoryConfig
from rl_memory_plugins.errors import DeviceMemoryError, HostMemoryError, UnsupportedError
from rl_memory_plugins.memory.select import choose_allocator
from rl_memory_plugins.tags import Tag

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", ["auto", "host"])
def test_a_cpu_engine_gets_host_memory(kind):
    allocator, arena = choose_allocator(RLMemoryConfig(allocator=kind, host_arena_max_bytes=4096), CPU, rank=3)
    assert allocator.name == "host"
    assert allocator.device.name == "cpu:3"
    arena.acquire(4096)
    with pytest.raises(HostMemoryError):
        arena.acquire(4096)


@pytest.mark.parametrize(("kind", "device"), [("vmm", "cpu"), ("tms", "cpu"), ("host", "cuda:0"), ("auto", "meta")])
def test_an_allocator_that_cannot_hold_the_devices_memory_is_refused(kind, device):
    with pytest.raises(UnsupportedError, match=torch.device(device).type):
        choose_allocator(RLMemoryConfig(allocator=kind), torch.device(device), rank=0)


def test_faults_are_injected_only_where_a_directory_is_named(tmp_path: Path):
    (tmp_path / "reserve.0").touch()
    plain, _ = choose_allocator(RLMemoryConfig(), CPU, rank=0)
    plain.reserve(Tag.WEIGHTS).drop()
    faulty, _ = choose_allocator(RLMemoryConfig(fault_dir=str(tmp_path)), CPU, rank=0)
    with pytest.raises(DeviceMemoryError):
        faulty.reserve(Tag.WEIGHTS)
