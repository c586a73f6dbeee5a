"""Updates over frozen requests on an engine whose FP8 KV cache has scales."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from integration.kinds import run
from integration.kinds.checkpoints import tensors_of
from integration.kinds.subject import Subject
from rl_memory_plugins.errors import WeightUpdateError

KIND = "FP8 KV cache with scales"


def run_one(subject: Any) -> None:
    """Begin a request that does not end by itself in the time of this test."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=480, ignore_eos=True, detokenize=False)
    subject.engine.llm_engine.add_request("long", {"prompt_token_ids": [5, 6, 7]}, params)


def tried(subject: Subject, folder: Path) -> dict[str, Any]:
    """What happens to updates with the scales of another checkpoint, first over a request."""
    weights = tensors_of(folder)
    found: dict[str, Any] = {}
    for number, mode in enumerate(["freeze", "freeze", "keep", "freeze"]):
        if number == 0:
            run_one(subject)
        try:
            subject.push(weights, mode=mode)
            error = ""
        except WeightUpdateError as failure:
            error = str(failure)
        found[f"{number} {mode}"] = (error, subject.content())
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
    except EOFError as error:
        why = starter.reason(error)
        if "CPU FP8 KV cache requires Intel AMX support" not in why:  # as SGLang says
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
