"""What tests do with an `LLM` in its own process."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from integration.models import new_model
from integration.waiting import AT_ONCE_S
from rl_memory_plugins import EngineAsleepError
from rl_memory_plugins.trainer import push_weights

PROMPT = [5, 6, 7, 8]
SEED, OTHER_SEED = 1, 2


def generate(llm: Any, tokens: int = 8) -> list[int]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    return list(llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)[0].outputs[0].token_ids)


def restore(llm: Any, folder: Path, expected: list[int] | None = None) -> list[int]:
    """The known state, by correct calls alone: awake, valid, the checkpoint's weights, which answer `expected`."""
    llm.wake_up()
    if llm.memory_status()[0].content == "valid" and generate(llm) == expected:
        return expected
    push(llm, new_model(folder, SEED), receivers=len(llm.memory_status()[0].ranks))
    return generate(llm)


def push(llm: Any, tensors: Any, **options: Any) -> dict[str, Any]:
    """The trainer is a thread of the client's process; the engine is asked by Python."""
    post = lambda body: llm.update_weights_from_ipc(**body)  # noqa: E731
    return push_weights(post, tensors, timeout_s=60, bucket_bytes=1 << 20, **options)


def refused(call: Callable[[], Any]) -> str:
    start = time.monotonic()
    with pytest.raises(EngineAsleepError) as caught:
        call()
    assert time.monotonic() - start < AT_ONCE_S
    return str(caught.value.details["reason"])
