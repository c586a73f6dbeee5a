"""Small checkpoints of models that engines load with casts, or of which they skip parts."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from integration.models import SHAPES, write_model


def write_glm4_moe(folder: Path, seed: int, dtype: str) -> Path:
    """GLM-4-MoE, whose routers engines keep in float32, with the tensors of an MTP layer, which only drafts use."""
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    write_model(folder, SHAPES["tiny"])
    config = Glm4MoeConfig(
        vocab_size=SHAPES["tiny"].vocabulary,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        attention_bias=True,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        max_position_embeddings=1024,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    torch.manual_seed(seed)
    model = Glm4MoeForCausalLM(config)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.uniform_(-0.1, 0.1)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    draft = {f"model.layers.2.{name}.weight": torch.randn(256, 512) for name in ("eh_proj", "shared_head.head")}
    return _with(folder, {name: tensor.to(getattr(torch, dtype)) for name, tensor in draft.items()}, mtp=1)


def _with(folder: Path, more: dict[str, torch.Tensor], mtp: int) -> Path:
    file = folder / "model.safetensors"
    save_file({**load_file(file), **more}, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": mtp}))
    return folder
