"""Updates over frozen requests on an engine whose FP8 KV cache has scales."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from integration.kinds import run
from integration.kinds.checkpoints import tensors_of
from integration.kinds.subject import Subject, Vllm
from rl_memory_plugins.errors import WeightUpdateError

KIND = "FP8 KV cache with scales"


def begin(subject: Any) -> Any:
    """Begin a request that does not end by itself in the time of this test. Keep what this returns."""
    prompt, tokens = [5, 6, 7], 480
    if isinstance(subject, Vllm):
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        return subject.engine.llm_engine.add_request("long", {"prompt_token_ids": prompt}, params)
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    request = subject.engine.async_generate(input_ids=prompt, sampling_params=sampling)
    return subject.engine.loop.create_task(request)  # it is sent when the loop runs, as it does in an update


def tried(subject: Subject, folder: Path) -> dict[str, Any]:
    """What happens to updates with the scales of another checkpoint, first over a request."""
    weights = tensors_of(folder)
    found: dict[str, Any] = {}
    request = begin(subject)
    for number, mode in enumerate(["freeze", "freeze", "keep", "freeze"]):
        try:
            subject.push(weights, mode=mode)
            error = ""
        except WeightUpdateError as failure:
            error = str(failure)
        found[f"{number} {mode}"] = (error, subject.content())
    del request
    return found


def idle(subject: Subject, folder: Path) -> str:
    """Without a request no block is kept."""
    subject.push(tensors_of(folder), mode="freeze")
    return subject.content()


def test_frozen_requests_keep_no_blocks_of_former_scales(engine: str, tmp_path: Path) -> None:
    starter = run.Starter(engine, KIND, tmp_path, tmp_path, run.START_TIMEOUT_S)
    starter.write()
    try:
        child = starter.start(tmp_path / "first")
    except (EOFError, AssertionError) as error:  # the engine has ended, or says why it cannot start
        why = starter.reason(error)
        needs = ("CPU FP8 KV cache requires Intel AMX support", "FP8 KV cache on CPU requires x86 with AVX-512")
        if not any(words in why for words in needs):  # as SGLang and vLLM say
            starter.show_log()
            raise
        pytest.skip(why)
    try:
        assert child(idle, tmp_path / "other") == child(idle, tmp_path / "first") == "valid"
        found = child(tried, tmp_path / "other")
    finally:
        child.stop()
    for number in "01":  # the request is frozen still
        error, content = found[f"{number} freeze"]
        assert "a scale of the KV cache" in error and "mode='keep'" in error and content == "failed"
    assert found["2 keep"] == found["3 freeze"] == ("", "valid")
