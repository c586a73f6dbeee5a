"""Weight updates: right ones, wrong ones, and ones that break off."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from integration.engines.base import Server
from integration.waiting import wait_until
from rl_memory_plugins.errors import ManifestError, RLMemoryError, StateConflictError, WeightUpdateError
from tests.conformance.conftest import PROMPT, STALL_S, Weights, greedy, long_answer
from tests.conformance.trainers import broken_update, push, push_with_wrong_token


def test_the_engine_answers_with_the_new_weights(server: Server, weights: Weights, first_tokens: list[int]) -> None:
    report = push(server, weights.other)
    assert server.generate(PROMPT) == greedy(weights.other, PROMPT) != first_tokens
    assert report["buckets"] > 2
    push(server, weights.first)
    assert server.generate(PROMPT) == greedy(weights.first, PROMPT) == first_tokens


def test_the_handoff_of_a_training_step(server: Server, weights: Weights) -> None:
    """Discard, wake the weights, update, wake the cache: the cycle that trainers run."""
    for model in (weights.other, weights.first):
        server.control.sleep(2)
        server.control.wake_up(["weights"])
        push(server, model)
        assert not server.control.memory()["admitting"]
        server.control.wake_up(["kv_cache", "cuda_graph"])
        assert server.generate(PROMPT) == greedy(model, PROMPT)


def test_the_prefix_cache_does_not_answer_for_old_weights(server: Server, weights: Weights) -> None:
    prompt = list(range(5, 165))  # long enough to fill whole cache blocks
    server.generate(prompt)
    push(server, weights.other)
    assert server.generate(prompt) == greedy(weights.other, prompt)


def test_versions_and_checksums(server: Server, weights: Weights) -> None:
    push(server, weights.other, weight_version="step-41")
    assert server.control.weight_version() == "step-41"
    assert server.control.memory()["weight_version"] == "step-41"
    checksums = server.control.checksums()
    assert checksums["layout"] == "checkpoint"
    own = weights.checksums(weights.other)
    assert checksums["tensors"] == own
    if server.launch.dp > 1:  # every replica, each by itself
        assert checksums["differing"] == []
        assert [engine["tensors"] for engine in checksums["engines"]] == [own] * server.launch.dp
    else:
        assert set(checksums) == {"layout", "tensors", "partial", "opaque"}
    push(server, weights.first)
    assert server.control.weight_version() != "step-41"
    assert server.control.checksums()["tensors"] != own


def test_every_mismatch_is_in_one_answer(server: Server, weights: Weights, first_tokens: list[int]) -> None:
    tensors = dict(weights.other.state_dict())
    names = [name for name in tensors if "layers" in name and name.endswith("weight")]
    tensors[names[0]] = torch.zeros(3, 5)
    tensors[names[5]] = tensors[names[5]].double()
    tensors["model.layers.0.self_attn.unheard_of.weight"] = torch.zeros(4, 4)
    del tensors["model.norm.weight"]
    with pytest.raises(ManifestError) as caught:
        push(server, tensors)
    found = {(mismatch["kind"], mismatch["name"]) for mismatch in caught.value.details["mismatches"]}
    assert {("shape", names[0]), ("dtype", names[5])} <= found
    assert ("unknown", "model.layers.0.self_attn.unheard_of.weight") in found
    assert ("missing", "model.norm.weight") in found
    assert server.control.memory()["admitting"]
    assert server.generate(PROMPT) == first_tokens


def test_a_duplicate_name_is_refused(server: Server, weights: Weights, first_tokens: list[int]) -> None:
    class Twice:
        def __init__(self) -> None:
            self._tensors = [*weights.other.state_dict().items()]
            self._tensors.append(self._tensors[3])

        def specs(self):
            from rl_memory_plugins.weights.source import spec_of

            return [spec_of(name, tensor) for name, tensor in self._tensors]

        def tensors(self):
            yield from self._tensors

    with pytest.raises(ManifestError) as caught:
        push(server, Twice())
    assert {mismatch["kind"] for mismatch in caught.value.details["mismatches"]} == {"duplicate"}
    assert server.generate(PROMPT) == first_tokens


def test_a_wrong_token_is_refused(server: Server, weights: Weights, first_tokens: list[int]) -> None:
    with pytest.raises(RLMemoryError):
        push_with_wrong_token(server, weights.other)
    assert server.control.memory()["content"] == "valid"
    assert server.generate(PROMPT) == first_tokens


def test_a_trainer_that_is_not_there(server: Server, first_tokens: list[int]) -> None:
    with pytest.raises(WeightUpdateError):
        server.control.post_update({"endpoints": {"*": "/nonexistent/weights.sock"}, "token": "t"})
    assert server.control.memory()["content"] == "valid"
    assert server.generate(PROMPT) == first_tokens


def test_a_broken_update_closes_the_engine_until_a_complete_one(server: Server, weights: Weights) -> None:
    assert isinstance(broken_update(server, weights.other).error, WeightUpdateError)
    assert server.control.memory()["content"] == "failed"
    assert server.post(PROMPT).status_code == 503
    server.control.sleep(1)  # what failed does not become valid by a sleep that preserves
    server.control.wake_up()
    assert server.control.memory()["content"] == "failed"
    push(server, weights.other)
    assert server.generate(PROMPT) == greedy(weights.other, PROMPT)


def test_a_trainer_that_stalls(server: Server, weights: Weights) -> None:
    with broken_update(server, weights.other, stall=True, timeout_s=None) as update:
        wait_until(lambda: server.control.memory()["reason"] != "updating", "the engine gives up")
        assert server.control.memory()["reason"] == "failed"
    assert update.error is not None
    assert f"within {STALL_S:g} s" in update.error.message  # the option: the update named no time
    push(server, weights.first)


def test_a_second_update_and_a_sleep_are_refused_while_one_runs(server: Server, weights: Weights) -> None:
    with broken_update(server, weights.other, stall=True):
        with pytest.raises(StateConflictError):
            push(server, weights.first)
        with pytest.raises(StateConflictError):
            server.control.sleep(1)
    push(server, weights.first)


def test_a_partial_update_changes_only_what_it_names(server: Server, weights: Weights) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    mixed = {key: value.clone() for key, value in weights.first.state_dict().items()}
    mixed[name] = weights.other.state_dict()[name]
    push(server, {name: mixed[name]}, partial=True)
    after_partial = server.generate(PROMPT, 16)
    push(server, mixed)
    assert server.generate(PROMPT, 16) == after_partial


def test_a_partial_update_needs_valid_weights(server: Server, weights: Weights) -> None:
    server.control.sleep(2)
    server.control.wake_up()
    with pytest.raises(StateConflictError):
        push(server, {"model.norm.weight": weights.first.state_dict()["model.norm.weight"]}, partial=True)
    assert server.control.memory()["content"] == "stale"


def test_an_update_while_generating(server: Server, weights: Weights) -> None:
    with server.generating(PROMPT, long_answer(server)) as request:
        push(server, weights.other, mode="keep")
        assert len(server.kind.tokens(request.answer())) == long_answer(server)
    assert server.generate(PROMPT) == greedy(weights.other, PROMPT)


def test_two_clients_that_push_at_once(server: Server, weights: Weights) -> None:
    """One of them may be refused; what is there in the end is one of the two, whole."""

    def attempt(model: torch.nn.Module) -> None:
        try:
            push(server, model)
        except RLMemoryError:
            pass

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(attempt, [weights.first, weights.other]))
    assert server.generate(PROMPT) in (greedy(weights.first, PROMPT), greedy(weights.other, PROMPT))
