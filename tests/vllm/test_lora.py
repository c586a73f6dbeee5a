"""Adapters that come and go while the engine sleeps and wakes."""

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
from tests.vllm.conftest import PROMPT

RANK = 8


class WithLora(Vllm):
    def command(self, launch: Launch, port: int) -> list[str]:
        return [*super().command(launch, port), "--enable-lora", "--max-lora-rank", str(RANK), "--max-loras", "2"]

    def environment(self, launch: Launch) -> dict[str, str]:
        return {**super().environment(launch), "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}


@pytest.fixture(scope="module")
def server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "server.log"
    with Server(WithLora(), Launch(model_folder, kv_bytes=64 << 20, forked=True), log) as server:
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
    body = {**server.kind.request(PROMPT, 8), "model": name}
    response = server.http.post(server.kind.generation_route, json=body)
    assert response.status_code == 200, response.text
    return server.kind.tokens(response.json())


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
