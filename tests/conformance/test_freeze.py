"""Mode `freeze`: running requests keep their KV cache, and no other request finds keys and values of former weights."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from integration.engines.base import Server
from rl_memory_plugins.errors import InvalidRequestError, StateConflictError
from tests.conformance.conftest import PROMPT, ROUNDING, Weights, greedy, long_answer, reference
from tests.conformance.trainers import broken_update, push

LONG_PROMPT = list(range(5, 165))  # fills whole blocks of the prefix cache
OTHER_PROMPT = list(range(205, 365))


def start_of_generation() -> None:
    time.sleep(0.5)  # some tokens exist then, and most do not


def lost(logits: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """By how much each token's logit is below the best; zero for the model's choice.

    Args:
        logits: The logits before each token, of shape (tokens, vocabulary).
    """
    return logits.max(1).values - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]


def answered_by(first: torch.nn.Module, other: torch.nn.Module, prompt: list[int], tokens: list[int]) -> int:
    """The number of tokens by the first weights. All others are the other weights' choice over the kept KV cache.

    The step that computes a token also computes the keys and values of the token before it. So the KV cache under the
    first weights ends before the last of their tokens.
    """
    from transformers import DynamicCache

    first, other = reference(first), reference(other)
    with torch.no_grad():
        logits = first(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        strange = (lost(logits, tokens) > ROUNDING).nonzero()
        assert len(strange), "all tokens are by the first weights"
        most = int(strange[0])
        cache = DynamicCache()
        first(torch.tensor([prompt + tokens[: most - 1]]), past_key_values=cache)
        for count in range(most, max(most - 8, 0), -1):  # a choice that both weights share looks like the first's
            cache.crop(len(prompt) + count - 1)
            logits = other(torch.tensor([tokens[count - 1 : -1]]), past_key_values=cache).logits[0]
            if float(lost(logits, tokens[count:]).max()) < ROUNDING:
                return count
    raise AssertionError(f"token {most} of {len(tokens)} is by neither the first weights nor the other ones over them")


def recomputed(server: Server, act: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any], int]:
    """The answer that `act` returns, and how often the engine computed a request again meanwhile."""
    before = server.kind.recomputations(server.http, {"meta_info": {"num_retractions": 0}})
    answer = act()
    return answer, server.kind.recomputations(server.http, answer) - before


def updated_meanwhile(server: Server, model: torch.nn.Module, mode: str) -> dict[str, Any]:
    with server.generating(LONG_PROMPT, long_answer(server)) as request:
        start_of_generation()
        push(server, model, mode=mode, weight_version=f"by {mode}")
        request.assert_running()
        return request.answer()


def test_a_request_goes_on_with_the_kv_cache_that_it_has(server: Server, weights: Weights) -> None:
    answer, times = recomputed(server, lambda: updated_meanwhile(server, weights.other, "freeze"))
    tokens = server.kind.tokens(answer)
    assert times == 0
    assert len(tokens) == long_answer(server)
    count = answered_by(weights.first, weights.other, LONG_PROMPT, tokens)
    spans = answer.get("meta_info", {}).get("weight_versions")
    if spans:  # of an engine that records the version of each token
        assert [(span["version"], span["start"], span["end"]) for span in spans][1:] == [
            ("by freeze", count, len(tokens))
        ]
        assert spans[0]["end"] == count
    assert server.generate(PROMPT) == greedy(weights.other, PROMPT)


def test_keep_computes_the_request_again(server: Server, weights: Weights) -> None:
    """So the counter and the tokens of the test above tell one mode from the other."""
    answer, times = recomputed(server, lambda: updated_meanwhile(server, weights.other, "keep"))
    assert times > 0
    with pytest.raises(AssertionError, match="by neither"):
        answered_by(weights.first, weights.other, LONG_PROMPT, server.kind.tokens(answer))


@pytest.mark.long
def test_a_second_keep_computes_the_request_again_too(server: Server, weights: Weights) -> None:
    with server.generating(LONG_PROMPT, long_answer(server)) as request:
        push(server, weights.other, mode="keep")
        start_of_generation()
        push(server, weights.first, mode="keep")
        tokens = server.kind.tokens(request.answer())
    logits = reference(weights.first)(torch.tensor([LONG_PROMPT + tokens])).logits[0, len(LONG_PROMPT) - 1 : -1]
    by_first = lost(logits.detach(), tokens) < ROUNDING
    strange = (~by_first).nonzero()
    assert len(strange), "no token is by the other weights"
    assert bool(by_first[int(strange[-1]) + 1 :].all()) and int(strange[-1]) < len(tokens) - 50


def test_new_requests_find_no_prefix_of_former_weights(server: Server, weights: Weights) -> None:
    expected = [(prompt, greedy(weights.other, prompt)) for prompt in (OTHER_PROMPT, LONG_PROMPT)]
    server.generate(OTHER_PROMPT)
    with server.generating(LONG_PROMPT, 3 * long_answer(server)) as request:
        start_of_generation()
        push(server, weights.other, mode="freeze")
        for prompt, tokens in expected:
            answers = [server.post(prompt).json() for _ in range(2)]
            assert [server.kind.tokens(answer) for answer in answers] == [tokens] * 2
            assert server.kind.cached_tokens(answers[0]) == 0
            if server.launch.dp == 1:  # else another engine may have answered
                assert server.kind.cached_tokens(answers[1]) > 0
        request.assert_running()
        tokens = server.kind.tokens(request.answer())
    # The prefix cache knows the prompt by the new weights, and the frozen request has filled blocks after it.
    prompt = LONG_PROMPT + tokens[:-1]
    answer = server.post(prompt).json()
    assert server.kind.cached_tokens(answer) <= len(LONG_PROMPT)
    assert server.kind.tokens(answer) == greedy(weights.other, prompt)


def test_a_frozen_request_leaves_no_prefix_behind(server: Server, weights: Weights) -> None:
    prompt = LONG_PROMPT + server.kind.tokens(updated_meanwhile(server, weights.other, "freeze"))
    answer = server.post(prompt).json()
    assert server.kind.cached_tokens(answer) == 0
    assert server.kind.tokens(answer) == greedy(weights.other, prompt)


@pytest.mark.long
def test_a_request_that_waits_begins_under_the_new_weights(server: Server, weights: Weights) -> None:
    count = server.launch.max_running * server.launch.dp
    with ThreadPoolExecutor(count + 1) as pool:
        running = [pool.submit(server.post, LONG_PROMPT, long_answer(server)) for _ in range(count)]
        server.wait_held(count)
        waiting = pool.submit(server.post, LONG_PROMPT)
        server.wait_held(count + 1)
        start_of_generation()
        push(server, weights.other, mode="freeze")
        answer = waiting.result(120).json()
        answers = [request.result(120).json() for request in running]
    assert server.kind.tokens(answer) == greedy(weights.other, LONG_PROMPT)
    assert server.kind.cached_tokens(answer) == 0
    for each in answers:
        answered_by(weights.first, weights.other, LONG_PROMPT, server.kind.tokens(each))


@pytest.mark.parametrize(("level", "tags"), [pytest.param(0, None, marks=pytest.mark.long), (1, ["weights"])])
def test_a_frozen_request_answers_as_if_nothing_had_happened(
    server: Server, weights: Weights, level: int, tags: list[str] | None
) -> None:
    def act() -> dict[str, Any]:
        with server.generating(LONG_PROMPT, long_answer(server)) as request:
            start_of_generation()
            server.control.sleep(level, tags, mode="freeze")
            assert server.post(PROMPT).status_code == 503
            time.sleep(1)  # whoever is wrong has the time to go on
            request.assert_running()
            server.control.wake_up()
            return request.answer()

    answer, times = recomputed(server, act)
    assert times == 0
    with pytest.raises(AssertionError, match="all tokens are by the first weights"):
        answered_by(weights.first, weights.other, LONG_PROMPT, server.kind.tokens(answer))


@pytest.mark.long
def test_the_weights_are_lent_and_updated_beside_a_frozen_request(server: Server, weights: Weights) -> None:
    def act() -> dict[str, Any]:
        with server.generating(LONG_PROMPT, long_answer(server)) as request:
            start_of_generation()
            server.control.sleep(2, ["weights"], mode="freeze")
            server.control.wake_up(["weights"])
            assert server.post(PROMPT).status_code == 503
            request.assert_running()
            push(server, weights.other, mode="freeze")
            return request.answer()

    answer, times = recomputed(server, act)
    assert times == 0
    answered_by(weights.first, weights.other, LONG_PROMPT, server.kind.tokens(answer))


def test_a_frozen_request_stands_still_until_the_weights_are_whole(server: Server, weights: Weights) -> None:
    def act() -> dict[str, Any]:
        with server.generating(LONG_PROMPT, long_answer(server)) as request:
            start_of_generation()
            broken_update(server, weights.other, mode="freeze")
            assert server.control.memory()["content"] == "failed"
            assert server.post(PROMPT).status_code == 503
            time.sleep(1)
            request.assert_running()
            push(server, weights.other, mode="freeze")
            return request.answer()

    answer, times = recomputed(server, act)
    assert times == 0
    answered_by(weights.first, weights.other, LONG_PROMPT, server.kind.tokens(answer))


@pytest.mark.parametrize("mode", ["abort", pytest.param("keep", marks=pytest.mark.long)])
def test_a_frozen_request_obeys_the_mode_of_the_next_call(server: Server, weights: Weights, mode: str) -> None:
    with server.generating(LONG_PROMPT, long_answer(server)) as request:
        start_of_generation()
        server.control.sleep(0, mode="freeze")
        server.control.sleep(1, mode=mode)
        if mode == "abort":
            assert server.kind.was_aborted(request.answer())
        server.control.wake_up()
        tokens = server.kind.tokens(request.answer())
    with pytest.raises(AssertionError, match="all tokens are by the first weights"):
        answered_by(weights.first, weights.other, LONG_PROMPT, tokens)


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("tags", [None, ["kv_cache"]])
def test_a_sleep_that_releases_the_kv_cache_cannot_freeze(
    server: Server, first_tokens: list[int], level: int, tags: list[str] | None
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        server.control.sleep(level, tags, mode="freeze")
    assert caught.value.details["allowed"] == ["abort", "wait", "keep"]
    assert server.generate(PROMPT) == first_tokens


def test_an_update_while_the_kv_cache_sleeps_cannot_freeze(server: Server, weights: Weights) -> None:
    server.control.sleep(1, ["kv_cache"])
    with pytest.raises(StateConflictError, match="KV cache is asleep"):
        push(server, weights.other, mode="freeze")
    assert server.control.memory()["content"] == "valid"
