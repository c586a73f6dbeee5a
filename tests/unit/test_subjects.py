"""The processes of a benchmark's subject."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from integration.subjects import run_bounded
from integration.waiting import wait_until

SERVER = "import time; time.sleep(600)"
SUBJECT = """
import subprocess, sys, time
server = subprocess.Popen([sys.executable, "-c", {server!r}], process_group=0)
open({file!r}, "w").write(str(server.pid))
time.sleep(600)
"""


def test_a_subject_that_takes_too_long_ends_with_its_server(tmp_path: Path) -> None:
    """A server has a process group of its own. If it stayed, its memory would be missing in the next subject."""
    file = tmp_path / "pid"
    subject = SUBJECT.format(server=SERVER, file=str(file))
    with pytest.raises(subprocess.TimeoutExpired):
        run_bounded([sys.executable, "-c", subject], 12)
    server = int(file.read_text())
    wait_until(lambda: not runs(server), "the server has ended")


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
