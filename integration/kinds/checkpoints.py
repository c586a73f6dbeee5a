"""Checkpoints of small models of many architectures, with random weights and the configuration classes of transformers.

Sizes are the smallest that the engines' kernels take.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from integration.models import SHAPES, write_model

Write = Callable[[Path, int, str], Path]
"""Writes a checkpoint: folder, seed, dtype of the weights by torch's name. Returns the folder."""

VOCABULARY = 1024
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
    "tie_word_embeddings": False,
}


def of(
    config_class: str,
    *,
    model_class: str = "AutoModelForCausalLM",
    kept_float32: str = "",
    added: Mapping[str, Any] = MappingProxyType({}),
    **fields: Any,
) -> Write:
    """A checkpoint of one of transformers' architectures.

    Args:
        config_class: The name of its configuration class.
        model_class: The name of the class of the model that is saved.
        kept_float32: The end of the names of tensors that stay in float32, as published checkpoints have them.
        added: Fields that published configurations have and transformers does not write.
        fields: Fields of the configuration beside `COMMON`. `None` leaves a field of `COMMON` out.
    """

    def write(folder: Path, seed: int, dtype: str) -> Path:
        import transformers

        merged = {name: value for name, value in {**COMMON, **fields}.items() if value is not None}
        config = getattr(transformers, config_class)(**merged)
        made = getattr(transformers, model_class)
        torch.manual_seed(seed)
        model = made.from_config(config) if model_class.startswith("Auto") else made(config)
        write_model(folder, SHAPES["tiny"])  # the tokenizer
        save(randomised(model, seed).to(getattr(torch, dtype)), folder, kept_float32)
        configure(folder, **added)
        return folder

    return write


def randomised(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    """No tensor is left at a constant, such as a bias of zeros or a norm of ones: its loss would not be noticed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point() and tensor.numel() > 1:
                spread = tensor.float().std()
                noise = torch.randn(tensor.shape, generator=generator)
                tensor.add_(noise.to(tensor.dtype) * (0.1 if spread < 1e-6 else 0.05 * spread))
    return model


def save(model: Any, folder: Path, kept_float32: str = "") -> None:
    model.save_pretrained(folder)
    if kept_float32:
        change(folder, lambda tensors: {n: t.float() if n.endswith(kept_float32) else t for n, t in tensors.items()})


def change(folder: Path, function: Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]]) -> None:
    """Rewrite the tensors of a checkpoint."""
    file = folder / "model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in function(load_file(file)).items()}, file)


def configure(folder: Path, **fields: Any) -> None:
    """Set fields of a checkpoint's configuration."""
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, as a trainer would send them."""
    return load_file(folder / "model.safetensors")


def drawn(like: Mapping[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """Random tensors of the same shapes; norms are near one."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, tensor in like.items():
        noise = 0.02 * torch.randn(tensor.shape, generator=generator)
        found[name] = (noise + ("norm" in name)).to(tensor.dtype)
    return found


def with_file(write: Write, name: str, **fields: Any) -> Write:
    """A further JSON file beside the weights."""

    def written(folder: Path, seed: int, dtype: str) -> Path:
        write(folder, seed, dtype)
        (folder / name).write_text(json.dumps(fields))
        return folder

    return written


def with_nextn_layer(write: Write) -> Write:
    """A layer that predicts the token after the next, under the name of a further layer, as DeepSeek-V3 has it."""

    def written(folder: Path, seed: int, dtype: str) -> Path:
        write(folder, seed, dtype)
        layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
        prefix, last = f"model.layers.{layers}", f"model.layers.{layers - 1}."

        def extended(tensors: dict[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
            layer = {f"{prefix}.{n.removeprefix(last)}": t for n, t in tensors.items() if n.startswith(last)}
            embedding, norm = tensors["model.embed_tokens.weight"], tensors["model.norm.weight"]
            layer |= {f"{prefix}.{name}.weight": norm for name in ("enorm", "hnorm", "shared_head.norm")}
            layer[f"{prefix}.eh_proj.weight"] = embedding.new_empty(len(norm), 2 * len(norm))
            shared = {f"{prefix}.embed_tokens.weight": embedding.clone()}
            shared[f"{prefix}.shared_head.head.weight"] = tensors.get("lm_head.weight", embedding).clone()
            return tensors | drawn(layer, seed) | shared

        change(folder, extended)
        configure(folder, num_nextn_predict_layers=1)
        return folder

    return written


def with_mtp(write: Write) -> Write:
    """A layer that predicts the token after the next, under the names `mtp.*`, as Qwen3-Next has it."""

    def written(folder: Path, seed: int, dtype: str) -> Path:
        write(folder, seed, dtype)
        config = json.loads((folder / "config.json").read_text())
        last = f"model.layers.{config['num_hidden_layers'] - 1}."  # with full attention

        def extended(tensors: dict[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
            layer = {f"mtp.layers.0.{n.removeprefix(last)}": t for n, t in tensors.items() if n.startswith(last)}
            norm = tensors["model.norm.weight"]
            layer |= {f"mtp.{name}.weight": norm for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
            layer["mtp.fc.weight"] = norm.new_empty(len(norm), 2 * len(norm))
            return tensors | drawn(layer, seed)

        change(folder, extended)
        configure(folder, mtp_num_hidden_layers=1)
        return folder

    return written


def write_adapter(folder: Path, model: Path, rank: int = 8) -> Path:
    """A LoRA adapter of a dense model, strong enough to be seen in every answer."""
    folder.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(5)
    name = "model.layers.0.mlp.down_proj"
    rows, columns = tensors_of(model)[f"{name}.weight"].shape
    tensors = {
        f"base_model.model.{name}.lora_A.weight": torch.randn(rank, columns, generator=generator),
        f"base_model.model.{name}.lora_B.weight": torch.randn(rows, rank, generator=generator),
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["down_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
