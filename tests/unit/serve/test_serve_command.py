"""`rl-memory serve FILE.yaml` as a process, with stand-ins for the engines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest
from test_served_engine import interpreter
from typer.testing import CliRunner

from integration.engines.base import REPOSITORY
from integration.engines.ports import reserve_port
from integration.waiting import wait_until
from rl_memory_plugins import cli
from rl_memory_plugins.serve import command
from rl_memory_plugins.serve.processes import alive


class Running:
    """The command, with two models."""

    def __init__(self, folder: Path, before: tuple[str, ...] = ()) -> None:
        self.folders = [folder / name for name in ("a", "b")]
        self.reservation, self.port = reserve_port()
        entries = []
        for port, one in enumerate(self.folders, self.port + 1):
            one.mkdir()
            (one / "sleeps").touch()
            python = interpreter(one)
            entries.append({"name": one.name, "engine": "vllm", "model": "m", "python": python, "port": port})
        self.file = folder / "models.yaml"
        self.file.write_text(json.dumps({"models": entries}))
        self.log = folder / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*before, sys.executable, "-m", "rl_memory_plugins", "serve", str(self.file), "--port", str(self.port)],
                stderr=log,
                env={**os.environ, "TMPDIR": str(folder), "PYTHONPATH": path()},
                preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # the tests may run under nohup
            )

    def is_healthy(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        with suppress(httpx.HTTPError):
            return httpx.get(f"http://127.0.0.1:{self.port}/health", trust_env=False).status_code == 200
        return False

    def engines(self) -> list[psutil.Process]:
        return [child for child in psutil.Process(self.process.pid).children() if child.status() != "zombie"]


def path() -> str:
    return os.pathsep.join(one for one in (os.environ.get("PYTHONPATH", ""), str(REPOSITORY)) if one)


@pytest.fixture
def running(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Running]:
    running = Running(tmp_path, getattr(request, "param", ()))
    try:
        wait_until(running.is_healthy, "both engines have started", 180)
        yield running
    finally:
        with suppress(ProcessLookupError):
            running.process.terminate()
        running.process.wait(60)
        running.reservation.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_stops_all(running: Running, number: signal.Signals) -> None:
    left = [process for engine in running.engines() for process in (engine, *engine.children(recursive=True))]
    assert len(left) == 4
    running.process.send_signal(number)
    assert running.process.wait(60) == 0, running.log.read_text()
    assert not alive(left)


@pytest.mark.parametrize("running", [("nohup",)], indirect=True)
def test_nohup_keeps_it_running(running: Running) -> None:
    running.process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        running.process.wait(1)
    assert running.is_healthy() and len(running.engines()) == 2


def test_an_engine_that_ends_is_named_and_starts_again(running: Running) -> None:
    engine = running.engines()[1]
    engine.kill()
    wait_until(lambda: "model 'b': its engine ended by SIGKILL; it starts again" in running.log.read_text(), "named")
    wait_until(lambda: len(running.engines()) == 2 and running.is_healthy(), "it runs again")


def test_a_port_that_is_taken_is_named_before_an_engine_starts(running: Running) -> None:
    again = subprocess.run(
        [sys.executable, "-m", "rl_memory_plugins", "serve", str(running.file), "--port", str(running.port)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path()},
    )
    assert again.returncode == 1
    assert f"InvalidRequestError: cannot listen on port {running.port}: " in again.stderr


@pytest.mark.parametrize("name", ["models.yaml", "models.yml", "folder/models.json"])
def test_a_first_argument_that_names_a_file_is_the_file(name: str) -> None:
    result = CliRunner().invoke(cli.app, ["serve", name])
    assert result.exit_code == 1
    assert f"InvalidRequestError: cannot read {name}" in result.stderr


def test_what_is_missing_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "NEEDED", ("yaml", "no_such_module"))
    result = CliRunner().invoke(cli.app, ["serve", "models.yaml"])
    assert result.exit_code == 1
    assert "UnsupportedError: no_such_module not installed" in result.stderr
    assert "pip install 'rl_memory_plugins[serve]'" in result.stderr


def test_the_help_lists_the_file_beside_the_engines() -> None:
    helped = CliRunner().invoke(cli.app, ["serve", "--help"]).stdout
    assert all(name in helped for name in ("vllm", "sglang", "FILE.yaml"))
    own = CliRunner().invoke(cli.app, ["serve", "models.yaml", "--help"]).stdout
    assert all(option in own for option in ("--host", "--port", "--api-key"))
