from __future__ import annotations

import ctypes
import errno
import mmap
import resource
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from rl_memory_plugins.errors import HostMemoryError
from rl_memory_plugins.memory import arena as arena_module
from rl_memory_plugins.memory.arena import PagedArena
from rl_memory_plugins.memory.host import HostAllocator
from rl_memory_plugins.memory.host_memory import PAGE_BYTES
from rl_memory_plugins.memory.manager import MemoryManager
from rl_memory_plugins.memory.preparation import Caller
from rl_memory_plugins.tags import Level

MiB = 1 << 20


def test_buffers_are_reused_by_best_fit():
    arena = PagedArena()
    small, large = arena.acquire(2 * MiB), arena.acquire(4 * MiB)
    assert arena.held_bytes == 6 * MiB
    arena.release(small)
    arena.release(large)
    assert arena.acquire(2 * MiB - 5) == small
    assert arena.acquire(2 * MiB) == large
    assert arena.held_bytes == 6 * MiB


def test_a_large_buffer_does_not_go_to_a_little_that_comes_first():
    """Else the weights, for which it was made, would need another of its size."""
    arena = PagedArena(max_bytes=70 * MiB)
    arena.release(arena.acquire(64 * MiB))
    arena.acquire(MiB)
    arena.acquire(64 * MiB)
    assert arena.held_bytes == 65 * MiB


def test_a_large_buffer_is_better_than_none():
    arena = PagedArena(max_bytes=64 * MiB)
    arena.release(arena.acquire(64 * MiB))
    arena.acquire(MiB)
    assert arena.held_bytes == 64 * MiB


def test_a_limit_of_the_address_space_is_named():
    """`ulimit -v`. The error said that there was too little free memory, and told a larger number."""
    arena, limits = PagedArena(), resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (used + 64 * MiB, limits[1]))
    try:
        with pytest.raises(HostMemoryError, match=r"ulimit -v") as caught:
            arena.acquire(256 * MiB)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert caught.value.details["needed_bytes"] == 256 * MiB
    assert arena.held_bytes == 0
    arena.acquire(256 * MiB)


def test_idle_buffers_make_room_for_a_larger_one():
    arena = PagedArena(max_bytes=4 * MiB)
    arena.release(arena.acquire(3 * MiB))
    address = arena.acquire(4 * MiB)
    assert arena.held_bytes == 4 * MiB
    ctypes.memset(address, 1, 4 * MiB)
    arena.close()
    assert arena.held_bytes == 0


def test_the_bound_is_exact_and_typed():
    arena = PagedArena(max_bytes=MiB, margin_bytes=PAGE_BYTES)
    used = arena.acquire(MiB - PAGE_BYTES)
    with pytest.raises(HostMemoryError) as caught:
        arena.acquire(PAGE_BYTES + 1)
    assert caught.value.details["needed_bytes"] == 2 * PAGE_BYTES
    assert caught.value.details["margin_bytes"] == PAGE_BYTES
    assert f"{PAGE_BYTES} are allowed by host_arena_max_bytes" in caught.value.message
    arena.acquire(PAGE_BYTES)
    arena.release(used)


def test_free_memory_less_the_margin_bounds_it(monkeypatch):
    monkeypatch.setattr(arena_module, "free_host_bytes", lambda: 3 * PAGE_BYTES)
    arena = PagedArena(margin_bytes=2 * PAGE_BYTES)
    with pytest.raises(HostMemoryError):
        arena.acquire(2 * PAGE_BYTES)
    arena.acquire(PAGE_BYTES)


def test_a_refused_mapping_is_a_typed_error(monkeypatch):
    def refuse(*_args, **_kwargs):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(HostMemoryError):
        PagedArena().acquire(MiB)


def test_the_memory_is_the_process_own():
    """Private: a forked child must not write into its parent's backups."""
    arena = PagedArena()
    address = arena.acquire(MiB)
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= address < end:
            assert line.split()[1] == "rw-p"
            break
    else:
        pytest.fail("not mapped")
    arena.close()


def taken_bytes() -> int:
    """Anonymous memory that this process has taken."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


@pytest.fixture
def a_host_with(monkeypatch):
    """A host that has so much free memory now. What this process takes is no longer free, by whatever it takes it."""

    def make(nbytes):
        before = taken_bytes()
        monkeypatch.setattr(arena_module, "free_host_bytes", lambda: nbytes - (taken_bytes() - before))

    return make


def test_two_buffers_do_not_share_the_same_free_memory(a_host_with):
    a_host_with(160 * MiB)
    arena, of_another_rank = PagedArena(), PagedArena()
    arena.acquire(100 * MiB)
    for one in (arena, of_another_rank):
        with pytest.raises(HostMemoryError):
            one.acquire(100 * MiB)
    arena.close()
    of_another_rank.acquire(100 * MiB)
    of_another_rank.close()


def test_a_sleep_whose_tags_do_not_fit_together_changes_nothing(a_host_with):
    """The copies would take the memory, and the kernel would kill the process."""
    allocator, tensors = HostAllocator(), {}
    for tag in ("a", "b"):
        with allocator.region(tag):
            tensors[tag] = torch.full((40 * MiB,), ord(tag), dtype=torch.uint8)
    manager = MemoryManager(0, allocator, PagedArena(), lambda tag: [], tags=("a", "b"), preserves=lambda *_: True)
    a_host_with(64 * MiB)
    with pytest.raises(HostMemoryError):
        manager.prepare_sleep(Level.PRESERVE, ("a", "b"))
    assert all(manager.is_resident(tag) for tag in tensors)
    assert all(tensor[0] == tensor[-1] == ord(tag) for tag, tensor in tensors.items())
    manager.prepare_sleep(Level.PRESERVE, ("b",))  # the first copy's memory is idle
    manager.abort_sleep()
    manager.arena.close()


def test_the_free_memory_is_read_and_taken_in_one_turn(monkeypatch):
    """Else ranks of one host count the same memory."""
    steps, populate = [], arena_module.populate

    @contextmanager
    def turn(name, timeout_s):
        steps.append(f"{name} begins")
        yield
        steps.append("ends")

    monkeypatch.setattr(arena_module, "one_at_a_time", turn)
    monkeypatch.setattr(arena_module, "free_host_bytes", lambda: steps.append("free") or 1 << 40)
    monkeypatch.setattr(arena_module, "populate", lambda *part: steps.append("taken") or populate(*part))
    arena = PagedArena()
    arena.acquire(64 * MiB)
    assert steps == ["host-memory begins", "free", "taken", "ends"]
    arena.close()


def test_what_nobody_waits_for_yet_stops_where_others_have_taken_the_memory(monkeypatch):
    monkeypatch.setattr(arena_module, "STEP_BYTES", 16 * MiB)
    free = iter([100 * MiB, 100 * MiB, 10 * MiB])
    monkeypatch.setattr(arena_module, "free_host_bytes", lambda: next(free))
    arena = PagedArena()
    with pytest.raises(HostMemoryError) as caught:
        arena.acquire(64 * MiB, Caller(awaited=lambda: False))
    assert caught.value.details["needed_bytes"] == 48 * MiB
    assert arena.held_bytes == 0


def test_pages_that_the_kernel_refuses_are_a_typed_error(monkeypatch):
    monkeypatch.setattr(arena_module, "populate", lambda *part: errno.ENOMEM)
    arena = PagedArena()
    with pytest.raises(HostMemoryError, match="Cannot allocate memory"):
        arena.acquire(MiB)
    assert arena.held_bytes == 0


def test_an_old_kernel_makes_pages_too(monkeypatch):
    monkeypatch.setattr(arena_module, "populate", lambda *part: errno.EINVAL)
    before, arena = taken_bytes(), PagedArena()
    arena.acquire(100 * MiB)
    assert taken_bytes() - before > 90 * MiB
    arena.close()
