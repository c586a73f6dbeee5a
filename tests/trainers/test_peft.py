"""The names and the configuration of an adapter, against what PEFT itself writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from integration.models import SHAPES, new_model, write_model
from rl_memory_plugins.trainer import Adapter

peft = pytest.importorskip("peft")

from safetensors.torch import load_file  # noqa: E402


@pytest.fixture
def model(tmp_path: Path) -> Any:
    folder = write_model(tmp_path / "tiny", SHAPES["tiny"], seed=1)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj", "embed_tokens"])
    made = peft.get_peft_model(new_model(folder, 1), config)
    made.add_adapter("other", peft.LoraConfig(r=2, target_modules=["v_proj"], init_lora_weights=False))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_" in name:
                parameter.normal_()
    return made


@pytest.mark.parametrize("name", ["default", "other"])
def test_what_is_sent_is_what_peft_writes(model: Any, tmp_path: Path, name: str) -> None:
    model.save_pretrained(tmp_path / "saved", selected_adapters=[name], save_embedding_layers=False)
    folder = tmp_path / "saved" / ("" if name == "default" else name)
    written = load_file(folder / "adapter_model.safetensors")
    adapter = Adapter("policy", peft_name=name)
    sent = dict(adapter.source(model).tensors())
    assert sent.keys() == written.keys()
    for key, tensor in written.items():
        assert torch.equal(sent[key], tensor), key
    config = json.loads((folder / "adapter_config.json").read_text())
    mine = adapter.sent_config(model)
    assert sorted(mine.pop("target_modules")) == sorted(config.pop("target_modules"))
    assert {field: mine[field] for field in ("peft_type", "r", "lora_alpha", "bias", "use_dora", "use_rslora")} == {
        field: config[field] for field in ("peft_type", "r", "lora_alpha", "bias", "use_dora", "use_rslora")
    }
