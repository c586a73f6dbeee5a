"""Whether the plugin is found, with which options, and in which processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib import metadata
from importlib.util import find_spec

import pytest

from rl_memory_plugins.board import StatusBoard
from rl_memory_plugins.doctor import given_options
from rl_memory_plugins.doctor.checks import allocators, plugin, torch_settings
from rl_memory_plugins.doctor.finding import Status

OK, WARNING, FAILURE, NOT_APPLICABLE = Status.OK, Status.WARNING, Status.FAILURE, Status.NOT_APPLICABLE
needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")


@pytest.mark.parametrize(
    "engine, variable, listed, status",
    [
        ("vllm", "VLLM_PLUGINS", None, OK),
        ("vllm", "VLLM_PLUGINS", "a,rl_memory", OK),
        ("vllm", "VLLM_PLUGINS", "a", FAILURE),
        ("vllm", "VLLM_PLUGINS", "", FAILURE),
        ("sglang", "SGLANG_PLUGINS", "a", FAILURE),
        ("sglang", "SGLANG_PLUGINS", "", OK),
    ],
)
def test_lists_of_allowed_plugins(engines, monkeypatch, engine, variable, listed, status):
    engines[:] = [engine]
    if listed is not None:
        monkeypatch.setenv(variable, listed)
    found = plugin.loaded()
    assert found.status is status, found
    assert (variable in found.remedy) is (status is FAILURE)


def test_a_package_that_is_not_installed_is_not_loaded(engines, monkeypatch):
    monkeypatch.setattr(plugin.metadata, "entry_points", lambda group: [])
    assert plugin.loaded().status is FAILURE
    assert "pip" in plugin.loaded().remedy


def test_a_plugin_that_cannot_be_imported(engines, monkeypatch):
    entry = metadata.EntryPoint("rl_memory", "a_module_that_is_not_there:register", "vllm.general_plugins")
    monkeypatch.setattr(plugin.metadata, "entry_points", lambda group: [entry])
    found = plugin.loaded()
    assert found.status is FAILURE and "a_module_that_is_not_there" in found.seen


@pytest.mark.parametrize(
    "name, value, status, seen",
    [
        ("RL_MEMORY", "1", OK, "enables the plugin"),
        ("RL_MEMORY", "poison=1", OK, "poison"),
        ("RL_MEMORY", "MODEL", FAILURE, "'MODEL' is not key=value"),
        ("RL_MEMORY_ALLOCATOR", "cuda", FAILURE, "RL_MEMORY_ALLOCATOR"),
        ("RL_MEMORY_POISSON", "1", WARNING, "RL_MEMORY_POISSON"),
        ("RL_MEMORY_URL", "http://x", OK, "is not set"),
    ],
)
def test_options_in_the_environment(monkeypatch, name, value, status, seen):
    monkeypatch.setenv(name, value)
    found = plugin.options()
    assert found.status is status
    assert seen in found.seen


@needs_torch
def test_a_trainer_needs_no_options_of_an_engine(monkeypatch):
    monkeypatch.setattr(given_options, "is_importable", lambda module: False)
    monkeypatch.setattr(given_options, "installed_engines", lambda: ["vllm"])
    assert plugin.options().status is FAILURE
    assert torch_settings.preload().status is NOT_APPLICABLE
    assert allocators.host().status is NOT_APPLICABLE
    monkeypatch.setattr(given_options, "installed_engines", list)
    assert plugin.options().status is NOT_APPLICABLE
    assert allocators.host().status is OK


def test_a_process_with_a_status_board_is_found(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    board = StatusBoard()
    try:
        row = plugin._process(os.getpid())
    finally:
        board.close()
    assert (row["pid"], row["parent"]) == (os.getpid(), os.getppid())
    assert "status board open" in row["signs"]
    assert plugin._process(os.getpid()) is None  # the mapping ends with the board


def test_processes_of_engines_are_found_by_command_and_environment():
    script = "import sys; print('started', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", script, "vllm.entrypoints.x", "--rl-memory={}", "--api-key", "s3cret"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "RLMEM_VLLM_HOOKS": "1"}
    ) as process:
        assert process.stdout.readline()
        [row] = [row for row in plugin.processes().details["processes"] if row["pid"] == process.pid]
        process.stdin.close()
    assert row["signs"] == ["flag", "child of an enabled engine"]
    assert "vllm.entrypoints.x" in row["command"]
    assert "s3cret" not in json.dumps(row)


def test_a_process_without_a_sign_may_be_started_by_one_with_a_sign(monkeypatch):
    table = {
        1: {"pid": 1, "parent": 0, "command": "python vllm.entrypoints", "signs": ["flag"]},
        2: {"pid": 2, "parent": 1, "command": "VLLM::Worker", "signs": []},
        3: {"pid": 3, "parent": 2, "command": "VLLM::Worker", "signs": []},
        4: {"pid": 4, "parent": 0, "command": "VLLM::EngineCore", "signs": []},
    }
    monkeypatch.setattr(plugin, "own_processes", lambda: list(table))
    monkeypatch.setattr(plugin, "_process", table.get)
    rows = plugin.processes().details["processes"]
    assert [row["signs"] for row in rows] == [["flag"], ["started by 1"], ["started by 2"], []]


def test_processes_without_the_plugin_are_a_warning(monkeypatch):
    row = {"pid": 1, "parent": 0, "command": "python -m vllm.entrypoints", "signs": []}
    monkeypatch.setattr(plugin, "own_processes", lambda: [1])
    monkeypatch.setattr(plugin, "_process", lambda pid: row)
    assert plugin.processes().status is WARNING
    monkeypatch.setattr(plugin, "_process", lambda pid: None)
    assert plugin.processes().status is NOT_APPLICABLE
