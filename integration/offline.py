"""The engines' offline classes with dummy weights, for the benchmarks."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

LIKELIEST = 20
"""Of random weights in bfloat16, several tokens are equally likely at many places."""


class Token(NamedTuple):
    """One token of a greedy answer, with the log-probabilities of the `LIKELIEST` tokens."""

    token: int
    likeliest: dict[int, float]


def start_vllm(model: Path, **options: Any) -> Any:
    """A `vllm.LLM`."""
    import vllm

    return vllm.LLM(str(model), load_format="dummy", **options)


def vllm_answers(llm: Any, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """Greedy answers of exactly `tokens` tokens."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [list(answer.outputs[0].token_ids) for answer in llm.generate(requests, sampling, use_tqdm=False)]


def vllm_scored(llm: Any, prompts: list[list[int]], tokens: int) -> list[list[Token]]:
    """Greedy answers of exactly `tokens` tokens, of all prompts at once."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=LIKELIEST)
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    found = [answer.outputs[0] for answer in llm.generate(requests, sampling, use_tqdm=False)]
    return [
        [
            Token(token, {one: float(value.logprob) for one, value in likeliest.items()})
            for token, likeliest in zip(answer.token_ids, answer.logprobs, strict=True)
        ]
        for answer in found
    ]


def start_sglang(model: Path, **options: Any) -> Any:
    """An `sglang.Engine`."""
    import sglang

    return sglang.Engine(
        model_path=str(model),
        load_format="dummy",
        sampling_backend="pytorch",
        grammar_backend="none",
        skip_tokenizer_init=True,
        log_level="warning",
        **options,
    )


def sglang_answers(engine: Any, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """Greedy answers of exactly `tokens` tokens."""
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    answers = engine.generate(input_ids=prompts, sampling_params=[sampling] * len(prompts))
    return [list(answer["output_ids"]) for answer in answers]


def sglang_scored(engine: Any, prompts: list[list[int]], tokens: int) -> list[list[Token]]:
    """Greedy answers of exactly `tokens` tokens, of all prompts at once."""
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    answers = engine.generate(
        input_ids=prompts, sampling_params=[sampling] * len(prompts), return_logprob=True, top_logprobs_num=LIKELIEST
    )
    return [
        [
            Token(token, {one: float(value) for value, one, *_ in likeliest})
            for token, likeliest in zip(answer["output_ids"], answer["meta_info"]["output_top_logprobs"], strict=True)
        ]
        for answer in answers
    ]


def difference(first: list[Token], later: list[Token]) -> float:
    """By how much the log-probabilities of two answers to one prompt differ, at most, while their tokens are the same.

    A step computes other rounding errors in another batch, so two tokens that are nearly as likely may change places.
    At the first such token the difference of the two counts; a token that was not among the likeliest is infinity.
    """
    found = 0.0
    for one, other in zip(first, later, strict=True):
        if one.token != other.token:
            likelihood = one.likeliest
            return max(found, likelihood[one.token] - likelihood.get(other.token, float("-inf")))
        found = max(found, abs(one.likeliest[one.token] - other.likeliest[other.token]))
    return found


def most_different(first: list[list[Token]], later: list[list[Token]]) -> float:
    """The largest `difference` of the answers to several prompts."""
    return max(difference(one, other) for one, other in zip(first, later, strict=True))
