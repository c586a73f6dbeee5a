"""The amount of host memory, as limited by the machine and by the memory cgroups of the process; the C library."""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

#: The C library. Its calls release the GIL.
libc = ctypes.CDLL(None, use_errno=True)
libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

MADV_POPULATE_WRITE = 23  # Linux 5.14
PAGE_BYTES = 4096


def whole_pages(nbytes: int) -> int:
    """The bytes of the pages that hold so many, at least one page."""
    return max(-(-nbytes // PAGE_BYTES), 1) * PAGE_BYTES


def free_host_bytes() -> int:
    """Bytes of host memory that this process can still allocate, within the machine and its cgroups."""
    return host_memory_info()[0]


def host_memory_info() -> tuple[int, int]:
    """Free and total bytes of host memory. Each is the minimum over the machine and the cgroups of this process."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free, total = (int(lines[name].split()[0]) << 10 for name in ("MemAvailable", "MemTotal"))
    for directory, files in _memory_cgroups():
        try:
            usage = int((directory / files.usage).read_text())
            statistics = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # no such file
            continue
        # Cached pages of files, such as a checkpoint, count as usage, but the kernel drops them when memory runs short.
        cached = sum(int(statistics.get(key, 0)) for key in files.cached)
        for name in files.limits:
            try:
                limit = int((directory / name).read_text())
            except (OSError, ValueError):  # no such file, or "max", which means no limit
                continue
            free = min(free, limit - usage + cached)
            total = min(total, limit)
    return max(free, 0), total


def refusal_of(error: OSError) -> str:
    """Why the kernel has refused a mapping. With `ulimit -v` it does so while memory is free."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return str(error)
    return f"{error}; this process may have {limit} bytes of addresses (`ulimit -v`, RLIMIT_AS)"


class _Files(NamedTuple):
    """The files of a memory cgroup that hold its limits and its usage, and the statistics of its cached files."""

    limits: tuple[str, ...]
    usage: str
    cached: tuple[str, ...]


#: `memory.high` counts as a limit: a process above it is throttled so much that it seems to hang.
_CGROUP_V2 = _Files(("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file"))
_CGROUP_V1 = _Files(("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))


def _memory_cgroups() -> Iterator[tuple[Path, _Files]]:
    """The directories of this process's memory cgroup and of its parents, with the names of their files.

    In a container `/proc/self/cgroup` may show a path of the host that does not exist inside. Then only the root of the
    mount exists, which is the container's own cgroup.
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
