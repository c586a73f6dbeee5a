"""Frozen requests under SGLang's overlap schedule, which runs a step while it processes the one before."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from integration.engines.base import Launch, Server
from rl_memory_plugins.errors import EngineAsleepError
from tests.conformance.test_freeze import LONG_PROMPT, answered_by
from tests.sglang.conftest import WATCHDOG_S, WatchedSglang

TOKENS = 1000
RUNNING = 48


class OverlappingSglang(WatchedSglang):
    def command(self, launch: Launch, port: int) -> list[str]:
        return [word for word in super().command(launch, port) if word != "--disable-overlap-schedule"]


@pytest.fixture(scope="module")
def server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "server.log"
    with Server(OverlappingSglang(), Launch(model_folder, forked=True, max_running=RUNNING), log) as server:
        yield server


def test_each_token_counts_for_the_weights_that_computed_it(
    server: Server, first_weights: Any, other_weights: Any
) -> None:
    assert server.http.get("/get_server_info").json()["disable_overlap_schedule"] is False
    server.control.update_weights(first_weights, weight_version="before")
    with server.generating(LONG_PROMPT, TOKENS) as request:
        time.sleep(0.5)
        server.control.update_weights(other_weights, weight_version="after", mode="freeze")
        answer = request.answer()
    tokens = server.kind.tokens(answer)
    assert server.kind.recomputations(server.http, answer) == 0
    count = answered_by(first_weights, other_weights, LONG_PROMPT, tokens)
    assert answer["meta_info"]["weight_versions"] == [
        {"version": "before", "start": 0, "end": count},
        {"version": "after", "start": count, "end": TOKENS},
    ]


def post_again(server: Server, prompt: list[int], tokens: int) -> httpx.Response:
    """As a caller whose request came while the engine slept."""
    while True:
        answer = server.post(prompt, tokens)
        if answer.status_code != EngineAsleepError.status:
            return answer
        time.sleep(0.01)


def test_a_request_with_one_token_left_ends(server: Server) -> None:
    """SGLang plans no step for a request whose last token it takes to be in the queue of results."""
    with ThreadPoolExecutor(RUNNING) as pool:
        lengths = range(20, 20 + RUNNING)
        requests = [pool.submit(post_again, server, [5 + length, 6, 7], length) for length in lengths]
        while not all(request.done() for request in requests[: RUNNING // 2]):
            server.control.sleep(0, mode="freeze")
            server.control.wake_up()
            time.sleep(0.01)
        found = [len(server.kind.tokens(request.result(60).json())) for request in requests]
    assert found == list(lengths)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["keep", "abort"])
def test_a_call_after_the_freeze_takes_its_requests(server: Server, mode: str) -> None:
    with server.generating(LONG_PROMPT, TOKENS) as request:
        server.control.sleep(0, mode="freeze")
        server.control.sleep(1, mode=mode)
        server.control.wake_up()
        answer = request.answer()
    assert server.kind.was_aborted(answer) is (mode == "abort")
    assert len(server.generate(LONG_PROMPT)) == 8


def test_frozen_requests_are_no_hang(server: Server) -> None:
    """SGLang's watchdog ends a server whose batch takes too long."""
    with server.generating(LONG_PROMPT, TOKENS) as request:
        server.control.sleep(0, mode="freeze")
        time.sleep(WATCHDOG_S + 3)
        assert server.is_running(), server.tail()
        server.control.wake_up()
        assert len(server.kind.tokens(request.answer())) == TOKENS
