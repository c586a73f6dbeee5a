"""Updates with the files of the engine's own checkpoint: what the engine cast and skipped at its start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.engines.base import Launch, Server
from rl_memory_plugins.errors import ManifestError
from rl_memory_plugins.trainer import ModelSource
from tests.checkpoints import write_glm4_moe
from tests.conformance.trainers import push
from tests.sglang.test_weight_kinds import ROUTING
from tests.weight_kinds import PROMPT, TOKENS, checkpoint, install_plugin, renew, started

DRAFT = {"model.layers.2.eh_proj.weight", "model.layers.2.shared_head.head.weight"}


def start(folder: Path, log: Path) -> Iterator[Server]:
    sites = [install_plugin(log.with_suffix(".site"), "sglang.srt.plugins", ROUTING)]
    launch = Launch(folder, options={"poison": True}, forked=True)
    with started("sglang", launch, log, "--dtype", "bfloat16", sites=sites) as server:
        yield server


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("glm")
    return [write_glm4_moe(folder / name, seed, "bfloat16") for name, seed in (("a", 1), ("b", 2))]


@pytest.fixture(scope="module")
def fresh(folders: list[Path]) -> list[int]:
    for server in start(folders[1], folders[1].with_suffix(".log")):
        return server.generate(PROMPT, TOKENS)
    raise AssertionError


@pytest.fixture(scope="module")
def server(folders: list[Path]) -> Iterator[Server]:
    yield from start(folders[0], folders[0].with_suffix(".log"))


def test_the_engines_own_files_are_an_update(server: Server, folders: list[Path], fresh: list[int]) -> None:
    first = server.generate(PROMPT, TOKENS)
    assert first != fresh
    for folder, tokens in ((folders[1], fresh), (folders[0], first)):
        renew(server, folder)
        assert server.generate(PROMPT, TOKENS) == tokens
    report = push(server, checkpoint(folders[0]))
    assert set(report["unused"]) == DRAFT
    (cast,) = report["receivers"][0]["casts"]
    assert (cast["from"], cast["to"], cast["direction"]) == ("bfloat16", "float32", "widening")
    assert "model.layers.1.mlp.gate.e_score_correction_bias" in cast["names"]


def test_a_model_in_memory_is_sent_as_it_is_saved(server: Server, folders: list[Path], fresh: list[int]) -> None:
    """transformers 5 stacks the experts; SGLang takes them one by one."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folders[1])
    assert model.state_dict()["model.layers.1.mlp.experts.gate_up_proj"].dim() == 3
    push(server, ModelSource(model, dtype="engine"))
    assert server.generate(PROMPT, TOKENS) == fresh


def test_misspelt_names_are_errors(server: Server, folders: list[Path]) -> None:
    tensors = checkpoint(folders[0])
    tensors["model.layers.2.eh_prj.weight"] = tensors.pop("model.layers.2.eh_proj.weight")
    tensors["model.layers.1.mlp.gat.weight"] = tensors.pop("model.layers.1.mlp.gate.weight")
    with pytest.raises(ManifestError) as error:
        push(server, tensors)
    found = {m["name"]: m["message"] for m in error.value.details["mismatches"] if m["kind"] == "unknown"}
    assert "model.layers.2.eh_proj.weight" in found["model.layers.2.eh_prj.weight"]
    assert "model.layers.1.mlp.gate.weight" in found["model.layers.1.mlp.gat.weight"]
    assert server.control.memory()["admitting"]
