"""Checks that hang, crash or raise are results, and no check ends the doctor."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rl_memory_plugins.doctor import machine, runner
from rl_memory_plugins.doctor.check import Check
from rl_memory_plugins.doctor.finding import Finding, Status, failure, not_applicable, ok, warning, worst


def fine() -> Finding:
    return ok("it is fine", pid=os.getpid())


def raises() -> Finding:
    raise RuntimeError("the reason")


def hangs() -> Finding:
    time.sleep(600)
    return fine()


def crashes() -> Finding:
    print("before the crash", flush=True)
    ctypes.string_at(0)
    return fine()


def leaves_a_child() -> Finding:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    return ok("left one", child=child.pid)


def hangs_with_a_child() -> Finding:
    subprocess.run([sys.executable, "-c", "import time; time.sleep(600)"], check=True)
    return fine()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("own_process", [False, True])
def test_a_finding_gets_the_name_and_the_page_of_its_check(own_process):
    found = runner.run_one(Check("one", fine, "starting", 60, own_process=own_process))
    assert (found.name, found.status, found.seen) == ("one", Status.OK, "it is fine")
    assert found.docs == "docs/troubleshooting.md#starting"
    assert (found.details["pid"] == os.getpid()) is not own_process


@pytest.mark.parametrize("own_process", [False, True])
def test_an_exception_is_a_failure(own_process):
    found = runner.run_one(Check("one", raises, "starting", 60, own_process=own_process))
    assert found.status is Status.FAILURE
    assert "RuntimeError: the reason" in found.seen


@pytest.mark.parametrize("own_process", [False, True])
def test_a_check_that_hangs_is_a_failure(own_process):
    found = runner.run_one(Check("one", hangs, "starting", 2, own_process=own_process))
    assert found.status is Status.FAILURE
    assert "no result after 2 s" in found.seen


def test_a_crash_is_a_failure_that_names_the_signal():
    found = runner.run_one(Check("one", crashes, "starting", 60, own_process=True))
    assert found.status is Status.FAILURE
    assert "SIGSEGV" in found.seen
    assert "before the crash" in found.seen


def test_the_children_of_a_check_end_with_it():
    found = runner.run_one(Check("one", leaves_a_child, "starting", 60, own_process=True))
    deadline = time.monotonic() + 30
    while alive(found.details["child"]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(found.details["child"])


def test_a_check_that_hangs_in_its_child_does_not_hang_the_doctor():
    assert runner.run_one(Check("one", hangs_with_a_child, "starting", 3, own_process=True)).status is Status.FAILURE


def test_a_check_that_needs_a_gpu_is_not_called_without_one(monkeypatch):
    check = Check("one", raises, "starting", needs_gpu=True)
    monkeypatch.setattr(machine, "has_gpu", lambda: False)
    found = runner.run_one(check)
    assert (found.status, found.seen) == (Status.NOT_APPLICABLE, "no GPU")
    monkeypatch.setattr(machine, "has_gpu", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = runner.run_one(check)
    assert (found.status, found.seen) == (Status.NOT_APPLICABLE, "CUDA_VISIBLE_DEVICES hides all GPUs")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert runner.run_one(check).status is Status.FAILURE


def test_the_order_of_the_findings_is_that_of_the_checks():
    checks = [
        Check("a", fine, "starting", 60, own_process=True),
        Check("b", fine, "starting"),
        Check("c", raises, "starting", 60, own_process=True),
        Check("d", fine, "starting"),
    ]
    assert [found.name for found in runner.run(checks)] == ["a", "b", "c", "d"]


def test_of_several_findings_the_worst_counts_and_all_details_stay():
    found = worst([ok("a", one=1), warning("b", "do b", two=2), failure("c", "do c"), failure("d", "do c", three=3)])
    assert (found.status, found.seen, found.remedy) == (Status.FAILURE, "c; d", "do c")
    assert found.details == {"one": 1, "two": 2, "three": 3}
    assert worst([not_applicable("e"), ok("f")]).status is Status.OK
