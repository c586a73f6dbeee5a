"""Checks that need a GPU, where there is none."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from rl_memory_plugins.doctor.checks import allocators, cuda_ipc, limits
from rl_memory_plugins.doctor.finding import Status

FAILURE, NOT_APPLICABLE = Status.FAILURE, Status.NOT_APPLICABLE
needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")


@needs_torch
@pytest.mark.parametrize("build, status", [("13.0", FAILURE), (None, NOT_APPLICABLE)])
def test_gpu_checks_are_never_ok_where_torch_has_no_gpu(monkeypatch, tmp_path, build, status):
    import torch

    if torch.cuda.is_available():
        pytest.skip("torch can use the GPU here")
    monkeypatch.setattr(torch.version, "cuda", build)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(limits, "DEV", tmp_path)
    monkeypatch.setattr(limits, "why_no_gpu", lambda: "")
    assert allocators.gpus().status is status
    assert cuda_ipc.between_processes().status is status
    assert limits.locked_memory().status is status
