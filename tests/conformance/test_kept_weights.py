"""Weights that a level-2 sleep keeps, and updates of all others."""

from __future__ import annotations

import copy
import fnmatch

import pytest
import torch

from integration.engines.base import Server
from rl_memory_plugins.errors import InvalidRequestError, ManifestError
from tests.conformance.conftest import PROMPT, Weights, greedy
from tests.conformance.trainers import push

KEEP = ["*.embed_tokens.*", "model.layers.0.*"]  # the same names in both engines and in the checkpoint


def others(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The tensors that are not kept."""
    return {
        name: tensor
        for name, tensor in model.state_dict().items()
        if not any(fnmatch.fnmatch(name, glob) for glob in KEEP)
    }


@pytest.fixture
def mixed(weights: Weights) -> torch.nn.Module:
    """The kept weights of the first model, and all others of the other."""
    model = copy.deepcopy(weights.first)
    model.load_state_dict(others(weights.other), strict=False)
    return model


def test_an_update_of_all_others_opens_the_engine(server: Server, weights: Weights, mixed: torch.nn.Module) -> None:
    for _ in range(2):  # the second time the engine has a plan of this update
        server.control.sleep(2, keep=KEEP)
        server.control.wake_up(["weights"])
        push(server, others(weights.other))
        server.control.wake_up()
        assert server.control.memory()["content"] == "valid"
        assert server.generate(PROMPT) == greedy(mixed, PROMPT)
        assert server.generate(PROMPT) not in (greedy(weights.first, PROMPT), greedy(weights.other, PROMPT))
        push(server, weights.first)


def test_kept_weights_alone_do_not_open_the_engine(server: Server, weights: Weights, mixed: torch.nn.Module) -> None:
    server.control.sleep(2, keep=KEEP)
    server.control.wake_up()
    assert server.control.memory()["content"] == "stale"
    assert server.post(PROMPT).status_code == 503
    too_few = others(weights.other)
    del too_few["model.norm.weight"]
    with pytest.raises(ManifestError) as caught:
        push(server, too_few)
    assert {mismatch["name"] for mismatch in caught.value.details["mismatches"]} == {"model.norm.weight"}
    assert server.control.memory()["content"] == "stale"
    push(server, others(weights.other))
    assert server.generate(PROMPT) == greedy(mixed, PROMPT)
    with pytest.raises(ManifestError):  # the next complete update is one of all weights again
        push(server, others(weights.first))


def test_an_update_may_bring_kept_weights_too(server: Server, weights: Weights) -> None:
    server.control.sleep(2, keep=KEEP)
    server.control.wake_up()
    push(server, weights.other)
    assert server.generate(PROMPT) == greedy(weights.other, PROMPT)


def test_a_sleep_that_keeps_all_weights_needs_no_update(server: Server, first_tokens: list[int]) -> None:
    for keep in ("*", ["model.*", "lm_head.*"]):
        changes = server.control.sleep(2, keep=keep)["report"]["changes"]
        assert {change["state"] for change in changes if change["tag"] == "weights"} == {"preserved"}
        server.control.wake_up()
        assert server.control.memory()["content"] == "valid"
        assert server.generate(PROMPT) == first_tokens


def test_globs_may_come_in_the_query(server: Server, weights: Weights, mixed: torch.nn.Module) -> None:
    query = "&".join(f"keep={glob}" for glob in KEEP)
    response = server.http.post(f"/v1/rl_memory/sleep?level=2&{query}")
    assert response.status_code == 200, response.text
    server.control.wake_up()
    push(server, others(weights.other))
    assert server.generate(PROMPT) == greedy(mixed, PROMPT)


@pytest.mark.parametrize("level", [1, 2])
def test_a_glob_that_matches_nothing_names_the_nearest(server: Server, level: int, first_tokens: list[int]) -> None:
    with pytest.raises(InvalidRequestError, match="model.embed_tokens.weight") as caught:
        server.control.sleep(level, keep=[*KEEP, "model.embed_token.weight"])
    assert caught.value.details["got"] == ["model.embed_token.weight"]
    assert server.control.memory()["admitting"]
    assert server.generate(PROMPT) == first_tokens
