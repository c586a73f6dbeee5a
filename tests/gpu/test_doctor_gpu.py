"""The checks of the doctor that need a GPU are ok on one, each in its own process."""

from __future__ import annotations

import pytest

from rl_memory_plugins.doctor import runner
from rl_memory_plugins.doctor.finding import Status
from rl_memory_plugins.doctor.table import LOCAL

NAMES = ("driver", "gpu-allocator", "cuda-ipc", "visible-devices", "locked-memory")


@pytest.mark.parametrize("check", [check for check in LOCAL if check.name in NAMES], ids=lambda check: check.name)
def test_a_check_that_needs_a_gpu_is_ok(check) -> None:
    found = runner.run_one(check)
    assert found.status is Status.OK, found


def test_a_gpu_that_does_not_exist_is_a_failure(monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "99")
    for name in NAMES[:4]:
        [check] = [check for check in LOCAL if check.name == name]
        found = runner.run_one(check)
        assert found.status is Status.FAILURE, found
