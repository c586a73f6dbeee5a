"""An engine that sleeps while nobody asks it, and wakes for a request: on a server with these options."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from integration.engines import ENGINES
from integration.engines.base import Launch, Server
from integration.waiting import wait_until
from tests.conformance.conftest import PROMPT

IDLE_S = 1.5


@pytest.fixture(scope="module")
def dozing(
    request: pytest.FixtureRequest, launch: Launch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    options = {"idle_sleep_s": IDLE_S, "wake_on_request_s": 120, "poison": True}
    kind = ENGINES[request.config.getoption("--engine")]()
    log = tmp_path_factory.mktemp("dozing") / "server.log"
    with Server(kind, dataclasses.replace(launch, options=options), log) as server:
        yield server


@pytest.fixture(scope="module")
def tokens(dozing: Server) -> list[int]:
    return dozing.generate(PROMPT)


def sleeps(server: Server) -> bool:
    return server.control.is_sleeping() and all(engine["idle"] for engine in server.control.memory()["engines"])


def test_it_sleeps_and_requests_wake_it(dozing: Server, tokens: list[int]) -> None:
    for _ in range(3):
        wait_until(lambda: sleeps(dozing), "the idle engine sleeps")
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda _: dozing.generate(PROMPT), range(4)))
        assert answers == [tokens] * 4

    def is_open() -> bool:
        assert dozing.generate(PROMPT) == tokens
        memory = dozing.control.memory()
        return memory["admitting"] and not any(engine["idle"] for engine in memory["engines"])

    wait_until(is_open, "it is open after a request")


def test_a_long_request_keeps_it_awake(dozing: Server, tokens: list[int]) -> None:
    with dozing.generating(PROMPT, 1800) as request:
        time.sleep(2 * IDLE_S)
        request.assert_running()
        assert dozing.control.memory()["admitting"]
        dozing.control.sleep(0, mode="abort")
        request.answer()
    dozing.control.wake_up()
    assert dozing.generate(PROMPT) == tokens


def test_a_request_never_wakes_an_engine_that_a_caller_has_put_to_sleep(dozing: Server, tokens: list[int]) -> None:
    wait_until(lambda: sleeps(dozing), "the idle engine sleeps")
    dozing.control.sleep(1)
    assert dozing.post(PROMPT).status_code == 503
    dozing.control.wake_up(["weights"])
    time.sleep(2 * IDLE_S)
    assert dozing.post(PROMPT).status_code == 503
    assert dozing.control.memory()["reason"] == "asleep"
    dozing.control.wake_up()
    assert dozing.generate(PROMPT) == tokens


def test_no_request_at_any_moment_fails(dozing: Server, tokens: list[int]) -> None:
    """Requests come about when the engine falls asleep."""
    seed = random.randrange(1 << 32)
    gaps = random.Random(seed)
    for _ in range(6):
        time.sleep(IDLE_S + gaps.uniform(-0.3, 0.3))
        assert dozing.generate(PROMPT) == tokens, f"seed {seed}"
