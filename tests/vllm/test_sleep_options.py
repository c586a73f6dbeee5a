"""Options of vLLM's own sleep, which this package honours."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from integration.models import new_model
from rl_memory_plugins import InvalidRequestError, ManifestError
from tests.vllm.child import Child
from tests.vllm.conftest import OTHER_SEED, SEED, engine_options, environment
from tests.vllm.test_python import generate, push, restore

OPTIONS = {"sleep_preserve_parameter_names": ["*.embed_tokens.*", "draft.*"]}


def make_llm(folder: Path) -> Any:
    from rl_memory_plugins.vllm import LLM

    return LLM(rl_memory={"poison": True}, **engine_options(folder), **OPTIONS)


@pytest.fixture(scope="module")
def llm(model_folder: Path) -> Iterator[Child]:
    child = Child(make_llm, model_folder, environment=environment(model_folder, VLLM_ENABLE_V1_MULTIPROCESSING="0"))
    try:
        yield child
    finally:
        child.stop()


def keep_the_embedding(llm: Any, folder: Path) -> None:
    first = generate(llm)
    tensors = new_model(folder, OTHER_SEED).state_dict()
    push(
        llm, {**tensors, "model.embed_tokens.weight": new_model(folder, SEED).state_dict()["model.embed_tokens.weight"]}
    )
    mixed = generate(llm)
    assert mixed != first
    restore(llm, folder)
    del tensors["model.embed_tokens.weight"]
    for sleep in (lambda: llm.sleep(level=2), lambda: llm.collective_rpc("sleep", args=(2,))):
        sleep()
        llm.wake_up()
        push(llm, tensors)
        assert generate(llm) == mixed
        restore(llm, folder)
    llm.sleep(level=2, keep=[])
    llm.wake_up()
    with pytest.raises(ManifestError):
        push(llm, tensors)
    with pytest.raises(InvalidRequestError):
        llm.sleep(level=2, keep=["*.no_such_weight"])
    assert restore(llm, folder) == first


def test_preserved_parameters_are_kept_at_level_2(llm: Child, model_folder: Path) -> None:
    llm(keep_the_embedding, model_folder)
