"""Two servers' engines that share a device: at most one is awake, and no request fails."""

from __future__ import annotations

import dataclasses
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from integration.engines import ENGINES
from integration.engines.base import Launch, Server
from integration.models import SHAPES, write_model
from integration.waiting import wait_until
from tests.conformance.conftest import OTHER_SEED, PROMPT
from tests.monitoring import scrape

TURN_S = 0.3


@pytest.fixture(scope="module")
def servers(
    request: pytest.FixtureRequest, launch: Launch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Server]]:
    """One has the turn when the other starts."""
    folder = tmp_path_factory.mktemp("turns")
    kind = ENGINES[request.config.getoption("--engine")]
    other = write_model(folder / "other", SHAPES["small"], dtype=launch.dtype, seed=OTHER_SEED)
    options = {"take_turns_s": TURN_S, "wake_on_request_s": 120, "poison": True}
    launches = [dataclasses.replace(launch, model=model, options=options) for model in (launch.model, other)]
    with Server(kind(), launches[0], folder / "0.log") as first:
        first.generate(PROMPT)
        with Server(kind(), launches[1], folder / "1.log") as second:
            yield [first, second]


def is_awake(server: Server) -> bool:
    """Whether the engine has its memory, or is about to take it back or to give it up."""
    [engine] = server.control.memory()["engines"]
    return engine["busy"] or all(tag["state"] == "resident" for tag in engine["ranks"][0]["tags"].values())


@pytest.mark.long
def test_one_of_two_engines_sleeps_once_both_have_started(servers: list[Server]) -> None:
    """SGLang asks a new engine something, which makes the first one sleep."""
    wait_until(lambda: sum(server.control.is_sleeping() for server in servers) == 1, "one engine sleeps")


@pytest.mark.long
def test_random_traffic(request: pytest.FixtureRequest, servers: list[Server]) -> None:
    tokens = [server.generate(PROMPT) for server in servers]
    assert tokens[0] != tokens[1]
    seed = random.randrange(1 << 32)
    end = time.monotonic() + request.config.getoption("--traffic-s")
    together: list[str] = []
    stop = threading.Event()

    def look() -> None:
        """An engine is asked before and after the other: awake both times within a turn, it was awake in between."""
        while not stop.is_set():
            start = time.monotonic()
            both = is_awake(servers[0]) and is_awake(servers[1]) and is_awake(servers[0])
            if both and time.monotonic() - start < TURN_S:
                together.append(time.strftime("%X"))
            time.sleep(0.02)

    def ask(number: int) -> None:
        rng, count = random.Random(seed + number), 0
        while count < 2 or time.monotonic() < end:
            time.sleep(rng.choice((0.0, 0.1, 1.0)))
            which = rng.randrange(2)
            assert servers[which].generate(PROMPT) == tokens[which], f"seed {seed}"
            count += 1

    with ThreadPoolExecutor(4) as pool:
        looking = pool.submit(look)
        try:
            list(pool.map(ask, range(3)))
        finally:
            stop.set()
        looking.result()
    assert not together, f"both engines were awake, seed {seed}"
    assert not any(scrape(server).total("transition_failures_total") for server in servers)
