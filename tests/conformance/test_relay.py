"""An update that a relay passes on to a running engine."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from integration.engines.base import REPOSITORY, Server
from integration.engines.ports import reserve_port
from integration.waiting import wait_until
from rl_memory_plugins.client import EngineClient
from rl_memory_plugins.errors import RLMemoryError, StateConflictError
from rl_memory_plugins.trainer import push_from_all
from rl_memory_plugins.trainer.relay import Relay
from tests.conformance.conftest import PROMPT, Weights, greedy
from tests.conformance.trainers import BUCKET_BYTES, BreakingSource


def test_weights_that_a_relay_passes_on_are_the_trainers(server: Server, weights: Weights) -> None:
    relay = Relay([server.control], bucket_bytes=BUCKET_BYTES)
    options = {"transport": "tcp", "bucket_bytes": BUCKET_BYTES}
    report = push_from_all(relay, weights.other, weight_version="relayed", **options)
    assert server.generate(PROMPT) == greedy(weights.other, PROMPT)
    assert server.control.weight_version() == "relayed"
    [received] = report["receivers"]
    assert received["transport"] == "tcp" and received["bytes"] == report["bytes"]
    assert len(received["relayed"]) == server.launch.ranks


def test_a_relay_that_is_killed_before_the_first_byte_leaves_the_engine_closed(
    server: Server, weights: Weights, first_tokens: list[int]
) -> None:
    ports, port = reserve_port()
    command = [sys.executable, "-m", "rl_memory_plugins.cli", "relay", server.url, "--port", str(port)]
    if server.launch.api_key:
        command += ["--engine-key", server.launch.api_key]
    process = subprocess.Popen(command, cwd=REPOSITORY)
    try:
        relay = EngineClient(f"http://127.0.0.1:{port}")
        wait_until(lambda: answers(relay), "the relay has started")
        release = threading.Event()
        source = BreakingSource(weights.other, 0, release)
        with ThreadPoolExecutor(1) as pool:
            options = {"transport": "tcp", "bucket_bytes": BUCKET_BYTES}
            update = pool.submit(push_from_all, relay, source, weight_version="relayed", **options)
            assert source.reached.wait(60)  # the engine has accepted, and hears nothing
            process.kill()
            process.wait(30)
            release.set()
            with pytest.raises(RLMemoryError) as caught:
                update.result(60)
        assert [outcome["state"] for outcome in caught.value.details["engines"]] == [None]
    finally:
        process.kill()
        process.wait(30)
        ports.close()
    wait_until(lambda: server.control.memory()["reason"] == "paused", "the engine has noticed")
    assert server.control.memory()["content"] == "valid"
    assert server.post(PROMPT).status_code == 503
    again = Relay([server.control], bucket_bytes=BUCKET_BYTES)
    with pytest.raises(StateConflictError, match="has not reached"):
        again.wake_up()
    push_from_all(again, weights.other, **options)
    again.wake_up()
    assert server.generate(PROMPT) == greedy(weights.other, PROMPT) != first_tokens


def answers(relay: EngineClient) -> bool:
    try:
        return bool(relay.devices())
    except RLMemoryError:
        return False
