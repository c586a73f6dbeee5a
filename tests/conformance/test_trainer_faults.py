"""Trainers that die, at each point of an update, and updates that come twice."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from integration.engines.base import Server
from integration.waiting import wait_until
from rl_memory_plugins.errors import RLMemoryError
from rl_memory_plugins.trainer import push_weights
from tests.conformance.conftest import PROMPT, Weights, greedy
from tests.conformance.trainers import BUCKET_BYTES, push, start_trainer_that_dies

OVER_S = 30


def content_after_the_update(server: Server) -> str:
    """What the weights are once the engine has given the update up."""
    wait_until(lambda: server.control.memory()["reason"] in (None, "failed"), "the engine waits no more", OVER_S)
    return str(server.control.memory()["content"])


@pytest.mark.parametrize(
    ("when", "message", "contents"),
    [
        ("before", "Offer", {"valid"}),
        ("before", "Bucket", {"valid"}),
        ("after", "Bucket", {"failed"}),
        ("before", "Commit", {"failed"}),
        ("after", "Commit", {"valid", "failed"}),  # whether the engine could still say that it has everything
    ],
)
def test_a_trainer_that_dies(
    server: Server,
    weights: Weights,
    first_tokens: list[int],
    tmp_path: Path,
    when: str,
    message: str,
    contents: set[str],
) -> None:
    trainer = start_trainer_that_dies(server, weights.other, tmp_path / "model.safetensors", when, message)
    assert trainer.wait(120) == -signal.SIGKILL
    content = content_after_the_update(server)
    assert content in contents
    if content == "failed":
        assert server.post(PROMPT).status_code == 503
    else:
        assert server.generate(PROMPT) == (greedy(weights.other, PROMPT) if when == "after" else first_tokens)
    push(server, weights.other)
    assert server.generate(PROMPT) == greedy(weights.other, PROMPT)


def test_the_same_update_again_changes_nothing(server: Server, weights: Weights) -> None:
    push(server, weights.other, weight_version="twice")
    checksums = server.control.checksums()
    push(server, weights.other, weight_version="twice")
    assert server.control.checksums() == checksums
    assert server.control.weight_version() == "twice"
    assert server.generate(PROMPT) == greedy(weights.other, PROMPT)


def test_a_call_that_is_made_twice_updates_once(server: Server, weights: Weights) -> None:
    """As a proxy that retries would: at the same time, and again when the update is over."""
    refused: list[RLMemoryError] = []

    def post(body: dict[str, Any]) -> dict[str, Any]:
        answers: list[dict[str, Any]] = []

        def call() -> None:
            try:
                answers.append(server.control.post_update(body))
            except RLMemoryError as error:
                refused.append(error)

        both = [threading.Thread(target=call) for _ in range(2)]
        for thread in both:
            thread.start()
        for thread in both:
            thread.join(OVER_S)
            assert not thread.is_alive()
        call()
        (answer,) = answers
        return answer

    push_weights(post, weights.other, receivers=server.control.devices(), bucket_bytes=BUCKET_BYTES)
    assert len(refused) == 2
    assert server.control.memory()["admitting"]
    assert server.generate(PROMPT) == greedy(weights.other, PROMPT)
