"""torch's settings that do not go with a sleep."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from rl_memory_plugins.doctor.checks import torch_settings
from rl_memory_plugins.doctor.finding import Status

OK, WARNING, FAILURE, NOT_APPLICABLE = Status.OK, Status.WARNING, Status.FAILURE, Status.NOT_APPLICABLE
needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")


@pytest.mark.parametrize(
    "environment, status",
    [
        ({}, OK),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, OK),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64, expandable_segments:True"}, WARNING),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, WARNING),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True", "RL_MEMORY_ALLOCATOR": "tms"}, FAILURE),
        ({"RL_MEMORY_ALLOCATOR": "tms"}, OK),
    ],
)
def test_expandable_segments(monkeypatch, environment, status):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = torch_settings.expandable_segments()
    assert found.status is status
    assert ("unset PYTORCH" in found.remedy) is (status is not OK)


@needs_torch
def test_a_library_that_is_not_preloaded(monkeypatch):
    assert torch_settings.preload().status is NOT_APPLICABLE
    monkeypatch.setenv("RL_MEMORY", "allocator=tms,tms_hook_mode=preload")
    assert torch_settings.preload().status is FAILURE
    monkeypatch.setenv("LD_PRELOAD", "/nowhere/torch_memory_saver_hook_mode_preload.so")  # named, and not loaded
    found = torch_settings.preload()
    assert found.status is FAILURE and "rl-memory serve" in found.remedy
