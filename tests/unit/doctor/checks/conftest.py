"""Each fault that a check of this machine can find, made as far as a test can make it."""

import os

import pytest

from rl_memory_plugins.doctor.checks import hooks, plugin, versions


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("RL_MEMORY", "NCCL_", "PYTORCH_")) or name in ("VLLM_PLUGINS", "SGLANG_PLUGINS"):
            monkeypatch.delenv(name)


@pytest.fixture
def engines(monkeypatch):
    """Names of engines that count as installed; the test changes the list."""
    names = ["vllm"]
    for module in (plugin, hooks, versions):
        monkeypatch.setattr(module, "installed_engines", lambda: names)
    return names
