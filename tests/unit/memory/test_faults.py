from __future__ import annotations

import pytest

from rl_memory_plugins.errors import DeviceMemoryError
from rl_memory_plugins.memory.fake import FakeAllocator
from rl_memory_plugins.memory.faults import FaultyAllocator
from rl_memory_plugins.tags import Tag


def test_each_file_fails_one_call_of_its_rank(tmp_path):
    inner = FakeAllocator()
    allocator = FaultyAllocator(inner, tmp_path, rank=1)
    with allocator.region(Tag.WEIGHTS):
        block = allocator.allocate(64)  # the inner allocator's own
    (tmp_path / "release.0").touch()
    (tmp_path / "release.1").touch()
    with pytest.raises(DeviceMemoryError, match="release on rank 1"):
        allocator.release(Tag.WEIGHTS)
    assert inner.device.used == 64
    assert allocator.release(Tag.WEIGHTS) == 64

    (tmp_path / "reserve.1").touch()
    with pytest.raises(DeviceMemoryError):
        allocator.reserve(Tag.WEIGHTS)
    assert inner.device.used == 0
    allocator.reserve(Tag.WEIGHTS).commit()
    assert allocator.blocks(Tag.WEIGHTS) == [block]
    assert [path.name for path in tmp_path.iterdir()] == ["release.0"]
