"""How torch_memory_saver is chosen to be hooked in; what it then does needs a GPU (`tests/gpu`)."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from rl_memory_plugins.errors import UnsupportedError
from rl_memory_plugins.memory.torch_saver import resolve_hook_mode, with_preload


@pytest.fixture
def loaded_library() -> str:
    """A library that is in this process, under a name as torch_memory_saver's folder would give it."""
    ctypes.CDLL("libc.so.6")
    path = next(line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libc.so" in line)
    return f"/site/torch_memory_saver/{Path(path).name}"


def test_without_a_preload_it_is_the_torch_mode(monkeypatch):
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    assert resolve_hook_mode("auto") == resolve_hook_mode("torch") == "torch"
    with pytest.raises(UnsupportedError, match="rl-memory serve"):
        resolve_hook_mode("preload")


def test_a_preloaded_library_is_used(monkeypatch, loaded_library):
    monkeypatch.setenv("LD_PRELOAD", f"/lib/other.so:{loaded_library}")
    assert resolve_hook_mode("auto") == resolve_hook_mode("preload") == "preload"
    assert resolve_hook_mode("torch") == "torch"


def test_a_library_that_the_loader_could_not_load_is_none(monkeypatch):
    monkeypatch.setenv("LD_PRELOAD", "/site/torch_memory_saver_that_is_not_there.so")
    assert resolve_hook_mode("auto") == "torch"
    with pytest.raises(UnsupportedError, match="torch_memory_saver_that_is_not_there"):
        resolve_hook_mode("preload")


def test_the_libraries_come_first_and_once():
    libraries = ["/lib/torch_memory_saver.so", "/lib/libcudart.so.13"]
    assert with_preload({"A": "b"}, libraries) == {"A": "b", "LD_PRELOAD": ":".join(libraries)}
    twice = with_preload(with_preload({"LD_PRELOAD": "/lib/x.so"}, libraries), libraries)
    assert twice["LD_PRELOAD"] == ":".join([*libraries, "/lib/x.so"])
