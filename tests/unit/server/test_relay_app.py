"""A relay over HTTP, as a trainer calls it."""

import contextlib
import math
import socket
import sys
import threading
from pathlib import Path

import pytest
import torch
import uvicorn
from fastapi.testclient import TestClient

UNIT = Path(__file__).parents[1]
sys.path[:0] = [str(UNIT / "trainer"), str(UNIT / "weights")]

from test_relay import OPTIONS, host  # noqa: E402
from toys import checkpoint, loaded  # noqa: E402

from rl_memory_plugins import answer_time  # noqa: E402
from rl_memory_plugins.client import ROUTES, EngineClient  # noqa: E402
from rl_memory_plugins.errors import (  # noqa: E402
    AuthenticationError,
    RLMemoryError,
    StateConflictError,
    UnsupportedError,
    WeightUpdateError,
)
from rl_memory_plugins.server.auth import ControlAuth  # noqa: E402
from rl_memory_plugins.server.relay_app import build_relay_app  # noqa: E402
from rl_memory_plugins.trainer import Adapter, RolloutHandoff, push_from_all  # noqa: E402
from rl_memory_plugins.trainer.relay import Relay  # noqa: E402


@contextlib.contextmanager
def serving(relay, key=""):
    """A relay's server. Yields its address."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(build_relay_app(relay, ControlAuth([key])), log_level="warning"))
        thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(10)


def test_a_handoff_through_a_relay():
    engines, relay = host()
    tensors = checkpoint(5)
    with serving(relay, "key") as url:
        engine = EngineClient(url, "key")
        assert engine.devices() == relay.devices()
        handoff = RolloutHandoff(engine, tensors, **OPTIONS)
        with handoff.training("7") as report:
            assert not any(one.open for one in engines)
        for one in engines:
            assert one.open and one.version == "7"
            for place, rank in enumerate(one.ranks):
                rank.model.assert_unchanged(loaded(tensors, place, len(one.ranks)))
        [answer] = report.update["engines"]
        assert answer["status"] == "updated" and answer["failed"] == [] and len(answer["engines"]) == 3
        assert engine.weights_state()["weight_version"] == "7"
        assert engine.memory()["behind"] == [one.weights_state() for one in engines]

        engines[1].fail["post_update"] = StateConflictError("busy")
        [answer] = handoff.sync("8").update["engines"]
        assert [(one["engine"], one["error"]["message"]) for one in answer["failed"]] == [(1, "busy")]
        assert [one.open for one in engines] == [True, False, True]


def test_the_state_of_a_relay_agrees_with_those_of_its_engines():
    engines, relay = host(2)
    asked = []

    def state(engine):
        asked.append(engine)
        return {"content": "valid" if len(asked) <= 2 else "stale", "weight_version": "1", "admitting": True}

    for one in engines:
        one.weights_state = lambda one=one: {**state(one), "reason": None}
    with serving(relay) as url:
        memory = EngineClient(url).memory()
    assert len(asked) == 2, "each engine is asked once"
    assert memory["content"] == "valid" and [one["content"] for one in memory["behind"]] == ["valid", "valid"]


def test_an_engine_behind_a_relay_that_does_not_tell_is_named():
    engines, relay = host(2)
    engines[0].weights_state = lambda: 1 / 0
    with serving(relay) as url:
        memory = EngineClient(url).memory()
        assert memory["behind"] == [None, engines[1].weights_state()]
        assert memory["engines"] == [{"ranks": [{"device": device} for device in relay.devices()]}]
        engines[1].weights_state = lambda: 1 / 0
        with pytest.raises(RLMemoryError, match="division"):
            EngineClient(url).memory()


def test_errors_are_typed():
    engines, relay = host(1)
    with serving(relay, "key") as url:
        with pytest.raises(AuthenticationError):
            EngineClient(url, "other").devices()
        engines[0].fail["sleep"] = StateConflictError("busy")
        with pytest.raises(StateConflictError, match="busy"):
            EngineClient(url, "key").sleep(2)
        with pytest.raises(WeightUpdateError, match="cannot connect"):
            EngineClient(url, "key").post_update(
                {"endpoints": {"*": "tcp://127.0.0.1:1"}, "token": "t", "timeout_s": 1.0}
            )


@pytest.mark.parametrize("body", [{}, {"endpoints": {}, "token": "t"}, {"endpoints": {"*": "x"}, "token": "t", "x": 1}])
def test_a_body_that_no_update_has_is_refused(body):
    _, relay = host(1)
    client = TestClient(build_relay_app(relay, ControlAuth()), "http://localhost", client=("127.0.0.1", 1))
    answer = client.post(f"{ROUTES}/update_weights_from_ipc", json=body)
    assert answer.status_code == 422, answer.text


CALLS = {
    "GET /is_sleeping": lambda engine: engine.is_sleeping(),
    "GET /timeline": lambda engine: engine.timeline(),
    "GET /weight_version": lambda engine: engine.weight_version(),
    "GET /weights/checksums": lambda engine: engine.checksums(),
    "POST /update_weights_from_checkpoint": lambda engine: engine.update_weights_from_checkpoint("/model"),
    "POST /remove_adapter": lambda engine: engine.remove_adapter("policy"),
    "POST /update_adapter": lambda engine: engine.update_adapter("policy", {"a": torch.zeros(1)}, {"r": 4}),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_no_relay_passes_on_says_what_it_passes_on(call):
    _, relay = host(1)
    with serving(relay, "key") as url:
        with pytest.raises(UnsupportedError, match="a relay passes on only") as caught:
            CALLS[call](EngineClient(url, "key"))
        assert caught.value.details["got"] == call
        assert caught.value.details["allowed"] == [
            "GET /memory", "POST /update_weights_from_ipc", "POST /sleep", "POST /wake_up"
        ]  # fmt: skip
        with pytest.raises(AuthenticationError):
            EngineClient(url, "other").weight_version()


def test_adapters_of_several_engines_are_refused_by_a_relay():
    _, relay = host(1)
    with serving(relay) as url, pytest.raises(UnsupportedError, match="a relay passes on only"):
        push_from_all([EngineClient(url)], {"a": torch.zeros(1)}, adapter=Adapter("policy", {"r": 4}), **OPTIONS)


def test_without_a_key_only_this_machines_clients_are_admitted():
    _, relay = host(1)
    for address, status in (("127.0.0.1", 200), ("192.0.2.1", 403)):
        client = TestClient(build_relay_app(relay, ControlAuth()), "http://localhost", client=(address, 1))
        assert client.get(f"{ROUTES}/memory").status_code == status


@contextlib.contextmanager
def chained():
    """A relay with an engine, and with a relay of three engines behind it. Yields all four, and its client."""
    (near, *_), _ = host(1)
    far, second = host(3)
    with serving(second, "inner") as inner, serving(Relay([near, EngineClient(inner, "inner")]), "key") as url:
        yield [near, *far], EngineClient(url, "key")


def test_a_handoff_through_two_relays():
    with chained() as (engines, client):
        handoff = RolloutHandoff(client, checkpoint(5), level=1, on_failure="continue", **OPTIONS)
        engines[2].fail["post_update"] = StateConflictError("busy")
        with handoff.training("7") as report:
            assert not any(one.open for one in engines)
        [failure] = report.failed
        assert (failure.engine, failure.behind, str(failure.error)) == (0, (1, 1), "busy")
        assert failure.state["weight_version"] is None and not failure.state["admitting"]
        assert [one.open for one in engines] == [True, True, False, True]
        assert handoff.sync("8").failed == []
        assert all(one.open and one.version == "8" for one in engines)


def test_relays_answer_before_their_caller_gives_up():
    with chained() as (engines, client):
        RolloutHandoff(client, checkpoint(5), level=1, **OPTIONS).sync("1")
        hangs = threading.Event()
        engines[2].weights_state = lambda: hangs.wait(60)
        try:
            behind = client.memory(timeout_s=2.0)["behind"]
        finally:
            hangs.set()
        assert [one["weight_version"] for one in behind] == ["1", "1"]


@pytest.mark.parametrize(("value", "seconds"), [("2.5", 2.5), ("", math.inf), ("-1", math.inf), ("nan", math.inf)])
def test_how_long_a_caller_waits_is_a_number_of_seconds(value, seconds):
    assert answer_time.heard({answer_time.HEADER: value}) == seconds
