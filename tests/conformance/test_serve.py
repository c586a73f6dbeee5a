"""`rl-memory serve FILE.yaml`: two models of one engine behind one port, one awake at a time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from integration.engines import ENGINES
from integration.engines.base import REPOSITORY, EngineKind, Launch, events_of
from integration.engines.ports import reserve_port
from integration.models import SHAPES, write_model
from integration.waiting import AT_ONCE_S, wait_until
from rl_memory_plugins.client import http_client
from rl_memory_plugins.serve.processes import alive
from tests.conformance.conftest import OTHER_SEED, PROMPT
from tests.monitoring import Scrape

NAMES = ["first", "second"]
START_S = 600  # of both engines, one after the other


class Served:
    """A running `rl-memory serve`."""

    def __init__(self, kind: EngineKind, launch: Launch, models: list[Path], folder: Path) -> None:
        self.kind = kind
        self.log = folder / "serve.log"
        reservations = [reserve_port() for _ in (*models, "front")]
        self._reservations = [reservation for reservation, _ in reservations]
        *own, self.port = (port for _, port in reservations)
        entries = [
            {
                "name": name,
                "engine": kind.name,
                "model": str(model),
                "args": ["--dtype", launch.dtype, *kind.arguments(launch)],
                "env": self._environment(kind, launch),
                "port": port,
            }
            for name, model, port in zip(NAMES, models, own, strict=True)
        ]
        options = {"take_turns_s": 0.3, "wake_on_request_s": 200, "poison": True}
        file = folder / "models.yaml"
        file.write_text(json.dumps({"models": entries, "rl_memory": options}))  # JSON is YAML
        self.http = http_client(f"http://127.0.0.1:{self.port}", "", 200)
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rl_memory_plugins", "serve", str(file), "--port", str(self.port)],
                stdout=output,
                stderr=subprocess.STDOUT,
                # Turns of engines of other tests are not theirs: the locks lie in a folder of this test.
                env={**os.environ, "PYTHONPATH": self._path(""), "TMPDIR": str(folder)},
                process_group=0,
            )

    def _environment(self, kind: EngineKind, launch: Launch) -> dict[str, str]:
        environment = kind.environment(launch)
        return {**environment, "PYTHONPATH": self._path(environment.get("PYTHONPATH", ""))}

    @staticmethod
    def _path(first: str) -> str:
        return os.pathsep.join(path for path in (first, os.environ.get("PYTHONPATH", ""), str(REPOSITORY)) if path)

    def close(self) -> None:
        self.http.close()
        tree = self.processes()
        with suppress(ProcessLookupError):
            self.process.terminate()
        psutil.wait_procs(tree, timeout=40)
        for process in tree:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()
        for reservation in self._reservations:
            reservation.close()

    def processes(self) -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.process.pid)
            return [root, *root.children(recursive=True)]
        return []

    def engine(self, name: str) -> psutil.Process:
        """The process of an engine's server."""
        for child in psutil.Process(self.process.pid).children():
            if name in child.cmdline():
                return child
        raise AssertionError(f"no process of {name}:\n{self.tail()}")

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-60:])

    def states(self) -> dict[str, str]:
        return {one["id"]: one["state"] for one in self.http.get("/v1/models").json()["data"]}

    def is_healthy(self) -> bool:
        assert self.process.poll() is None, self.tail()
        try:
            return self.http.get("/health").status_code == 200
        except httpx.HTTPError:
            return False

    def body(self, name: str, tokens: int = 8, **sampling: Any) -> dict[str, Any]:
        return {**self.kind.request(PROMPT, tokens, **sampling), "model": name}

    def post(self, name: str, tokens: int = 8) -> httpx.Response:
        return self.http.post(self.kind.generation_route, json=self.body(name, tokens))

    def generate(self, name: str) -> list[int]:
        answer = self.post(name)
        assert answer.status_code == 200, f"{answer.text}\n{self.tail()}"
        return self.kind.tokens(answer.json())

    def running(self, name: str) -> int:
        """The requests that an engine has, by its own count."""
        [url] = [one["url"] for one in self.http.get("/v1/models").json()["data"] if one["id"] == name]
        with http_client(url, "", 60) as own:
            return self.kind.requests_held(own)


@pytest.fixture(scope="module")
def served(
    request: pytest.FixtureRequest, launch: Launch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("serve")
    other = write_model(folder / "other", SHAPES["small"], dtype=launch.dtype, seed=OTHER_SEED)
    kind = ENGINES[request.config.getoption("--engine")]()
    served = Served(kind, launch, [launch.model, other], folder)
    try:
        wait_until(lambda: answers(served), "the port answers", START_S)
        assert served.http.get("/health").status_code == 503
        refused = served.post("second")
        assert (refused.status_code, refused.json()["error"]["details"]["reason"]) == (503, "starting")
        wait_until(served.is_healthy, "both engines have started", START_S)
        yield served
    except TimeoutError:
        print(served.tail())
        raise
    finally:
        served.close()


def answers(served: Served) -> bool:
    assert served.process.poll() is None, served.tail()
    try:
        return set(served.states()) == set(NAMES)
    except httpx.HTTPError:
        return False


@pytest.fixture(scope="module")
def tokens(served: Served) -> dict[str, list[int]]:
    found = {name: served.generate(name) for name in NAMES}
    assert found["first"] != found["second"]
    return found


def test_one_model_is_awake_and_the_others_sleep(served: Served) -> None:
    wait_until(lambda: served.states() == {"first": "awake", "second": "asleep"}, "the first model is awake")


def test_each_request_reaches_its_model(served: Served, tokens: dict[str, list[int]]) -> None:
    for name in (*NAMES, *reversed(NAMES)):
        assert served.generate(name) == tokens[name]
        assert served.states()[name] == "awake"
    assert "x-weight-version" in served.post("first").headers


def test_a_stream_comes_as_it_is_generated(served: Served, tokens: dict[str, list[int]]) -> None:
    for name in NAMES:
        body = served.body(name, 8, stream=True)
        with served.http.stream("POST", served.kind.generation_route, json=body) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            parts = [part for part in answer.iter_raw() if part]
        assert len(parts) > 2
        assert served.kind.streamed_tokens(events_of(b"".join(parts).decode())) == tokens[name]


def test_an_unknown_model_is_openais_error_with_the_known_names(served: Served) -> None:
    answer = served.post("third")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert all(name in error["message"] for name in NAMES)


def test_control_routes_are_not_reached(served: Served) -> None:
    for path in ("/sleep", "/v1/rl_memory/sleep", "/v1/rl_memory/memory"):
        assert served.http.post(path, json={"model": "first"}).status_code == 404


def test_metrics_have_the_model_as_a_label(served: Served, tokens: dict[str, list[int]]) -> None:
    scrape = Scrape(served.http.get("/metrics").text)
    assert {labels["model"]: value for labels, value in scrape.samples("serve_engine_up")} == dict.fromkeys(NAMES, 1.0)
    assert {labels["model"] for labels, _ in scrape.samples("admitting")} == set(NAMES)


LONG = 800  # tokens


@pytest.fixture(scope="module")
def whole_s(served: Served) -> float:
    """How long an answer of `LONG` tokens takes to its end."""
    served.generate("first")
    start = time.monotonic()
    assert served.post("first", LONG).status_code == 200
    return time.monotonic() - start


@pytest.mark.long
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request(served: Served, whole_s: float, stream: bool) -> None:
    served.generate("first")
    tokens = 1900
    body, whole_s = served.body("first", tokens, stream=stream), whole_s * tokens / LONG

    def ask() -> None:
        with suppress(httpx.HTTPError):
            with served.http.stream("POST", served.kind.generation_route, json=body) as answer:
                for _ in answer.iter_raw():
                    if leaves.is_set():
                        return

    leaves = threading.Event()
    start = time.monotonic()
    with http_client(f"http://127.0.0.1:{served.port}", "", whole_s / 20) as impatient:
        if stream:
            asking = threading.Thread(target=ask)
            asking.start()
            wait_until(lambda: served.running("first") == 1, "the request runs")
            leaves.set()
            asking.join()
        else:
            with pytest.raises(httpx.ReadTimeout):
                impatient.post(served.kind.generation_route, json=body)
    wait_until(lambda: served.running("first") == 0, "the request has ended", AT_ONCE_S)
    assert time.monotonic() - start < whole_s * 0.6, f"it has run to its end, which takes {whole_s} s"


@pytest.mark.long
def test_an_engine_that_dies_is_named_and_comes_back_while_the_other_serves(
    served: Served, tokens: dict[str, list[int]]
) -> None:
    served.generate("second")
    server = served.engine("first")
    core = max(server.children(recursive=True), key=lambda process: process.memory_info().rss)
    core.kill()  # its server ends by itself
    wait_until(lambda: served.states()["first"] in ("down", "starting"), "the dead engine is named")
    assert served.http.get("/health").status_code == 503
    refused = served.post("first")
    assert refused.status_code == 503, refused.text
    assert "first" in refused.json()["error"]["message"] and "Retry-After" in refused.headers
    assert served.generate("second") == tokens["second"]
    wait_until(served.is_healthy, "it has started again", START_S)
    assert served.generate("first") == tokens["first"]
    assert [one["restarts"] for one in served.http.get("/v1/models").json()["data"]] == [1, 0]
    assert "model 'first': its engine ended" in served.log.read_text()


def test_a_signal_leaves_no_process(served: Served) -> None:
    tree = served.processes()
    assert len(tree) >= 3
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(60) == 0, served.tail()
    assert not alive(tree), served.tail()
