from __future__ import annotations

from pathlib import Path

import pytest

from rl_memory_plugins.memory import host_memory
from rl_memory_plugins.memory.host_memory import free_host_bytes, host_memory_info

MiB = 1 << 20


def cgroup(directory: Path, limit: str, usage: int, inactive: int, active: int = 0, high: str = "max") -> None:
    directory.mkdir(parents=True)
    (directory / "memory.max").write_text(f"{limit}\n")
    (directory / "memory.high").write_text(f"{high}\n")
    (directory / "memory.current").write_text(f"{usage}\n")
    (directory / "memory.stat").write_text(f"anon 1\ninactive_file {inactive}\nactive_file {active}\n")


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
