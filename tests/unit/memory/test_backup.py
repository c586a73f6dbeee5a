from __future__ import annotations

import ctypes
import mmap
import resource
from pathlib import Path

import pytest

from rl_memory_plugins.errors import HostMemoryError
from rl_memory_plugins.memory import backup, host_memory
from rl_memory_plugins.memory.allocator import Block
from rl_memory_plugins.memory.backup import Backup, PagedArena
from rl_memory_plugins.memory.host_memory import PAGE_BYTES, free_host_bytes, host_memory_info
from rl_memory_plugins.memory.ranges import subtract

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
    monkeypatch.setattr(backup, "free_host_bytes", lambda: 3 * PAGE_BYTES)
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


def cgroup(directory: Path, limit: str, usage: int, inactive: int, active: int = 0, high: str = "max") -> None:
    directory.mkdir(parents=True)
    (directory / "memory.max").write_text(f"{limit}\n")
    (directory / "memory.high").write_text(f"{high}\n")
    (directory / "memory.current").write_text(f"{usage}\n")
    (directory / "memory.stat").write_text(f"anon 1\ninactive_file {inactive}\nactive_file {active}\n")


@pytest.fixture
def ten_blocks():
    """A backup of ten blocks of 100 bytes, from 1000 on in steps of 200."""
    made = Backup(PagedArena(), [Block(1000 + 200 * number, 100) for number in range(10)])
    yield made
    made.free()


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (Block(1000, 100), [(Block(1000, 100), 0)]),
        (Block(1250, 400), [(Block(1250, 50), 150), (Block(1400, 100), 200), (Block(1600, 50), 300)]),
        (Block(2850, 1000), [(Block(2850, 50), 950)]),
        (Block(0, 1000), []),
        (Block(1100, 100), []),
        (Block(2900, 10), []),
    ],
)
def test_the_copies_of_a_part(ten_blocks, part, expected):
    start = ten_blocks.copies(Block(1000, 1))[0][1]
    assert [(found, address - start) for found, address in ten_blocks.copies(part)] == expected


def test_few_blocks_are_looked_at_for_a_part(ten_blocks, monkeypatch):
    """A trainer asks for every tensor that it sends."""
    looked_at = []

    def note(blocks, holes):
        looked_at.append(len(blocks))
        return subtract(blocks, holes)

    monkeypatch.setattr(backup, "subtract", note)
    assert ten_blocks.copies(Block(5000, 100)) == [] and looked_at == []
    assert ten_blocks.copies(Block(1010, 10)) and set(looked_at) == {1}


def test_the_tightest_cgroup_counts_and_cached_files_do_not(tmp_path, monkeypatch):
    machine = host_memory_info()
    cgroup(tmp_path / "slice", "max", 0, 0)
    cgroup(tmp_path / "slice/job", str(50 * MiB), 40 * MiB, 30 * MiB)
    cgroup(tmp_path / "slice/job/step", str(60 * MiB), 10 * MiB, 0)
    directories = [tmp_path / "slice/job/step", tmp_path / "slice/job", tmp_path / "slice", tmp_path / "absent"]
    cgroups = [(path, host_memory._CGROUP_V2) for path in directories]
    monkeypatch.setattr(host_memory, "_memory_cgroups", lambda: cgroups)
    assert host_memory_info() == (40 * MiB, 50 * MiB)
    assert free_host_bytes() == 40 * MiB
    assert machine[0] > 40 * MiB


def test_a_checkpoint_that_was_read_twice_does_not_count_either(tmp_path, monkeypatch):
    cgroup(tmp_path / "job", str(50 * MiB), 45 * MiB, 5 * MiB, active=30 * MiB)
    monkeypatch.setattr(host_memory, "_memory_cgroups", lambda: [(tmp_path / "job", host_memory._CGROUP_V2)])
    assert host_memory_info() == (40 * MiB, 50 * MiB)


@pytest.mark.parametrize("limit", ["max", str(60 * MiB)])
def test_where_the_kernel_begins_to_slow_a_process_down_is_a_limit(tmp_path, monkeypatch, limit):
    cgroup(tmp_path / "job", limit, 45 * MiB, 0, high=str(50 * MiB))
    monkeypatch.setattr(host_memory, "_memory_cgroups", lambda: [(tmp_path / "job", host_memory._CGROUP_V2)])
    assert host_memory_info() == (5 * MiB, 50 * MiB)


def test_the_cgroups_of_this_process_start_with_its_own():
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    directories = [path for path, _ in host_memory._memory_cgroups()]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            assert Path(f"/sys/fs/cgroup/{path}") in directories
            assert Path("/sys/fs/cgroup") in directories
