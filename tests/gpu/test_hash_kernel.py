"""The compiled kernel that tells whether GPU memory has changed; its rules are tested in tests/unit."""

from __future__ import annotations

import pytest
import torch

from rl_memory_plugins.memory import hash_kernel
from rl_memory_plugins.memory.allocator import Block
from rl_memory_plugins.memory.cuda_device import CudaDevice

GiB = 1 << 30


@pytest.fixture(scope="module")
def device() -> CudaDevice:
    return CudaDevice(0)


@pytest.fixture(scope="module")
def memory() -> torch.Tensor:
    return torch.randint(0, 256, (5 * GiB + 13,), dtype=torch.uint8, device="cuda:0")


def test_it_is_what_a_gpu_uses(device, memory):
    assert hash_kernel.usable(torch.device("cuda", 0))
    before = torch.cuda.memory_allocated(0)
    torch.cuda.reset_peak_memory_stats(0)
    device.fingerprint([Block(memory.data_ptr(), memory.numel())])
    assert torch.cuda.max_memory_allocated(0) - before < 1 << 20  # and no copy of anything


@pytest.mark.parametrize("shift", [0, 1, 4, 7])
def test_any_bit_of_any_byte_counts(device, memory, shift):
    ranges = [Block(memory.data_ptr() + shift, 3 * GiB + 5), Block(memory.data_ptr() + 4 * GiB + shift, GiB)]
    before = device.fingerprint(ranges)
    for at in (0, 1, 7, 8, (1 << 20) - 1, 1 << 20, 2 * GiB + 12345, 3 * GiB - 1, 3 * GiB + 4, 4 * GiB, 5 * GiB - 1):
        memory[at + shift] ^= 0x10
        assert device.fingerprint(ranges) != before, at
        memory[at + shift] ^= 0x10
    for outside in [3 * GiB + 5 + shift, 4 * GiB - 1 + shift, 5 * GiB + shift]:
        memory[outside] ^= 0x10
    assert device.fingerprint(ranges) == before


def test_it_does_not_wait_for_copies_that_are_under_way(device, memory):
    ranges = [Block(memory.data_ptr(), GiB)]
    device.fingerprint(ranges)  # compiled, and its memory there
    host = torch.empty(memory.numel(), dtype=torch.uint8, pin_memory=True)
    stream = torch.cuda.Stream(0)
    with torch.cuda.stream(stream):
        for _ in range(8):  # most of a second
            host.copy_(memory, non_blocking=True)
        copied = stream.record_event()
    device.fingerprint(ranges)
    assert not copied.query()
    copied.synchronize()
