"""Updates over TCP: of the whole engine, with TLS and without."""

from __future__ import annotations

import pytest

from integration.engines.base import Server
from rl_memory_plugins.errors import InvalidRequestError, PermissionDeniedError, WeightUpdateError
from tests.conformance.conftest import PROMPT, Weights, greedy
from tests.conformance.trainers import broken_update, push

ELSEWHERE = "192.0.2.77"  # an address for documentation: no host has it


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_the_engine_answers_with_weights_that_came_over_tcp(server: Server, weights: Weights, tls: bool) -> None:
    report = push(server, weights.other, transport="tcp", advertise=["127.0.0.2", "::1"], tls=tls, weight_version="tcp")
    assert server.generate(PROMPT) == greedy(weights.other, PROMPT)
    assert {rank["transport"] for rank in report["receivers"]} == {"tcp"}
    assert server.control.checksums()["tensors"] == weights.checksums(weights.other)
    assert server.control.weight_version() == "tcp"


@pytest.mark.parametrize("transport", ["tcp", "gloo"])
def test_only_what_a_rank_needs_travels(server: Server, weights: Weights, transport: str) -> None:
    for model in (weights.other, weights.first, weights.other):  # with gloo, by one communicator
        report = push(server, model, transport=transport)
        assert server.generate(PROMPT) == greedy(model, PROMPT)
        assert {rank["transport"] for rank in report["receivers"]} == {transport}
        largest = max(rank["bytes"] for rank in report["receivers"])
        assert largest <= (0.6 if server.launch.ranks_of_engine >= 2 else 1.0) * report["bytes"]
    assert server.control.checksums()["tensors"] == weights.checksums(weights.other)


def test_a_gloo_update_that_breaks_off_closes_the_engine_and_the_next_is_right(
    server: Server, weights: Weights
) -> None:
    push(server, weights.first, transport="gloo")
    broken = broken_update(server, weights.other, transport="gloo")
    assert isinstance(broken.error, WeightUpdateError) and "broke off" in str(broken.error)
    assert server.control.memory()["content"] == "failed"
    assert server.post(PROMPT).status_code == 503
    push(server, weights.other, transport="gloo")
    assert server.generate(PROMPT) == greedy(weights.other, PROMPT)


def test_an_engine_on_the_trainers_host_takes_the_unix_socket(server: Server, weights: Weights) -> None:
    report = push(server, weights.other, advertise="127.0.0.1", tls=True)
    assert "tcp" not in {rank["transport"] for rank in report["receivers"]}
    assert server.generate(PROMPT) == greedy(weights.other, PROMPT)


def test_an_update_over_tcp_that_breaks_off_closes_the_engine(server: Server, weights: Weights) -> None:
    broken = broken_update(server, weights.other, transport="tcp", tls=True)
    assert isinstance(broken.error, WeightUpdateError) and "broke off" in str(broken.error)
    assert server.control.memory()["content"] == "failed"
    assert server.post(PROMPT).status_code == 503
    push(server, weights.other, transport="tcp", tls=True)
    assert server.generate(PROMPT) == greedy(weights.other, PROMPT)


def test_the_engine_connects_to_no_other_host(server: Server, first_tokens: list[int]) -> None:
    body = {"endpoints": {"*": [f"tcp://{ELSEWHERE}:22", f"tcp://{ELSEWHERE}:80"]}, "token": "any", "timeout_s": 5}
    with pytest.raises(PermissionDeniedError, match="update_hosts") as error:
        server.control.post_update(body)
    assert error.value.details["got"] == ELSEWHERE
    assert server.control.memory()["content"] == "valid"
    assert server.generate(PROMPT) == first_tokens


@pytest.mark.parametrize("place", ["tcp://localhost:5000", "tcp://127.0.0.1", "tls://127.0.0.1:5000", []])
def test_a_malformed_place_is_refused(server: Server, first_tokens: list[int], place: str | list[str]) -> None:
    with pytest.raises(InvalidRequestError, match="endpoint"):
        server.control.post_update({"endpoints": {"*": place}, "token": "any"})
    assert server.generate(PROMPT) == first_tokens
