"""The self-tests of the allocators."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from rl_memory_plugins.doctor.checks import allocators
from rl_memory_plugins.doctor.finding import Status
from rl_memory_plugins.errors import UnsupportedError

OK, FAILURE = Status.OK, Status.FAILURE
needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")


@needs_torch
def test_the_allocator_of_cpus_passes_its_self_test():
    assert allocators.host().status is OK


@needs_torch
@pytest.mark.parametrize("fault", ["release", "commit"])
def test_an_allocator_that_does_not_work_is_a_failure(monkeypatch, fault):
    from rl_memory_plugins.memory.host import HostAllocator, HostReservation

    if fault == "release":
        monkeypatch.setattr(HostAllocator, "release", lambda self, tag: 0)
    else:

        def commit(self):
            raise UnsupportedError("the driver refuses")

        monkeypatch.setattr(HostReservation, "commit", commit)
    found = allocators.host()
    assert found.status is FAILURE
    assert {"release": "0 of", "commit": "the driver refuses"}[fault] in found.seen


@needs_torch
def test_torch_that_ignores_the_allocators_of_pools_is_a_failure(monkeypatch):
    import torch

    from rl_memory_plugins.memory import select

    def choose(config, device, rank):
        raise UnsupportedError("torch 2.13.0 does not allocate through custom pools here")

    monkeypatch.setattr(select, "choose_allocator", choose)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    found = allocators.gpus()
    assert found.status is FAILURE and "custom pools" in found.seen
