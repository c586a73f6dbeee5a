"""One engine behind `rl-memory serve`: real processes, and a stand-in for the engine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from helpers import until

from integration.engines.ports import reserve_port
from integration.waiting import wait_until
from rl_memory_plugins.errors import EngineAsleepError, EngineLostError
from rl_memory_plugins.serve import engine as engine_module
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
    reservation, port = reserve_port()
    given = {"name": "a", "engine": "vllm", "model": "m", "python": interpreter(folder), **entry}

    async def main() -> ServedEngine:
        async with httpx.AsyncClient(trust_env=False) as http:
            engine = ServedEngine(ModelEntry(**given), port, {"take_turns_s": 1}, key, http)
            try:
                await asyncio.wait_for(scenario(engine), 60)
            finally:
                await engine.stop()
            return engine

    with reservation:
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
        assert not processes.alive([child])
        engine.rests(4.4)
        refusal = engine.refusal()
        assert isinstance(refusal, EngineLostError)
        assert refusal.message == "the engine of model 'a' ended by SIGKILL; it starts again in 4 s"
        assert refusal.details == {"engine": "a", "retry_after_s": 4}
        assert (await engine.state(), engine.restarts) == ("down", 0)
        engine.rests(0)
        refusal = engine.refusal()
        assert refusal is not None and refusal.message.endswith("it starts again when it has its turn")
        assert await engine.start([])  # again
        assert (engine.refusal(), engine.restarts) == (None, 1)

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
        assert engine.end == "was stopped: it has not started within 0.5 s"

    run(tmp_path, scenario)


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_start_that_can_never_succeed_fails_at_once(tmp_path: Path, status: int) -> None:
    (tmp_path / "status-memory").write_text(str(status))

    async def scenario(engine: ServedEngine) -> None:
        assert not await engine.start([])
        assert engine.end.startswith(f"was stopped: it answers {status} at /v1/rl_memory/memory: it ")
        assert await engine.state() == "down"

    run(tmp_path, scenario)


def test_another_answer_during_a_start_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    (tmp_path / "status-memory").write_text("500")

    def logged() -> int:
        return caplog.text.count("model 'a': its server answers 500 at /v1/rl_memory/memory")

    async def scenario(engine: ServedEngine) -> None:
        starting = asyncio.ensure_future(engine.start([]))
        while not logged():
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)
        (tmp_path / "status-memory").unlink()
        assert await starting
        assert logged() == 1

    run(tmp_path, scenario)


def test_an_engine_that_cannot_sleep_fails_to_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "SLEEP_S", 0.3)

    async def scenario(engine: ServedEngine) -> None:
        assert not await engine.start(["cpu:0"])
        assert engine.end.startswith("was stopped: it does not fall asleep")

    run(tmp_path, scenario)


@pytest.mark.parametrize("how", ["503", "no answer"])
def test_an_engine_that_hangs_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    async def scenario(engine: ServedEngine) -> None:
        assert await engine.start([])
        assert engine.pid is not None
        left = [psutil.Process(engine.pid), psutil.Process(int((tmp_path / "child").read_text()))]
        for name, seconds in [("HANG_S", 0.5), ("ANSWER_S", 0.2), ("HEALTH_EVERY_S", 0.05)]:
            monkeypatch.setattr(engine_module, name, seconds)
        monkeypatch.setattr(processes, "STOP_S", 0.3)
        if how == "503":
            (tmp_path / "status-health").write_text("503")
        else:
            os.kill(engine.pid, signal.SIGSTOP)
        await engine.ended()
        assert engine.end == "was stopped: it gave no answer at /health for 0.5 s, or 503"
        assert "model 'a': its engine gave no answer at /health" in caplog.text
        await until(lambda: not processes.alive(left))

    run(tmp_path, scenario)


def test_an_engine_that_hangs_in_its_warm_up_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "WARM_UP_S", 0.5)
    (tmp_path / "status-health").write_text("503")

    async def scenario(engine: ServedEngine) -> None:
        assert await engine.start([])
        await engine.warmed_up()
        await engine.ended()
        assert engine.end == "was stopped: it gave no answer at /health for 0.5 s, or 503"

    run(tmp_path, scenario)


def test_an_engine_that_answers_now_and_then_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "HANG_S", 0.0)  # the first bad answer is one too many
    monkeypatch.setattr(engine_module, "HEALTH_EVERY_S", 0.01)

    async def scenario(engine: ServedEngine) -> None:
        assert await engine.start([])
        await engine.warmed_up()
        ended = asyncio.ensure_future(engine.ended())
        await asyncio.sleep(0.5)
        assert not ended.done()
        ended.cancel()

    run(tmp_path, scenario)


def test_the_port_waits_only_shortly_for_an_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "ANSWER_S", 1000.0)
    monkeypatch.setattr(engine_module, "PORT_ANSWER_S", 0.2)
    monkeypatch.setattr(processes, "STOP_S", 0.3)

    async def scenario(engine: ServedEngine) -> None:
        assert await engine.start([])
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGSTOP)
        assert (await engine.state(), await engine.is_healthy(), await engine.metrics()) == ("unreachable", False, "")

    run(tmp_path, scenario)


def test_a_signal_without_a_name_is_its_number(tmp_path: Path) -> None:
    number = signal.SIGRTMIN + 1
    assert number not in {*signal.Signals}

    async def scenario(engine: ServedEngine) -> None:
        assert await engine.start([])
        assert engine.pid is not None
        os.kill(engine.pid, number)
        await engine.ended()
        assert engine.end == f"ended by signal {number}"

    run(tmp_path, scenario)


def test_processes_that_have_ended_are_not_killed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(engine: ServedEngine) -> None:
        assert await engine.start([])
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        await engine.ended()
        assert engine.pid is None
        monkeypatch.setattr(processes.os, "killpg", lambda *_: pytest.fail("another process may have this number"))

    run(tmp_path, scenario)


def test_an_exported_key_is_not_the_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "of the shell")

    async def scenario(engine: ServedEngine) -> None:
        assert await engine.start([])

    run(tmp_path, scenario)
    assert (tmp_path / "key-variable").read_text() == ""


def test_the_terminal_is_not_its_input(tmp_path: Path) -> None:
    async def scenario(engine: ServedEngine) -> None:
        assert await engine.start([])

    own = os.dup(0)
    terminal, other_end = os.openpty()
    try:
        os.dup2(terminal, 0)
        run(tmp_path, scenario)
    finally:
        os.dup2(own, 0)
        for fd in (own, terminal, other_end):
            os.close(fd)
    assert (tmp_path / "stdin").read_text() == os.devnull


def test_a_wake_that_fails_has_a_reason(tmp_path: Path) -> None:
    async def scenario(engine: ServedEngine) -> None:
        assert "ConnectError" in await engine.wake_up()
        assert await engine.start([])
        assert await engine.wake_up() == ""
        (tmp_path / "status-wake_up").write_text("409")
        assert await engine.wake_up() == "409: {}"

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
    wait_until(lambda: not processes.alive(left), "all have ended")
