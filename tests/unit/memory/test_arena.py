from __future__ import annotations

import ctypes
import mmap
import resource
from pathlib import Path

import pytest

from rl_memory_plugins.errors import HostMemoryError
from rl_memory_plugins.memory import arena as arena_module
from rl_memory_plugins.memory.arena import PagedArena
from rl_memory_plugins.memory.host_memory import PAGE_BYTES

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
