"""One engine behind `rl-memory serve`: real processes, and a stand-in for the engine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from rl_memory_plugins.errors import EngineAsleepError, EngineLostError
from rl_memory_plugins.serve import processes
from rl_memory_plugins.serve.configuration import ModelEntry
from rl_memory_plugins.serve.engine import ServedEngine

FAKE = Path(__file__).with_name("fake_engine.py")


def interpreter(folder: Path) -> str:
    """A program in place of the engine's Python."""
    program = folder / "python"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE} {folder} "$@"\n')
    program.chmod(0o755)
    return str(program)


def run(
    folder: Path, scenario: Callable[[ServedEngine], Coroutine[Any, Any, None]], key: str = "", **entry: Any
) -> ServedEngine:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    given = {"name": "a", "engine": "vllm", "model": "m", "python": interpreter(folder), **entry}

    async def main() -> ServedEngine:
        async with httpx.AsyncClient(trust_env=False) as http:
            engine = ServedEngine(ModelEntry(**given), port, {"take_turns_s": 1}, key, http)
            try:
                await asyncio.wait_for(scenario(engine), 60)
            finally:
                await engine.stop()
            return engine

    return asyncio.run(main())


def test_it_is_started_as_the_file_says(tmp_path: Path) -> None:
    async def scenario(engine: ServedEngine) -> None:
        assert await engine.start([])
        assert engine.devices == {"cpu:0"}
        assert engine.refusal() is None
        assert (await engine.state(), await engine.is_healthy()) == ("awake", True)
        assert (await engine.metrics()).startswith("# TYPE x gauge")

    engine = run(tmp_path, scenario, args=["--dtype", "float32"])
    command = json.loads((tmp_path / "arguments").read_text())
    assert command == [
        *("-m", "rl_memory_plugins", "serve", "vllm", "m", "--served-model-name", "a"),
        *("--host", "127.0.0.1", "--port", engine.url.rpartition(":")[2], "--dtype", "float32"),
        *("--rl-memory", '{"take_turns_s": 1}'),
    ]


@pytest.mark.parametrize("engine, as_argument", [("vllm", False), ("sglang", True)])
def test_it_gets_the_key_and_is_asked_with_it(tmp_path: Path, engine: str, as_argument: bool) -> None:
    async def scenario(engine: ServedEngine) -> None:
        assert await engine.start([])

    run(tmp_path, scenario, "secret", engine=engine)
    assert ("secret" in json.loads((tmp_path / "arguments").read_text())) == as_argument
    assert (tmp_path / "key-variable").read_text() == ("" if as_argument else "secret")
    assert (tmp_path / "key").read_text() == "Bearer secret"


def test_before_it_has_started_it_refuses(tmp_path: Path) -> None:
    async def scenario(engine: ServedEngine) -> None:
        refusal = engine.refusal()
        assert isinstance(refusal, EngineAsleepError) and refusal.details["reason"] == "starting"
        assert (await engine.state(), await engine.is_healthy(), await engine.metrics()) == ("starting", False, "")

    run(tmp_path, scenario)


def test_an_end_is_noticed_and_nothing_is_left(tmp_path: Path) -> None:
    async def scenario(engine: ServedEngine) -> None:
        assert await engine.start([])
        child = psutil.Process(int((tmp_path / "child").read_text()))
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        await engine.ended()
        engine.rests(4)
        assert not processes.alive([child])
        refusal = engine.refusal()
        assert isinstance(refusal, EngineLostError)
        assert refusal.message == "the engine of model 'a' ended by SIGKILL; it starts again in 4 s"
        assert refusal.details == {"engine": "a", "retry_after_s": 4}
        assert (await engine.state(), engine.restarts) == ("down", 1)
        assert await engine.start([])  # again
        assert engine.refusal() is None

    run(tmp_path, scenario)


def test_a_start_that_fails_says_how(tmp_path: Path) -> None:
    (tmp_path / "fails").touch()

    async def scenario(engine: ServedEngine) -> None:
        assert not await engine.start([])
        assert engine.end == "ended with exit code 7"

    run(tmp_path, scenario)


def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    async def scenario(engine: ServedEngine) -> None:
        assert not await engine.start([])
        assert "no/python" in engine.end

    run(tmp_path, scenario, python="/no/python")


def test_a_start_that_takes_too_long_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_memory_plugins.serve.engine.START_S", 0.5)

    async def scenario(engine: ServedEngine) -> None:
        assert not await engine.start(["cpu:0"])  # it never sleeps
        assert engine.end == "ended by SIGTERM"

    run(tmp_path, scenario)


def test_an_engine_on_gpus_that_are_free_need_not_sleep(tmp_path: Path) -> None:
    async def scenario(engine: ServedEngine) -> None:
        assert await engine.start(["cpu:1"])
        assert await engine.state() == "awake"

    run(tmp_path, scenario)


def test_a_stop_leaves_nothing_even_if_the_server_does_not_listen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "STOP_S", 0.3)
    left: list[psutil.Process] = []

    async def scenario(engine: ServedEngine) -> None:
        assert await engine.start([])
        assert engine.pid is not None
        left.append(psutil.Process(int((tmp_path / "child").read_text())))
        os.kill(engine.pid, signal.SIGSTOP)  # SIGTERM does nothing to it now

    run(tmp_path, scenario)
    assert not processes.alive(left)
