"""The configurations of docs/several-models.md for llama-swap and Kubernetes, read from the page and run as they say.

llama-swap itself and a cluster are not here: what they would run is run, as they document it.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest
import yaml

from integration.engines.base import REPOSITORY, Server
from integration.engines.ports import reserve_port
from integration.waiting import AT_ONCE_S, wait_until
from tests.conformance.conftest import PROMPT, Weights
from tests.conformance.trainers import broken_update

PAGE = (REPOSITORY / "docs" / "several-models.md").read_text()

COMMAND_S = 120  # of a command that starts a Python, on a busy machine

#: The fields of a probe, of the version v1 of Kubernetes' API.
PROBE = {"exec", "httpGet", "tcpSocket", "grpc", "initialDelaySeconds", "periodSeconds", "timeoutSeconds"} | {
    "successThreshold",
    "failureThreshold",
    "terminationGracePeriodSeconds",
}

FORWARD = """#!{python}
import socket, sys, threading

def listening(spec):
    port = int(spec.split(",")[0].removeprefix("TCP-LISTEN:"))
    return socket.create_server(("127.0.0.1", port))

def copy(source, target):
    while chunk := source.recv(65536):
        target.sendall(chunk)
    target.shutdown(socket.SHUT_WR)

server = listening(sys.argv[1])
host, port = sys.argv[2].removeprefix("TCP:").split(":")
while True:
    client, _ = server.accept()
    engine = socket.create_connection((host, int(port)))
    for pair in ((client, engine), (engine, client)):
        threading.Thread(target=copy, args=pair, daemon=True).start()
"""
"""What the recipe needs of `socat`, where there is none."""


def blocks(heading: str) -> list[dict[str, Any]]:
    """The YAML of a section of the page."""
    section = PAGE.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return [yaml.safe_load(text) for text in re.findall(r"^```yaml\n(.*?)^```", section, re.MULTILINE | re.DOTALL)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A PATH with `rl-memory`, and with `socat`."""
    folder = tmp_path_factory.mktemp("bin")
    scripts = {"rl-memory": f'#!/bin/sh\nexec {sys.executable} -m rl_memory_plugins "$@"\n'}
    if shutil.which("socat") is None:
        scripts["socat"] = FORWARD.format(python=sys.executable)
    for name, text in scripts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(stat.S_IRWXU)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


@pytest.fixture
def environment(path: str, server: Server) -> dict[str, str]:
    key = server.launch.api_key
    found = {**os.environ, "PATH": path, "RL_MEMORY_API_KEY": key, "VLLM_API_KEY": key}
    found["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    found.pop("RL_MEMORY_URL", None)
    return found


# -- Kubernetes --------------------------------------------------------------------------------------------------


def is_healthy(probe: dict[str, Any], server: Server) -> bool:
    """As the kubelet asks: any answer from 200 to 399 counts."""
    assert probe["httpGet"]["port"] == 8000 and set(probe) <= PROBE
    url = f"http://127.0.0.1:{server.port}{probe['httpGet']['path']}"
    return 200 <= httpx.get(url, trust_env=False, timeout=AT_ONCE_S).status_code < 400


def is_ready(probe: dict[str, Any], server: Server, environment: dict[str, str]) -> bool:
    assert set(probe) <= PROBE
    command = [
        word.replace("http://127.0.0.1:8000", f"http://127.0.0.1:{server.port}") for word in probe["exec"]["command"]
    ]
    assert command != probe["exec"]["command"]
    return subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, timeout=AT_ONCE_S).returncode == 0


needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="apt-get install curl: the probe calls it")


@needs_curl
def test_the_probes_of_an_engine_in_each_state(server: Server, weights: Weights, environment: dict[str, str]) -> None:
    engine, _ = blocks("In Kubernetes")
    states = {}

    def ask(state: str) -> None:
        memory = server.control.memory()
        reason = "awake" if memory["admitting"] else memory["reason"]
        assert reason == state
        alive = is_healthy(engine["startupProbe"], server), is_healthy(engine["livenessProbe"], server)
        states[state] = (*alive, is_ready(engine["readinessProbe"], server, environment))

    ask("awake")
    server.control.sleep(2)
    ask("asleep")
    server.control.wake_up()
    ask("stale")
    with broken_update(server, weights.other, stall=True):
        ask("updating")
    broken_update(server, weights.other)
    ask("failed")
    assert states == {
        "awake": (True, True, True),
        **dict.fromkeys(("asleep", "stale", "updating", "failed"), (True, True, False)),
    }


@needs_curl
def test_the_probe_of_a_server_that_is_not_there(server: Server, environment: dict[str, str]) -> None:
    reservation, port = reserve_port()
    command = [
        word.replace(":8000", f":{port}") for word in blocks("In Kubernetes")[0]["readinessProbe"]["exec"]["command"]
    ]
    with reservation:
        probe = subprocess.run(command, env=environment, stderr=subprocess.DEVNULL, timeout=AT_ONCE_S)
    assert probe.returncode != 0


def test_the_probes_of_several_models_ask_what_the_port_has() -> None:
    """`tests/conformance/test_serve.py` asks the same of a running one."""
    _, several = blocks("In Kubernetes")
    assert several["startupProbe"]["httpGet"] == {"path": "/health", "port": 8000}
    assert all(set(probe) <= PROBE for probe in several.values())
    assert several["livenessProbe"] == several["readinessProbe"] == {"tcpSocket": {"port": 8000}}


# -- llama-swap --------------------------------------------------------------------------------------------------


class Swapped:
    """A model of llama-swap: it replaces macros, splits the command as a shell would, and runs it without a shell."""

    def __init__(self, model: dict[str, Any], engine: str, server: Server, environment: dict[str, str]) -> None:
        self._reservation, self.port = reserve_port()
        self._model, self._engine, self._server = model, engine, server
        self._environment = environment
        self.check = f"http://127.0.0.1:{self.port}{model['checkEndpoint']}"
        self.process = subprocess.Popen(self._command("cmd", PORT=self.port), env=environment)

    def _command(self, key: str, **macros: int) -> list[str]:
        text = str(self._model[key])
        for name, value in macros.items():
            text = text.replace(f"${{{name}}}", str(value))
        assert "${" not in text, "an unknown macro"
        assert self._engine in text, f"{key} must name its engine"
        return shlex.split(text.replace(self._engine, f"127.0.0.1:{self._server.port}"))

    def is_up(self) -> bool:
        try:
            return httpx.get(self.check, trust_env=False, timeout=AT_ONCE_S).status_code == 200
        except httpx.HTTPError:
            assert self.process.poll() is None, "the command ended"
            return False

    def stop(self) -> None:
        subprocess.run(self._command("cmdStop", PID=self.process.pid), env=self._environment, timeout=COMMAND_S)
        self.process.wait(COMMAND_S)

    def close(self) -> None:
        if self.process.poll() is None:
            for process in psutil.Process(self.process.pid).children(recursive=True):
                process.kill()
            self.process.kill()
            self.process.wait()
        self._reservation.close()


WAKING = blocks("With llama-swap")[1]["models"]


@pytest.fixture(params=WAKING)
def swapped(request: pytest.FixtureRequest, server: Server, environment: dict[str, str]) -> Iterator[Swapped]:
    """The command of one model, whose engine sleeps."""
    server.control.sleep(1)
    engine = {"small": "127.0.0.1:8001", "large": "127.0.0.1:8251"}[request.param]
    swapped = Swapped(WAKING[request.param], engine, server, environment)
    yield swapped
    swapped.close()


def test_a_command_wakes_its_engine_and_its_stop_puts_it_to_sleep(
    server: Server, swapped: Swapped, first_tokens: list[int]
) -> None:
    wait_until(swapped.is_up, "the check endpoint", COMMAND_S)
    assert server.control.memory()["admitting"], "the port answers no earlier than the engine is awake"
    kind = server.kind
    with httpx.Client(base_url=f"http://127.0.0.1:{swapped.port}", trust_env=False, timeout=AT_ONCE_S) as client:
        key = {"Authorization": f"Bearer {server.launch.api_key}"} if server.launch.api_key else {}
        answer = client.post(kind.generation_route, json=kind.request(PROMPT, len(first_tokens)), headers=key)
    assert answer.status_code == 200, answer.text
    swapped.stop()
    assert server.control.memory()["reason"] == "asleep"
    with pytest.raises(httpx.HTTPError):
        httpx.get(swapped.check, trust_env=False, timeout=AT_ONCE_S)


def test_the_engines_that_take_turns_are_asked_where_they_listen() -> None:
    turns, _ = blocks("With llama-swap")
    assert {model["proxy"] for model in turns["models"].values()} == {"http://127.0.0.1:8001", "http://127.0.0.1:8251"}
    assert {(model["cmd"], model["checkEndpoint"]) for model in turns["models"].values()} == {
        ("sleep infinity", "/health")
    }
    [group] = turns["routing"]["router"]["settings"]["groups"].values()
    assert not group["swap"] and set(group["members"]) == set(turns["models"])
