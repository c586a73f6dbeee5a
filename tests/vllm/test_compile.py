"""With torch.compile: what was compiled reads the weights that are there now."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from integration.models import SHAPES, new_model, write_model
from tests.vllm.calls import generate, push
from tests.vllm.child import Child
from tests.vllm.conftest import OTHER_SEED, SEED, engine_options, environment, greedy


def make(folder: Path) -> Any:
    from rl_memory_plugins.vllm import LLM

    return LLM(**engine_options(folder, enforce_eager=False), rl_memory={"poison": True})


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each layer is compiled, so one is enough."""
    return write_model(tmp_path_factory.mktemp("model") / "one-layer", SHAPES["tiny"]._replace(layers=1), seed=SEED)


@pytest.fixture(scope="module")
def llm(one_layer: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    """Compiled for this test, whatever an earlier run has left in vLLM's cache."""
    cache = str(tmp_path_factory.mktemp("cache"))
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCH_COMPILE_DISABLE": "0"}
    caches = {"VLLM_CACHE_ROOT": cache, "TORCHINDUCTOR_CACHE_DIR": cache}
    with Child(make, one_layer, environment=environment(one_layer, **variables, **caches)) as child:
        yield child


def cycle(llm: Any, folder: Path, seed: int) -> list[int]:
    llm.sleep(2)
    llm.wake_up(["weights"])
    push(llm, new_model(folder, seed))
    llm.wake_up()
    return generate(llm)


def compilation_mode(llm: Any) -> int:
    return int(llm.llm_engine.vllm_config.compilation_config.mode)


def compiled_graphs(_: Any) -> int:
    """How many graphs torch.compile has made in the engine's process; none where a variable has disabled it."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


@pytest.mark.long
def test_compiled_code_sees_an_update(llm: Child, one_layer: Path) -> None:
    first, other = (greedy(new_model(one_layer, seed)) for seed in (SEED, OTHER_SEED))
    assert first != other
    assert llm(compilation_mode) > 0
    assert llm(compiled_graphs) > 0
    assert llm(generate) == first
    assert llm(cycle, one_layer, OTHER_SEED) == other
    assert llm(cycle, one_layer, SEED) == first
