"""Requests in every closed state: refused at once, with the reason; and what else keeps answering."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from integration.engines.base import Server, events_of
from integration.waiting import AT_ONCE_S
from tests.conformance.conftest import PROMPT, STALL_S, Weights, greedy
from tests.conformance.trainers import broken_update


def paused(server: Server, weights: Weights) -> str:
    server.control.sleep(0)
    return "paused"


def asleep_1(server: Server, weights: Weights) -> str:
    server.control.sleep(1)
    return "asleep"


def asleep_2(server: Server, weights: Weights) -> str:
    server.control.sleep(2)
    return "asleep"


def weights_awake(server: Server, weights: Weights) -> str:
    server.control.sleep(1)
    server.control.wake_up(["weights"])
    return "asleep"


def stale(server: Server, weights: Weights) -> str:
    server.control.sleep(2)
    server.control.wake_up()
    return "stale"


def failed(server: Server, weights: Weights) -> str:
    broken_update(server, weights.other)
    return "failed"


HEALTH_S = 1.0  # monitors ask often, and some give up after a second
SMALL_BUCKET_BYTES = 4 << 10  # the rows of most tensors are smaller
MANY = 5_000  # buckets
CLOSED = [paused, asleep_1, asleep_2, weights_awake, stale, failed]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streaming"])
@pytest.mark.parametrize("close", CLOSED, ids=lambda state: state.__name__)
def test_a_request_is_refused_at_once(
    server: Server, weights: Weights, close: Callable[[Server, Weights], str], stream: bool
) -> None:
    reason = close(server, weights)
    start = time.monotonic()
    response = server.http.post(server.kind.generation_route, json=server.kind.request(PROMPT, 8, stream))
    assert time.monotonic() - start < AT_ONCE_S
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1
    error = response.json()["error"]
    assert error["code"] == "EngineAsleepError"
    assert error["details"]["reason"] == reason
    memory = server.control.memory()
    assert (memory["admitting"], memory["reason"]) == (False, reason)


@pytest.mark.parametrize("close", CLOSED, ids=lambda state: state.__name__)
def test_status_and_health_answer_in_every_state(
    server: Server, weights: Weights, close: Callable[[Server, Weights], str]
) -> None:
    close(server, weights)
    for route in server.kind.health_routes:
        assert_healthy(server, route)
    for route in ("/is_sleeping", "/memory", "/weight_version"):
        assert server.http.get("/v1/rl_memory" + route).status_code == 200


def assert_healthy(server: Server, route: str) -> None:
    """The health route says five times that the engine lives. A busy machine delays some answers, an engine all."""
    seconds = []
    for _ in range(5):
        start = time.monotonic()
        assert server.http.get(route, timeout=AT_ONCE_S).status_code == 200
        seconds.append(time.monotonic() - start)
    assert min(seconds) < HEALTH_S


@pytest.mark.parametrize("mode", ["keep", "abort"])
def test_health_during_an_update_whose_trainer_says_nothing(server: Server, weights: Weights, mode: str) -> None:
    for route in server.kind.health_routes:
        with broken_update(server, weights.other, stall=True, mode=mode) as update:
            assert_healthy(server, route)
            assert update.runs()


@pytest.mark.long
def test_health_during_a_long_update_of_many_buckets(server: Server, weights: Weights) -> None:
    """The trainer and the engine's ranks have no pause, and the test asks as often as it gets an answer."""
    asked = dict.fromkeys(server.kind.health_routes, 0)
    with ThreadPoolExecutor(1) as pool:
        update = pool.submit(
            server.control.update_weights, weights.other, bucket_bytes=SMALL_BUCKET_BYTES, transport="shm"
        )
        while not update.done():
            for route in asked:
                assert_healthy(server, route)
                asked[route] += not update.done()
        report = update.result()
    assert report["buckets"] > MANY
    assert min(asked.values()) > 0, "the update was too short"
    assert server.generate(PROMPT) == greedy(weights.other, PROMPT)


def test_a_burst_around_a_sleep_neither_hangs_nor_lies(server: Server, first_tokens: list[int]) -> None:
    """Requests that race with the sleep are answered fully, cut short, or refused; never with other tokens."""

    def ask(number: int) -> None:
        stream = bool(number % 2)
        response = server.post(PROMPT, stream=stream)
        if response.status_code == 200:
            events = events_of(response.text) if stream else []
            tokens = server.kind.streamed_tokens(events) if stream else server.kind.tokens(response.json())
            assert tokens == first_tokens[: len(tokens)]
            assert "EngineAsleepError" not in response.text, "a refusal is no answer"
        else:
            assert response.status_code == 503, response.text
            assert int(response.headers["retry-after"]) >= 1
            assert response.json()["error"]["code"] == "EngineAsleepError", response.text

    with ThreadPoolExecutor(8) as pool:
        asking = [pool.submit(ask, number) for number in range(48)]
        for _ in range(3):
            server.control.sleep(1)
            server.control.wake_up()
        for request in asking:
            request.result(timeout=120)
    assert server.generate(PROMPT) == first_tokens


def test_status_does_not_wait_for_an_update(server: Server, weights: Weights) -> None:
    with broken_update(server, weights.other, stall=True):
        for _ in range(3):
            start = time.monotonic()
            memory = server.control.memory()
            assert time.monotonic() - start < STALL_S / 2
            assert (memory["admitting"], memory["reason"]) == (False, "updating")
            assert server.post(PROMPT).status_code == 503
