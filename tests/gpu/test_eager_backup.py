"""Copies made in advance on a GPU, beside kernels that use the memory and regions that give it back."""

from __future__ import annotations

import pytest
import torch

from rl_memory_plugins.memory.cuda_vmm import CudaVmmAllocator
from rl_memory_plugins.memory.eager import EagerBackup
from rl_memory_plugins.memory.manager import MemoryManager
from rl_memory_plugins.memory.pinned import PinnedArena
from rl_memory_plugins.tags import Content, Level, Tag

MiB = 1 << 20


@pytest.fixture
def vmm():
    allocator = CudaVmmAllocator(0)
    yield allocator
    allocator.close()


@pytest.fixture
def arena():
    arena = PinnedArena(0, serves=True)
    yield arena
    arena.close()


def layers(vmm, count: int, megabytes: int) -> list[torch.Tensor]:
    with vmm.region(Tag.WEIGHTS):
        return [torch.full((megabytes * MiB,), index, dtype=torch.uint8, device="cuda:0") for index in range(count)]


def is_full_of(tensors: list[torch.Tensor], byte: int) -> bool:
    return all(int(tensor.min()) == int(tensor.max()) == byte for tensor in tensors)


def test_the_sleep_after_an_update_copies_nothing(vmm, arena):
    """While another stream is kept busy, as an engine's is."""
    tensors = layers(vmm, 8, 512)
    manager = MemoryManager(0, vmm, arena, lambda tag: vmm.blocks(tag), poison=True, eager_backup=True)
    manager.warm_up()
    busy, left, right = (
        torch.cuda.Stream(),
        torch.randn(4096, 4096, device="cuda"),
        torch.randn(4096, 4096, device="cuda"),
    )
    for byte in range(1, 7):
        manager.begin_writing()
        for tensor in tensors:
            tensor.fill_(byte)
        torch.cuda.synchronize()
        manager.finish_writing(complete=True)
        with torch.cuda.stream(busy):
            for _ in range(100):
                left = torch.tanh(left @ right)
        manager.prepare_sleep(Level.PRESERVE, [Tag.WEIGHTS])
        (change,) = manager.commit_sleep()
        assert change.bytes_copied == 0
        assert change.bytes_released == 8 * 512 * MiB
        manager.prepare_wake([Tag.WEIGHTS])
        manager.commit_wake()
        assert manager.content is Content.VALID
        assert is_full_of(tensors, byte)
        manager.check_integrity()
    assert arena.held_bytes < 2 * 8 * 512 * MiB


def test_writes_during_the_copy_are_never_lost(vmm, arena):
    tensors = layers(vmm, 8, 256)
    manager = MemoryManager(0, vmm, arena, lambda tag: vmm.blocks(tag), poison=True, eager_backup=True)
    byte = 0
    for moment in range(40):
        byte = byte % 250 + 1
        manager.begin_writing()
        for tensor in tensors:
            tensor.fill_(byte)
        torch.cuda.synchronize()
        manager.finish_writing(complete=True)
        if moment % 2:  # behind its back
            byte += 1
            torch.cuda._sleep(500_000 * moment)  # in the middle of the copy
            for tensor in tensors:
                tensor.fill_(byte)
        manager.prepare_sleep(Level.PRESERVE, [Tag.WEIGHTS])
        manager.commit_sleep()
        manager.prepare_wake([Tag.WEIGHTS])
        manager.commit_wake()
        assert is_full_of(tensors, byte), f"moment {moment}"


def test_a_discarding_sleep_unmaps_nothing_under_a_copy(vmm, arena):
    tensors = layers(vmm, 8, 512)
    manager = MemoryManager(0, vmm, arena, lambda tag: vmm.blocks(tag), eager_backup=True)
    for byte in range(1, 20):
        manager.note_foreign_load(complete=True)
        manager.prepare_sleep(Level.DISCARD, [Tag.WEIGHTS])
        manager.commit_sleep()
        manager.prepare_wake([Tag.WEIGHTS])
        manager.commit_wake()
        for tensor in tensors:
            tensor.fill_(byte)
        torch.cuda.synchronize()  # an illegal access would show here
        assert is_full_of(tensors, byte)


def test_memory_that_its_tensors_leave_stays_while_it_is_copied(vmm, arena):
    """Closing a region gives back what holds no tensor any more: not under a copy."""
    kept = layers(vmm, 4, 256)
    gone = layers(vmm, 4, 256)
    with vmm.region(Tag.WEIGHTS):  # what is unused at its end retires the pool that the others are in
        scratch = torch.empty(64 * MiB, dtype=torch.uint8, device="cuda:0")
        del scratch
    with vmm.held(Tag.WEIGHTS) as blocks:
        del gone
        with vmm.region(Tag.WEIGHTS):
            more = torch.empty(2 * MiB, dtype=torch.uint8, device="cuda:0")
        assert all(vmm._driver.is_mapped(block.address) for block in blocks)
        for block in blocks:
            vmm.device.fingerprint([block])
    for byte in (1, 2):
        eager = EagerBackup(vmm, arena, vmm.blocks(Tag.WEIGHTS), epoch=byte)
        with vmm.region(Tag.WEIGHTS):
            scratch = torch.empty(512 * MiB, dtype=torch.uint8, device="cuda:0")
            del scratch
        backup = eager.finish()
        torch.cuda.synchronize()
        assert backup is not None
        backup.free()
    assert is_full_of([kept[3]], 3)
    assert more.numel()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_threads_of_one_gpu_take_nothing_on_another():
    """A new thread's current device is GPU 0: page-locking or copying there makes a context of half a gigabyte."""
    from processes import run

    output = run(
        """
        import pynvml, torch
        torch.cuda.set_device(1)
        torch.zeros(1, device="cuda:1")
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        before = pynvml.nvmlDeviceGetMemoryInfo(handle).used
        from rl_memory_plugins.memory.pinned import PinnedArena
        from rl_memory_plugins.memory.cuda_vmm import CudaVmmAllocator
        from rl_memory_plugins.memory.eager import EagerBackup
        from rl_memory_plugins.tags import Tag
        arena, vmm = PinnedArena(1), CudaVmmAllocator(1)
        arena.prepare([64 << 20]).join()
        with vmm.region(Tag.WEIGHTS):
            tensor = torch.ones(64 << 20, dtype=torch.uint8, device="cuda:1")
        vmm.device.synchronize()
        assert EagerBackup(vmm, arena, vmm.blocks(Tag.WEIGHTS), epoch=1).finish() is not None
        print(pynvml.nvmlDeviceGetMemoryInfo(handle).used - before)
        arena.close()
        """
    )
    assert int(output) < 32 * MiB
