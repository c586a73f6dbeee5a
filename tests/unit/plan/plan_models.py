"""Configurations of small models, and their folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "pad_token_id": 0,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
_LATENT |= {"n_routed_experts": 8, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, **_EXPERTS}
_HEAD = {"head_dim": 32}
#: By kind, what it has beside `SMALL`.
KINDS: dict[str, dict[str, Any]] = {
    "llama": _HEAD,
    "mistral": _HEAD,
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": _HEAD,
    "phi3": {"eos_token_id": 1, "bos_token_id": 1},
    "gemma2": _HEAD,
    "gemma3_text": _HEAD,
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts": 8, "shared_expert_intermediate_size": 40, "decoder_sparse_step": 2, **_EXPERTS},
    "qwen3_moe": {"num_experts": 8, "mlp_only_layers": [0], **_HEAD, **_EXPERTS},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, **_HEAD},
    "deepseek_v2": {"n_shared_experts": 2, "topk_method": "greedy", **_LATENT},
    "deepseek_v3": {"n_shared_experts": 1, **_LATENT},
}


def configured(kind: str, **changed: Any) -> dict[str, Any]:
    return {"model_type": kind, **SMALL, **KINDS[kind], **changed}


def written(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_safetensors(file: Path, tensors: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    """A safetensors file with these dtypes and shapes, and no data: only its header is read."""
    header = {
        name: {"dtype": dtype, "shape": shape, "data_offsets": [0, 0]} for name, (dtype, shape) in tensors.items()
    }
    words = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    file.write_bytes(len(words).to_bytes(8, "little") + words)
