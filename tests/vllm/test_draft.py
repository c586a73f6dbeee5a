"""Updates of a draft model by vLLM's own calls."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.calls import generate, refused
from tests.vllm.child import Child
from tests.vllm.conftest import OTHER_SEED, engine_options, environment
from tests.vllm.test_trainers import EXTENSION, call, content


def make(folder: Path) -> Any:
    from rl_memory_plugins.vllm import LLM

    draft = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 2}
    options = engine_options(folder, speculative_config=draft, worker_extension_cls=EXTENSION)
    return LLM(**options, rl_memory={"poison": True})


@pytest.fixture(scope="module")
def llm(model_folder: Path) -> Iterator[Child]:
    with Child(make, model_folder, environment=environment(model_folder)) as child:
        yield child


def update_draft(llm: Any, folder: str, first: list[int], breaks: bool) -> str:
    """Returns the state of the draft afterwards."""
    assert generate(llm) == first
    call(llm, "connect")
    call(llm, "start_draft_weight_update")
    assert refused(lambda: generate(llm)) == "updating"  # the draft's parameters are on the meta device
    call(llm, "update_weights", {"folder": folder, "seed": OTHER_SEED, "start": 0, "count": 10 if breaks else 1000})
    if breaks:
        with pytest.raises(Exception, match="the trainer is gone"):
            call(llm, "update_weights", {"fail": True})
    else:
        call(llm, "finish_weight_update")
    assert content(llm) == "valid"  # of the target: the draft decides no token
    assert generate(llm) == first
    return str(llm.memory_status()[0].ranks[0].draft)


@pytest.mark.parametrize("breaks", [True, False], ids=["broken off", "finished"])
def test_nothing_is_generated_while_a_draft_is_updated(
    llm: Child, model_folder: Path, first_tokens: list[int], breaks: bool
) -> None:
    state = llm(update_draft, str(model_folder), first_tokens, breaks)
    assert state == ("failed" if breaks else "in_step")
