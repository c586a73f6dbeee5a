"""LoRA adapters of small models, and the answers that a model has with one merged into its weights."""

from __future__ import annotations

import copy
from typing import Any

import torch

RANK = 4
TARGETS = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")


def config(rank: int = RANK, targets: tuple[str, ...] = TARGETS) -> dict[str, Any]:
    return {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets), "bias": "none"}


def tensors(
    model: torch.nn.Module, seed: int, rank: int = RANK, targets: tuple[str, ...] = TARGETS
) -> dict[str, torch.Tensor]:
    """Under the names of `adapter_model.safetensors`, and strong enough to change what is answered."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in targets:
            rows, columns = module.weight.shape
            made[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, columns, generator=generator) * 0.1
            made[f"base_model.model.{name}.lora_B.weight"] = torch.randn(rows, rank, generator=generator) * 0.1
    return made


@torch.no_grad()
def merged(model: torch.nn.Module, adapter: dict[str, torch.Tensor], scaling: float = 2.0) -> torch.nn.Module:
    """A copy of the model with the adapter in its weights."""
    model = copy.deepcopy(model)
    for name, matrix in adapter.items():
        layer, _, kind = name.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".")
        if kind == "lora_A":
            other = adapter[name.replace("lora_A", "lora_B")]
            model.get_submodule(layer).weight += scaling * other @ matrix
    return model
