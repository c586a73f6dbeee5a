"""How the memory that stays on a GPU is split by cause. `tests/gpu/test_residual.py` checks the numbers on a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from helpers import FakeRank

from rl_memory_plugins.memory import residual
from rl_memory_plugins.memory.segments import DEFAULT_POOL, Segment
from rl_memory_plugins.tags import PUBLIC_TAGS, Level, Tag

CACHED = 5  # in no tensor's use: it does not stay
OURS, GRAPHS = (0, 7), (0, 9)
BY_POOL = {
    OURS: [Segment(0, 1000, 1000)],
    GRAPHS: [Segment(1000, 30, 30)],
    DEFAULT_POOL: [Segment(2000, 200, 1), Segment(3000, CACHED, 0)],
}


class Gpu:
    """The driver's and torch's accounts."""

    used: int | None = 0
    reserved = 0


@pytest.fixture
def gpu(monkeypatch):
    gpu = Gpu()
    monkeypatch.setattr(residual, "_grown", {})
    monkeypatch.setattr(residual, "process_bytes", lambda index: gpu.used)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: gpu.reserved)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return gpu


def test_every_byte_has_a_cause(gpu):
    gpu.used = 400
    with residual.attributed("nccl"):
        gpu.used = 450
        gpu.reserved = 10  # torch's own
    gpu.used = 500
    account = residual.ResidualMemory(0)
    gpu.used = 2000
    causes = account(BY_POOL, {OURS}, resident_bytes=600)
    assert causes == {"context": 450, "nccl": 40, "workspace": 200, "graphs": 30, "other": 675}
    assert sum(causes.values()) + 600 + CACHED == 2000


@pytest.mark.parametrize("freed", [30, 40])
def test_communicators_that_are_suspended_have_given_memory_back(gpu, freed):
    gpu.used = 60
    with residual.attributed("nccl"):
        gpu.used = 100
    account = residual.ResidualMemory(0)
    gpu.used = 150  # 50 of an unknown cause
    gpu.reserved = 500  # of regions that sleep
    with residual.moved("nccl"):
        gpu.used -= freed
        gpu.used -= 7  # of torch's cache, which is emptied in the background
        gpu.reserved -= 7
    gpu.used += 7
    left = {"nccl": 40 - freed} if freed < 40 else {}
    assert account({}, set(), 0) == {"context": 60, "other": 50, **left}
    with residual.moved("nccl"):
        gpu.used += freed
    assert account({}, set(), 0) == {"context": 60, "nccl": 40, "other": 50}


def test_a_suspension_that_fails_is_measured_too(gpu):
    with pytest.raises(RuntimeError), residual.moved("nccl"):
        gpu.used = 20
        raise RuntimeError("one of two communicators is resumed")
    account = residual.ResidualMemory(0)
    assert account({}, set(), 0) == {"nccl": 20}


def test_torchs_communicators_count_from_their_first_call_on(gpu, monkeypatch):
    gpu.used = 60
    account = residual.ResidualMemory(0)
    gpu.used = 400
    monkeypatch.setattr(residual, "bytes_of_groups", lambda index: 300 if index == 0 else 0)
    assert account({}, set(), 0) == {"context": 60, "nccl": 300, "other": 40}
    with residual.moved("nccl"):
        gpu.used -= 280
    assert account({}, set(), 0) == {"context": 60, "nccl": 20, "other": 40}


def test_communicators_of_the_engine_may_grow(gpu, monkeypatch):
    gpu.used = 60
    with residual.attributed("nccl"):
        gpu.used = 100
    account = residual.ResidualMemory(0)
    gpu.used = 400
    monkeypatch.setattr(residual, "growth_of_own", lambda index: 250 if index == 0 else 0)
    assert account({}, set(), 0) == {"context": 60, "nccl": 290, "other": 50}


def test_no_cause_gets_more_than_the_driver_counts(gpu, monkeypatch):
    """NCCL counts memory that two communicators share for both."""
    gpu.used = 60
    account = residual.ResidualMemory(0)
    gpu.used = 100
    monkeypatch.setattr(residual, "bytes_of_groups", lambda index: 70)
    assert account({}, set(), 0) == {"context": 60, "nccl": 40}


def test_without_the_drivers_account_only_torchs_causes_are_known(gpu):
    gpu.used = None
    with residual.attributed("nccl"):
        pass
    assert residual.ResidualMemory(0)(BY_POOL, {OURS}, resident_bytes=600) == {"workspace": 200, "graphs": 30}


def test_causes_of_another_gpu_do_not_count(gpu):
    with residual.attributed("nccl"):
        gpu.used = 50
    assert residual.ResidualMemory(1)({}, set(), 0) == {"context": 50}


@pytest.mark.parametrize(
    "processes, expected",
    [({41: 7}, 7), ({41: 7, 42: 8}, 8), ({40: 7, 41: 8}, None), ({}, None), ({42: None}, None)],
)
def test_this_process_is_found_by_its_number_or_for_being_alone(monkeypatch, processes, expected):
    running = [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in processes.items()]
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetComputeRunningProcesses=lambda handle: running,
    )
    monkeypatch.setattr(residual.importlib, "import_module", lambda name: nvml)
    monkeypatch.setattr(residual, "gpu_name", lambda index: "GPU-0")
    monkeypatch.setattr(residual.os, "getpid", lambda: 42)
    assert residual.process_bytes(0) == expected


def test_a_machine_without_nvml_has_no_account(monkeypatch):
    def absent(name):
        raise ImportError(name)

    monkeypatch.setattr(residual.importlib, "import_module", absent)
    assert residual.process_bytes(0) is None


def test_it_is_accounted_for_once_while_something_sleeps(monkeypatch):
    rank = FakeRank()
    monkeypatch.setattr(rank.allocator, "residual_memory", lambda: {"context": 5})
    assert rank.manager.account().left == {}
    rank.manager.prepare_sleep(Level.PRESERVE, PUBLIC_TAGS)
    rank.manager.commit_sleep()
    assert rank.manager.status().left == {}  # a status takes no time
    assert rank.manager.account().left == {"context": 5}
    monkeypatch.setattr(rank.allocator, "residual_memory", lambda: pytest.fail("asked for again, which is slow"))
    assert rank.manager.account().left == rank.manager.status().left == {"context": 5}
    rank.manager.prepare_wake([Tag.WEIGHTS])
    rank.manager.commit_wake()
    assert rank.manager.account().left == {"context": 5}
    rank.manager.prepare_wake(PUBLIC_TAGS)
    rank.manager.commit_wake()
    assert rank.manager.account().left == rank.manager.status().left == {}
