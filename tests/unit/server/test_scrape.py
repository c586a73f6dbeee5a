"""The engine's `/metrics` with the state added, in each form that a monitor may ask for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from fake_control import FakeControl
from fastapi import FastAPI, Response
from fastapi.testclient import TestClient
from prometheus_client import CollectorRegistry, Counter, make_asgi_app
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as prometheus

from rl_memory_plugins.board import Boards
from rl_memory_plugins.errors import EngineAsleepError
from rl_memory_plugins.records import UNANSWERED, EngineStatus
from rl_memory_plugins.server.scrape import StateAtScrape

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


@pytest.fixture
def control() -> FakeControl:
    return FakeControl()


@pytest.fixture
def client(control: FakeControl) -> TestClient:
    return client_of(lambda: control)


def client_of(engine: Callable[[], Any]) -> TestClient:
    registry = CollectorRegistry()
    Counter("engine_requests", "The engine's own.", registry=registry).inc(3)
    app = FastAPI()
    app.mount("/metrics", make_asgi_app(registry=registry))
    app.add_middleware(StateAtScrape, engine=engine)

    @app.get("/other")
    def other() -> Response:
        return Response("other")

    return TestClient(app)


def names(text: str, parse: Callable[[str], Any] = prometheus) -> set[str]:
    return {sample.name for family in parse(text) for sample in family.samples}


def test_a_scrape_has_the_metrics_of_both(client: TestClient) -> None:
    answer = client.get("/metrics")
    assert {"engine_requests_total", "rl_memory_admitting", "rl_memory_weights_info"} <= names(answer.text)


def test_a_scrape_is_compressed_only_if_the_monitor_takes_that(client: TestClient) -> None:
    assert client.get("/metrics").headers["content-encoding"] == "gzip"
    plain = client.get("/metrics", headers={"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers
    assert "rl_memory_admitting" in names(plain.text)


def test_open_metrics_end_once(client: TestClient) -> None:
    answer = client.get("/metrics", headers={"accept": OPENMETRICS})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.count("# EOF") == 1
    assert {"engine_requests_total", "rl_memory_admitting"} <= names(answer.text, openmetrics)


def test_a_monitor_may_choose_metrics(client: TestClient) -> None:
    chosen = client.get("/metrics", params={"name[]": ["engine_requests_total", "rl_memory_tag_bytes"]})
    assert names(chosen.text) == {"engine_requests_total", "rl_memory_tag_bytes"}


def test_other_answers_stay_as_they_are(client: TestClient) -> None:
    assert client.get("/other").text == "other"
    assert client.get("/metrics_of_others").status_code == 404


def test_an_app_without_metrics_gets_none(control: FakeControl) -> None:
    app = FastAPI()
    app.add_middleware(StateAtScrape, engine=lambda: control)
    answer = TestClient(app).get("/metrics")
    assert answer.status_code == 404
    assert answer.json() == {"detail": "Not Found"}


def test_nothing_is_added_before_there_is_an_enabled_engine() -> None:
    def starting() -> FakeControl:
        raise EngineAsleepError("the server is still starting", reason="starting")

    assert "rl_memory" not in client_of(starting).get("/metrics").text


def test_a_scrape_waits_for_no_engine(control: FakeControl) -> None:
    """Of a busy engine on another host the last answer is shown; the next scrape shows that it is silent."""
    answers: list[Any] = []

    class Remote(FakeControl):
        def status_now(self) -> list[EngineStatus]:
            return super(FakeControl, self).status_now()

        async def _call(self, command: Any) -> Any:
            answers.append(command)
            await asyncio.Event().wait()

    remote = Remote()
    [status] = control.status_now()
    remote._boards = Boards([{"board": "/nonexistent/of-another-host.board", "status": msgspec.to_builtins(status)}])
    remote._boards.expire()
    with client_of(lambda: remote) as client:  # one event loop for all requests
        first, second = (client.get("/metrics").text for _ in range(2))
    assert f'operation="{UNANSWERED}"}} 0.0' in first
    assert f'operation="{UNANSWERED}"}} 1.0' in second
    assert len(answers) == 1
