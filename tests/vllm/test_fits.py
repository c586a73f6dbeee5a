"""Updates with the files of the engine's own checkpoint: what the engine cast and skipped at its start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_memory_plugins import ManifestError
from rl_memory_plugins.trainer import ModelSource
from tests.checkpoints import write_glm4_moe
from tests.vllm.calls import generate, push
from tests.vllm.child import Child
from tests.vllm.conftest import OTHER_SEED, SEED, engine_options, environment
from tests.weight_kinds import checkpoint

DRAFT = {"model.layers.2.eh_proj.weight", "model.layers.2.shared_head.head.weight"}


def make(folder: Path, options: dict[str, Any]) -> Any:
    from rl_memory_plugins.vllm import LLM

    return LLM(rl_memory={"poison": True}, **{**engine_options(folder), "dtype": "bfloat16", **options})


def start(folder: Path, **options: Any) -> Child:
    return Child(make, folder, options, environment=environment(folder))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("glm")
    return [write_glm4_moe(folder / name, seed, "bfloat16") for name, seed in (("a", SEED), ("b", OTHER_SEED))]


@pytest.fixture(scope="module")
def fresh(folders: list[Path]) -> list[int]:
    other = start(folders[1])
    try:
        return list(other(generate, 24))
    finally:
        other.stop()


@pytest.fixture(scope="module")
def engine(folders: list[Path]) -> Iterator[Child]:
    started = start(folders[0])
    try:
        yield started
    finally:
        started.stop()


def renew(llm: Any, folder: Path) -> tuple[list[int], dict[str, Any], dict[str, Any]]:
    """The tokens after an update from files that level 2 has made necessary, and the reports of both sides."""
    llm.sleep(2)
    llm.wake_up(["weights"])
    report = push(llm, checkpoint(folder))
    llm.wake_up()
    return generate(llm, 24), dict(report["engine"].details["ranks"][0]), {"unused": report["unused"]}


def test_the_engines_own_files_are_an_update(engine: Child, folders: list[Path], fresh: list[int]) -> None:
    first = engine(generate, 24)
    assert first != fresh
    for folder, tokens in ((folders[1], fresh), (folders[0], first)):
        found, rank, sent = engine(renew, folder)
        assert found == tokens
        assert set(sent["unused"]) == set(rank["unused"]) == DRAFT


def send_model(llm: Any, folder: Path) -> list[int]:
    from transformers import AutoModelForCausalLM

    push(llm, ModelSource(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), dtype="engine"))
    return generate(llm, 24)


def test_a_model_in_memory_is_sent_as_it_is_saved(engine: Child, folders: list[Path], fresh: list[int]) -> None:
    assert engine(send_model, folders[1]) == fresh
    assert engine(send_model, folders[0]) != fresh


def layer_by_layer(llm: Any, folder: Path) -> list[int]:
    tensors = checkpoint(folder)
    for part in ("model.layers.1.", "model.layers.0.", "model.embed_tokens.", "model.norm.", "lm_head."):
        push(llm, {name: tensor for name, tensor in tensors.items() if name.startswith(part)}, partial=True)
    return generate(llm, 24)


def test_layers_that_an_update_omits_can_be_updated_next(engine: Child, folders: list[Path], fresh: list[int]) -> None:
    """vLLM's reload leaves biases of omitted layers with a loader that ignores further weights."""
    engine(renew, folders[0])
    assert engine(layer_by_layer, folders[1]) == fresh


def misspelt(llm: Any, folder: Path) -> dict[str, str]:
    tensors = checkpoint(folder)
    tensors["model.layers.2.eh_prj.weight"] = tensors.pop("model.layers.2.eh_proj.weight")
    tensors["model.layers.1.mlp.gat.weight"] = tensors.pop("model.layers.1.mlp.gate.weight")
    with pytest.raises(ManifestError) as error:
        push(llm, tensors)
    assert llm.memory_status()[0].content == "valid"
    return {m["name"]: m["message"] for m in error.value.details["mismatches"] if m["kind"] == "unknown"}


def test_misspelt_names_are_errors(engine: Child, folders: list[Path]) -> None:
    found = engine(misspelt, folders[0])
    assert "model.layers.2.eh_proj.weight" in found["model.layers.2.eh_prj.weight"]
    assert "model.layers.1.mlp.gate.weight" in found["model.layers.1.mlp.gat.weight"]


def masters(llm: Any, folder: Path, dtype: Any) -> Any:
    """An update from float32 masters: the tokens, or the names that were refused for their dtype."""
    tensors = {name: tensor.float() for name, tensor in checkpoint(folder).items()}
    try:
        push(llm, ModelSource(tensors, dtype=dtype))
    except ManifestError as error:
        return {m["name"]: m["expected"] for m in error.details["mismatches"] if m["kind"] == "dtype"}
    return generate(llm, 24)


def test_masters_need_a_dtype(engine: Child, folders: list[Path], fresh: list[int]) -> None:
    refused = engine(masters, folders[1], None)
    assert refused["model.layers.0.mlp.down_proj.weight"] == "bfloat16"
    assert "model.layers.1.mlp.gate.weight" not in refused
    assert engine(masters, folders[1], torch.float32) == fresh
    assert engine(masters, folders[1], torch.bfloat16) == fresh
