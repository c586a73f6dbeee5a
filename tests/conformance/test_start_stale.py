"""An engine that starts closed until an update: a supervisor has started its server again beside newer ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from integration.engines import ENGINES
from integration.engines.base import Launch, Server
from rl_memory_plugins.errors import ManifestError, StateConflictError
from rl_memory_plugins.trainer import ModelSource, RolloutHandoff
from tests.conformance.conftest import PROMPT, Weights, greedy
from tests.conformance.trainers import BUCKET_BYTES, push
from tests.monitoring import scrape


@pytest.fixture(scope="module")
def restarted(
    request: pytest.FixtureRequest, launch: Launch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    kind = ENGINES[request.config.getoption("--engine")]()
    options = {**launch.options, "start_stale": True}
    log = tmp_path_factory.mktemp("restarted") / "server.log"
    with Server(kind, dataclasses.replace(launch, options=options), log) as server:
        yield server


def assert_closed(server: Server) -> None:
    """It lives, says that it is stale, and answers nothing."""
    assert server.is_alive()
    memory = server.control.memory()
    assert (memory["content"], memory["reason"], memory["admitting"]) == ("stale", "stale", False)
    assert all(rank["content"] == "stale" for engine in memory["engines"] for rank in engine["ranks"])
    for stream in (False, True):
        answer = server.post(PROMPT, stream=stream)
        assert answer.status_code == 503 and answer.headers["retry-after"]
        assert answer.json()["error"]["details"]["reason"] == "stale"
    shown = scrape(server)
    assert shown.present("content_state", "state") == {"stale"}
    assert shown.present("refusal_reason", "reason") == {"stale"}


def test_it_answers_nothing_until_the_next_handoff(restarted: Server, weights: Weights) -> None:
    control = restarted.control
    assert_closed(restarted)
    assert not control.is_sleeping()
    parts = dict(weights.other.named_parameters())
    norm = {"model.norm.weight": parts["model.norm.weight"]}
    with pytest.raises(StateConflictError, match="needs valid weights.* stale"):
        push(restarted, norm, partial=True)
    with pytest.raises(ManifestError):
        push(restarted, norm)
    for level in (0, 1):
        control.sleep(level)
        control.wake_up()
    assert_closed(restarted)
    with RolloutHandoff(control, ModelSource(weights.other), bucket_bytes=BUCKET_BYTES).training("41"):
        pass
    assert restarted.generate(PROMPT) == greedy(weights.other, PROMPT)
    assert control.weight_version() == "41"
    assert control.memory()["content"] == "valid"
    push(restarted, norm, partial=True)
    assert restarted.generate(PROMPT) == greedy(weights.other, PROMPT)
