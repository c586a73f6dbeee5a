"""NaNs in the KV cache: vLLM's attention on CPUs multiplies what lies behind a request's last token by zero."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from integration.models import new_model
from tests.vllm.calls import PROMPT, SEED, push
from tests.vllm.child import Child
from tests.vllm.conftest import engine_options, environment


def make(folder: Path) -> Any:
    from rl_memory_plugins.vllm import LLM

    return LLM(rl_memory=True, **engine_options(folder, max_model_len=256, num_gpu_blocks_override=5))


def broken(folder: Path) -> torch.nn.Module:
    """Weights with which every key and value is a NaN."""
    model = new_model(folder, SEED)
    with torch.no_grad():
        model.get_input_embeddings().weight.fill_(math.nan)
    return model


def fill(llm: Any) -> None:
    """Have requests write into every block but the first, which vLLM uses for nothing."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=1)
    llm.generate([{"prompt_token_ids": [token] * 254} for token in (5, 6)], params, use_tqdm=False)


def answers(llm: Any) -> list[list[int]]:
    """Of requests that use every block."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompts = [{"prompt_token_ids": PROMPT}] * 4
    return [list(one.outputs[0].token_ids) for one in llm.generate(prompts, params, use_tqdm=False)]


def test_no_nan_of_former_weights_reaches_the_answers_of_the_next(model_folder: Path, first_tokens: list[int]) -> None:
    with Child(make, model_folder, environment=environment(model_folder)) as engine:
        assert engine(answers) == [first_tokens] * 4
        engine(push, broken(model_folder))
        engine(fill)
        engine(push, new_model(model_folder, SEED))
        assert engine(answers) == [first_tokens] * 4
