"""One suite that every allocator passes. A harness per allocator says how to make, read and free memory."""

from __future__ import annotations

import gc
import mmap
from pathlib import Path

import pytest
import torch

from rl_memory_plugins.errors import DeviceMemoryError
from rl_memory_plugins.memory.allocator import Allocator, Block, Device
from rl_memory_plugins.memory.arena import PagedArena
from rl_memory_plugins.memory.backup import Backup
from rl_memory_plugins.memory.fake import FakeAllocator, FakeDevice
from rl_memory_plugins.memory.host import HostAllocator
from rl_memory_plugins.memory.manager import MemoryManager
from rl_memory_plugins.tags import Level, Tag

MiB = 1 << 20


class FakeHarness:
    nbytes = 4 * MiB

    def __init__(self) -> None:
        self.allocator = FakeAllocator(FakeDevice(capacity=64 * MiB))

    def make(self, nbytes: int, byte: int) -> Block:
        block = self.allocator.allocate(nbytes)
        self.allocator.write(block, bytes([byte]) * nbytes)
        return block

    def address(self, handle: Block) -> int:
        return handle.address

    def read(self, handle: Block) -> bytes:
        return self.allocator.read(handle)

    def free(self, handle: Block) -> None:
        self.allocator.free(handle)

    def physical_bytes(self) -> int:
        return self.allocator.device.used

    def starve(self) -> None:
        """Make the next `reserve` fail for want of memory."""
        self._capacity, self.allocator.device.capacity = self.allocator.device.capacity, 0

    def feed(self) -> None:
        self.allocator.device.capacity = self._capacity


class HostHarness:
    nbytes = 64 * MiB

    def __init__(self) -> None:
        self.allocator = HostAllocator()
        self._tensors: dict[int, torch.Tensor] = {}

    def make(self, nbytes: int, byte: int) -> int:
        handle = len(self._tensors)
        self._tensors[handle] = torch.full((nbytes,), byte, dtype=torch.uint8)
        return handle

    def address(self, handle: int) -> int:
        return self._tensors[handle].data_ptr()

    def read(self, handle: int) -> bytes:
        return self._tensors[handle].numpy().tobytes()

    def free(self, handle: int) -> None:
        self._tensors[handle] = torch.empty(0)
        gc.collect()

    def physical_bytes(self) -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    def starve(self) -> None:
        self.allocator._margin_bytes = 1 << 60

    def feed(self) -> None:
        self.allocator._margin_bytes = 0


HARNESSES = {"fake": FakeHarness, "host": HostHarness}


@pytest.fixture(params=list(HARNESSES))
def memory(request):
    return HARNESSES[request.param]()


def make(memory, tag: Tag, byte: int, nbytes: int | None = None):
    with memory.allocator.region(tag):
        return memory.make(nbytes or memory.nbytes, byte)


def total(blocks: list[Block]) -> int:
    return sum(block.nbytes for block in blocks)


def sleep(memory, tag: Tag) -> int:
    memory.allocator.device.synchronize()
    return memory.allocator.release(tag)


def wake(memory, tag: Tag) -> None:
    memory.allocator.reserve(tag).commit()


def test_implements_the_protocols(memory):
    allocator: Allocator = memory.allocator
    assert isinstance(allocator.device, Device)
    assert allocator.name
    free, capacity = allocator.device.memory_info()
    assert 0 < free <= capacity


def test_blocks_account_for_what_was_made(memory):
    handles = [make(memory, Tag.WEIGHTS, 1), make(memory, Tag.WEIGHTS, 2)]
    blocks = memory.allocator.blocks(Tag.WEIGHTS)
    assert blocks == sorted(blocks)
    assert 0.95 * 2 * memory.nbytes <= total(blocks) <= 1.05 * 2 * memory.nbytes + 8 * MiB
    for handle in handles:
        middle = memory.address(handle) + memory.nbytes // 2
        assert any(block.address <= middle < block.end for block in blocks)
    assert memory.allocator.blocks(Tag.KV_CACHE) == []


def test_release_frees_physical_memory_and_keeps_addresses(memory):
    handle = make(memory, Tag.WEIGHTS, 7)
    address, blocks = memory.address(handle), memory.allocator.blocks(Tag.WEIGHTS)
    before = memory.physical_bytes()
    released = sleep(memory, Tag.WEIGHTS)
    freed = before - memory.physical_bytes()
    assert released == total(blocks)
    assert freed >= 0.95 * memory.nbytes
    assert memory.address(handle) == address
    assert memory.allocator.blocks(Tag.WEIGHTS) == blocks

    wake(memory, Tag.WEIGHTS)
    assert before - memory.physical_bytes() <= 0.05 * memory.nbytes
    assert memory.address(handle) == address
    assert memory.allocator.blocks(Tag.WEIGHTS) == blocks


def test_a_wake_without_poison_zeroes_what_the_engine_reads_first(memory):
    """`maps_zeroed` decides whether the manager fills the memory: a false claim shows here."""
    handle = make(memory, Tag.KV_CACHE, 7)
    manager = MemoryManager(0, memory.allocator, PagedArena(), memory.allocator.blocks, zero_on_wake=(Tag.KV_CACHE,))
    for _ in range(2):
        assert 7 in memory.read(handle)
        manager.prepare_sleep(Level.DISCARD, [Tag.KV_CACHE])
        manager.commit_sleep()
        manager.prepare_wake([Tag.KV_CACHE])
        manager.commit_wake()
        inside = memory.read(handle)[mmap.PAGESIZE : -mmap.PAGESIZE]  # the first and last page may be others' too
        assert inside == bytes(len(inside))
        for block in memory.allocator.blocks(Tag.KV_CACHE):
            memory.allocator.device.fill([block], 7)


def test_content_survives_by_a_backup_and_not_without(memory):
    handle, neighbour = make(memory, Tag.WEIGHTS, 7), make(memory, Tag.KV_CACHE, 9)
    content, other = memory.read(handle), memory.read(neighbour)
    device, arena = memory.allocator.device, PagedArena()
    blocks = memory.allocator.blocks(Tag.WEIGHTS)
    backup = Backup(arena, blocks, identified=blocks)
    backup.begin_save(device, epoch=0)
    backup.finish()

    sleep(memory, Tag.WEIGHTS)
    wake(memory, Tag.WEIGHTS)
    assert not backup.is_clean(device, backup.blocks, epoch=0)
    assert memory.read(handle) != content

    backup.begin_restore(device, blocks)
    backup.finish()
    assert memory.read(handle) == content
    assert backup.is_clean(device, backup.blocks, epoch=0)
    assert memory.read(neighbour) == other
    arena.close()


def test_release_and_reserve_are_idempotent(memory):
    handle = make(memory, Tag.WEIGHTS, 7)
    assert sleep(memory, Tag.WEIGHTS) > 0
    assert sleep(memory, Tag.WEIGHTS) == 0
    wake(memory, Tag.WEIGHTS)
    memory.allocator.device.fill(memory.allocator.blocks(Tag.WEIGHTS), 5)
    content = memory.read(handle)
    again = memory.allocator.reserve(Tag.WEIGHTS)
    assert (again.nbytes, again.blocks) == (0, [])
    again.commit()
    assert memory.read(handle) == content


def test_a_tag_without_blocks(memory):
    assert sleep(memory, Tag.CUDA_GRAPH) == 0
    reservation = memory.allocator.reserve(Tag.CUDA_GRAPH)
    assert reservation.nbytes == 0
    reservation.commit()


def test_reserve_takes_physical_memory_and_drop_gives_it_back(memory):
    make(memory, Tag.WEIGHTS, 7)
    blocks = memory.allocator.blocks(Tag.WEIGHTS)
    sleep(memory, Tag.WEIGHTS)
    released = memory.physical_bytes()
    reservation = memory.allocator.reserve(Tag.WEIGHTS)
    assert reservation.nbytes == total(blocks)
    assert reservation.blocks == blocks
    assert memory.physical_bytes() - released >= 0.95 * memory.nbytes
    reservation.drop()
    assert abs(memory.physical_bytes() - released) <= 0.05 * memory.nbytes
    wake(memory, Tag.WEIGHTS)
    assert memory.physical_bytes() - released >= 0.95 * memory.nbytes


def test_a_failing_reserve_changes_nothing_and_a_retry_works(memory):
    handle = make(memory, Tag.WEIGHTS, 7)
    address, blocks = memory.address(handle), memory.allocator.blocks(Tag.WEIGHTS)
    sleep(memory, Tag.WEIGHTS)
    released = memory.physical_bytes()
    memory.starve()
    with pytest.raises(DeviceMemoryError) as caught:
        memory.allocator.reserve(Tag.WEIGHTS)
    assert caught.value.details["needed_bytes"] == total(blocks)
    assert {"free_bytes", "margin_bytes"} <= caught.value.details.keys()
    assert abs(memory.physical_bytes() - released) <= 0.05 * memory.nbytes
    assert memory.allocator.blocks(Tag.WEIGHTS) == blocks

    memory.feed()
    wake(memory, Tag.WEIGHTS)
    assert memory.address(handle) == address
    memory.allocator.device.fill(blocks, 3)
    assert memory.read(handle)[memory.nbytes // 2] == 3


def test_a_block_freed_while_released_disappears(memory):
    doomed, kept = make(memory, Tag.WEIGHTS, 1), make(memory, Tag.WEIGHTS, 2)
    address = memory.address(kept)
    both = total(memory.allocator.blocks(Tag.WEIGHTS))
    sleep(memory, Tag.WEIGHTS)
    memory.free(doomed)
    reservation = memory.allocator.reserve(Tag.WEIGHTS)
    assert reservation.nbytes <= both - 0.95 * memory.nbytes
    reservation.commit()
    assert memory.address(kept) == address
    assert total(memory.allocator.blocks(Tag.WEIGHTS)) == reservation.nbytes


def test_a_block_freed_while_reserved_is_safe(memory):
    doomed = make(memory, Tag.WEIGHTS, 1)
    before = memory.physical_bytes()
    sleep(memory, Tag.WEIGHTS)
    reservation = memory.allocator.reserve(Tag.WEIGHTS)
    memory.free(doomed)
    reservation.commit()
    assert memory.allocator.blocks(Tag.WEIGHTS) == []
    assert before - memory.physical_bytes() >= 0.95 * memory.nbytes


def test_what_is_allocated_while_the_tag_is_released_stays_and_joins_the_next_release(memory):
    make(memory, Tag.WEIGHTS, 1)
    sleep(memory, Tag.WEIGHTS)
    late = make(memory, Tag.WEIGHTS, 2)
    content = memory.read(late)
    reservation = memory.allocator.reserve(Tag.WEIGHTS)
    middle = memory.address(late) + memory.nbytes // 2
    assert not any(block.address <= middle < block.end for block in reservation.blocks)
    reservation.commit()
    assert memory.read(late) == content
    assert sleep(memory, Tag.WEIGHTS) >= 0.95 * 2 * memory.nbytes


def test_regions_nest_and_the_inner_one_wins(memory):
    with memory.allocator.region(Tag.WEIGHTS):
        outer = memory.make(memory.nbytes, 1)
        with memory.allocator.region(Tag.KV_CACHE):
            inner = memory.make(memory.nbytes, 2)
        after = memory.make(memory.nbytes, 3)
    expected = {Tag.WEIGHTS: [outer, after], Tag.KV_CACHE: [inner]}
    for tag, handles in expected.items():
        blocks = memory.allocator.blocks(tag)
        assert 0.95 * len(handles) <= total(blocks) / memory.nbytes <= 1.05 * len(handles) + 0.1
        for handle in handles:
            middle = memory.address(handle) + memory.nbytes // 2
            assert any(block.address <= middle < block.end for block in blocks)


def test_a_region_ends_when_its_body_raises(memory):
    with pytest.raises(ValueError), memory.allocator.region(Tag.WEIGHTS):
        raise ValueError
    make(memory, Tag.KV_CACHE, 1)
    assert memory.allocator.blocks(Tag.WEIGHTS) == []


def test_tags_are_released_independently(memory):
    make(memory, Tag.WEIGHTS, 1)
    cache = make(memory, Tag.KV_CACHE, 2)
    content = memory.read(cache)
    sleep(memory, Tag.WEIGHTS)
    assert memory.read(cache) == content
    sleep(memory, Tag.KV_CACHE)
    wake(memory, Tag.KV_CACHE)
    assert sleep(memory, Tag.WEIGHTS) == 0
    assert sleep(memory, Tag.KV_CACHE) > 0


def test_a_tag_may_have_any_name(memory):
    mine, weights = make(memory, "mine", 1), make(memory, Tag.WEIGHTS, 2)
    content = memory.read(weights)
    assert sleep(memory, "mine") >= 0.95 * memory.nbytes
    assert memory.read(weights) == content
    middle = memory.address(mine) + memory.nbytes // 2
    wake(memory, "mine")
    for ranges in (memory.allocator.blocks("mine"), memory.allocator.extents("mine")):
        assert any(block.address <= middle < block.end for block in ranges)
    assert memory.allocator.blocks("other") == memory.allocator.extents("other") == []


def test_fingerprint_tells_of_every_byte(memory):
    make(memory, Tag.WEIGHTS, 1)
    device, blocks = memory.allocator.device, memory.allocator.blocks(Tag.WEIGHTS)
    before = device.fingerprint(blocks)
    last = Block(blocks[-1].end - 1, 1)
    device.fill([last], 200)
    changed = device.fingerprint(blocks)
    device.fill([last], 1)
    assert 0 <= before < 1 << 64
    assert changed != before
    assert device.fingerprint(blocks) == before


def test_many_cycles_do_not_grow(memory):
    make(memory, Tag.WEIGHTS, 1)
    sleep(memory, Tag.WEIGHTS)
    wake(memory, Tag.WEIGHTS)
    before = memory.physical_bytes()
    for _ in range(20):
        sleep(memory, Tag.WEIGHTS)
        wake(memory, Tag.WEIGHTS)
    assert memory.physical_bytes() - before <= 0.05 * memory.nbytes
