"""Sleeping while a request runs: abort, wait and keep."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from integration.engines.base import Server
from integration.waiting import wait_until
from rl_memory_plugins.errors import DrainTimeoutError, StateConflictError
from tests.conformance.conftest import PROMPT, Weights, assert_greedy, long_answer


def assert_same(server: Server, weights: Weights, tokens: list[int], expected: list[int]) -> None:
    """What a long request answered, and what it answers undisturbed."""
    assert len(tokens) == len(expected)
    if server.launch.device == "cpu":
        assert tokens == expected
    else:
        assert_greedy(weights.first, PROMPT, tokens)
        assert_greedy(weights.first, PROMPT, expected)


def test_abort_ends_the_request_early(server: Server, first_tokens: list[int]) -> None:
    length = 1800
    with server.generating(PROMPT, length) as request:
        server.control.sleep(1, mode="abort")
        answer = request.answer()
    assert server.kind.was_aborted(answer)
    tokens = server.kind.tokens(answer)
    assert len(tokens) < length
    assert tokens[:8] == first_tokens[: len(tokens)]
    server.control.wake_up()
    assert server.generate(PROMPT) == first_tokens


def test_wait_lets_the_request_finish(server: Server, weights: Weights, first_tokens: list[int]) -> None:
    expected = server.generate(PROMPT, long_answer(server))
    with server.generating(PROMPT, long_answer(server)) as request:
        server.control.sleep(1, mode="wait")
        assert_same(server, weights, server.kind.tokens(request.answer()), expected)
    server.control.wake_up()
    assert server.generate(PROMPT) == first_tokens


@pytest.mark.long
def test_wait_lets_queued_requests_finish_too(server: Server) -> None:
    """More than can run at a time. vLLM's own wait leaves the others in its queue for as long as the engine sleeps."""
    count, length = server.launch.max_running + 2, long_answer(server) // 2
    with ThreadPoolExecutor(count) as pool:
        asking = [pool.submit(server.post, [*PROMPT, n], length) for n in range(count)]
        server.wait_held(count)
        server.control.sleep(1, mode="wait")
        answers = [request.result(120) for request in asking]
        server.control.wake_up()
    assert {len(server.kind.tokens(answer.json())) for answer in answers} == {length}


def test_keep_goes_on_after_the_wake(server: Server, weights: Weights) -> None:
    expected = server.generate(PROMPT, long_answer(server))
    with server.generating(PROMPT, long_answer(server)) as request:
        server.control.sleep(1, mode="keep")
        time.sleep(1)  # whoever is wrong has the time to go on
        request.assert_running()
        server.control.wake_up()
        assert_same(server, weights, server.kind.tokens(request.answer()), expected)


def test_new_requests_are_refused_while_a_sleep_waits(server: Server, weights: Weights) -> None:
    with ThreadPoolExecutor(1) as pool, server.generating(PROMPT, long_answer(server)) as request:
        sleeping = pool.submit(server.control.sleep, 1, mode="wait")
        server.wait_admitting(False)
        # Requests are routed to all data-parallel engines, of which one waits and the others have nothing to wait for.
        assert {server.post(PROMPT).status_code for _ in range(20)} == {503}
        with pytest.raises(StateConflictError):
            server.control.wake_up()
        with pytest.raises(StateConflictError):  # it would stop the request that the other sleep waits for
            server.control.sleep(1, mode="keep")
        with pytest.raises(StateConflictError):
            server.control.update_weights(weights.other)
        request.assert_running()
        assert sleeping.result()["status"] == "sleeping"
        assert len(server.kind.tokens(request.answer())) == long_answer(server)


def test_abort_overtakes_a_sleep_that_waits(server: Server, first_tokens: list[int]) -> None:
    with ThreadPoolExecutor(1) as pool, server.generating(PROMPT, 1800) as request:
        waiting = pool.submit(server.control.sleep, 1, mode="wait")
        server.wait_admitting(False)
        server.control.sleep(1, mode="abort")
        assert waiting.result()["status"] == "sleeping"
        assert server.kind.was_aborted(request.answer())
    server.control.wake_up()
    assert server.generate(PROMPT) == first_tokens


@pytest.mark.long
def test_a_wait_that_takes_too_long_gives_up_and_reopens(server: Server, first_tokens: list[int]) -> None:
    # Few run at a time. All are more than the engine answers in `DRAIN_S`.
    count = 128 if server.launch.device == "cpu" else 512
    with ThreadPoolExecutor(count) as pool:
        asking = [pool.submit(server.post, PROMPT, 1800) for _ in range(count)]
        wait_until(lambda: server.kind.requests_held(server.http) > count // 2, "most requests have come")
        with pytest.raises(DrainTimeoutError):
            server.control.sleep(1, mode="wait")
        assert server.control.memory()["admitting"]
        assert not server.control.is_sleeping()
        server.control.sleep(1, mode="abort")
        answers = [request.result(120) for request in asking]
    assert {answer.status_code for answer in answers} <= {200, 503}
    assert any(server.kind.was_aborted(answer.json()) for answer in answers if answer.status_code == 200)
    server.control.wake_up()
    assert server.generate(PROMPT) == first_tokens
