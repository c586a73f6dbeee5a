"""Limits of memory."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from rl_memory_plugins.doctor.checks import limits
from rl_memory_plugins.doctor.finding import Status

OK, WARNING = Status.OK, Status.WARNING


@pytest.mark.parametrize("free, status", [(1 << 30, OK), (100 << 20, WARNING)])
def test_the_limit_of_a_cgroup(monkeypatch, free, status):
    monkeypatch.setattr(limits, "host_memory_info", lambda: (free, 2 << 30))
    found = limits.host_memory()
    assert found.status is status
    assert found.details["limited_by_cgroup"] and "a memory cgroup allows 2.0 GiB" in found.seen


LOCKED = """
import sys
from pathlib import Path
from rl_memory_plugins.doctor.checks import limits
limits.DEV = Path(sys.argv[1])
limits.why_no_gpu = lambda: "no GPU"
print(limits.locked_memory().status.value)
"""


@pytest.mark.parametrize("rdma, expected", [(True, "warning"), (False, "not_applicable")])
def test_a_real_limit_of_locked_memory(tmp_path, rdma, expected):
    if rdma:
        (tmp_path / "infiniband").mkdir()
        (tmp_path / "infiniband/uverbs0").touch()

    def limit():
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]))

    done = subprocess.run(
        [sys.executable, "-c", LOCKED, str(tmp_path)], capture_output=True, text=True, preexec_fn=limit, check=True
    )
    assert done.stdout.strip() == expected
