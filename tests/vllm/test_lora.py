"""Adapters beside vLLM's own routes: those that vLLM loads from folders, and those that a trainer sends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from integration.engines.base import Launch, Server
from integration.engines.vllm import Vllm
from integration.models import new_model
from rl_memory_plugins.errors import InvalidRequestError
from tests import lora
from tests.vllm.conftest import PROMPT, SEED

RANK = 8


class LoadingAdapters(Vllm):
    def environment(self, launch: Launch) -> dict[str, str]:
        return {**super().environment(launch), "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}


@pytest.fixture(scope="module")
def server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "server.log"
    launch = Launch(model_folder, kv_bytes=64 << 20, forked=True, adapter_rank=RANK)
    with Server(LoadingAdapters(), launch, log) as server:
        yield server


def adapter(model: Path, folder: Path, seed: int) -> Path:
    """Of every output projection, and strong enough to change what is answered."""
    config = json.loads((model / "config.json").read_text())
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.o_proj"
        size = config["hidden_size"]
        tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, size, generator=generator)
        tensors[f"{name}.lora_B.weight"] = torch.randn(size, RANK, generator=generator)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    options = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["o_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(options))
    return folder


def load(server: Server, folder: Path) -> Any:
    return server.http.post("/v1/load_lora_adapter", json={"lora_name": folder.name, "lora_path": str(folder)})


def answer(server: Server, name: str) -> list[int]:
    return server.generate(PROMPT, adapter=name)


def test_an_adapter_is_loaded_while_the_weights_are_awake(
    server: Server, model_folder: Path, tmp_path: Path, first_tokens: list[int]
) -> None:
    """Stock vLLM: one that is loaded while they sleep is gone after the wake, and nobody is told."""
    early, late = adapter(model_folder, tmp_path / "early", 1), adapter(model_folder, tmp_path / "late", 2)
    assert load(server, early).status_code == load(server, late).status_code == 200
    tokens = answer(server, "early")
    expected = answer(server, "late")
    assert first_tokens not in (tokens, expected) and tokens != expected
    unload = {"lora_name": "late"}
    assert server.http.post("/v1/unload_lora_adapter", json=unload).status_code == 200
    server.control.sleep(1)
    refused = load(server, late)
    assert refused.status_code >= 400 and "weights are asleep" in refused.text
    server.control.wake_up()
    assert answer(server, "early") == tokens
    assert load(server, late).status_code == 200
    assert answer(server, "late") == expected
    assert answer(server, "model") == first_tokens


def test_an_adapter_that_a_trainer_sends_is_a_model_of_the_server(server: Server, model_folder: Path) -> None:
    sent = lora.tensors(new_model(model_folder, SEED), 1)
    server.control.update_adapter("policy", sent, lora.config())
    assert server.post(PROMPT, adapter="policy").json()["model"] == "policy"
    assert "policy" in {model["id"] for model in server.http.get("/v1/models").json()["data"]}
    with pytest.raises(InvalidRequestError, match="served model"):
        server.control.update_adapter("model", sent, lora.config(), timeout_s=20)
    server.control.remove_adapter("policy")
    assert server.post(PROMPT, adapter="policy").status_code == 404
    assert "policy" not in server.http.get("/v1/models").text
