"""The settings string of torch's allocator, which other code may replace."""

from __future__ import annotations

import pytest
import torch

from rl_memory_plugins.memory import torch_settings


@pytest.fixture
def settings(monkeypatch):
    """What has been set, the latest last."""
    found = [""]
    monkeypatch.setattr(torch_settings, "torch_options", lambda: {"PYTORCH_ALLOC_CONF": found[-1]})
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", found.append, raising=False)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    return found


def test_an_option_is_added_to_those_that_are_set(settings):
    settings.append("expandable_segments:True,max_split_size_mb:64")
    torch_settings.set_torch_option("release_lock_on_cudamalloc", True)
    assert settings[-1] == "expandable_segments:True,max_split_size_mb:64,release_lock_on_cudamalloc:True"
    torch_settings.set_torch_option("expandable_segments", False)
    assert settings[-1] == "max_split_size_mb:64,release_lock_on_cudamalloc:True,expandable_segments:False"


@pytest.mark.parametrize(
    ("text", "has"),
    [
        ("", False),
        ("expandable_segments:True", False),  # as other code sets it
        ("release_lock_on_cudamalloc:False", False),
        ("release_lock_on_cudamalloc:True", True),
        ("a:1, release_lock_on_cudamalloc: True", True),
    ],
)
def test_an_option_that_a_later_string_omits_is_missed(settings, text, has):
    settings.append(text)
    assert torch_settings.has_torch_option("release_lock_on_cudamalloc") == has


def test_the_environment_counts_until_something_is_set(settings, monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "release_lock_on_cudamalloc:True")
    assert torch_settings.has_torch_option("release_lock_on_cudamalloc")
    settings.append("a:1")
    assert not torch_settings.has_torch_option("release_lock_on_cudamalloc")
