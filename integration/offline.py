"""The engines' offline classes with dummy weights, for the benchmarks."""

from __future__ import annotations

from pathlib import Path
from typing import Any


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
