"""How much host memory there is: the machine's, or what the process's memory cgroups leave of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil


def free_host_bytes() -> int:
    """Host memory this process can still get: the machine's, or its cgroup's where that is less."""
    return host_memory_info()[0]


def host_memory_info() -> tuple[int, int]:
    """Free and total bytes of host memory, each the least of the machine's and its cgroups'."""
    memory = psutil.virtual_memory()
    free, total = int(memory.available), int(memory.total)
    for directory, files in _memory_cgroups():
        try:
            usage = int((directory / files.usage).read_text())
            statistics = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # no such file
            continue
        # Pages of files that were read, such as a checkpoint, count as usage; the kernel drops them at need.
        cached = sum(int(statistics.get(key, 0)) for key in files.cached)
        for name in files.limits:
            try:
                limit = int((directory / name).read_text())
            except (OSError, ValueError):  # no such file, or "max": no limit
                continue
            free = min(free, limit - usage + cached)
            total = min(total, limit)
    return max(free, 0), total


class _Files(NamedTuple):
    """Of a memory cgroup: what its limits and its usage stand in, and what its statistics call cached files."""

    limits: tuple[str, ...]
    usage: str
    cached: tuple[str, ...]


#: Beyond `memory.high` a process goes on, so slowly that it seems to hang.
_CGROUP_V2 = _Files(("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file"))
_CGROUP_V1 = _Files(("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))


def _memory_cgroups() -> Iterator[tuple[Path, _Files]]:
    """The directories of this process's memory cgroup and all its parents, with the names of their files.

    In a container `/proc/self/cgroup` may show the host's path, which does not exist inside: then only the
    root of the mount, which is the container's own cgroup, is left of it.
    """
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = Path("/sys/fs/cgroup"), _CGROUP_V2
        elif "memory" in controllers.split(","):
            root, names = Path("/sys/fs/cgroup/memory"), _CGROUP_V1
        else:
            continue
        own = Path(path.lstrip("/"))
        for part in (own, *own.parents):
            yield root / part, names
