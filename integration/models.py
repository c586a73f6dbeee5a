"""Small models that need no download: a Qwen2 of any size with a toy tokenizer, with or without weights.

    python -m integration.models OUT --shape tiny --seed 1

With a seed the folder holds a real checkpoint (safetensors). Without one it holds only the configuration, for
engines started with dummy weights. Prompts are token ids, or the toy tokenizer's words `w2` to `w999`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple


class Shape(NamedTuple):
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool = False


SHAPES = {
    "tiny": Shape(256, 512, 4, 4, 2, 4096),
    "small": Shape(512, 1408, 4, 8, 4, 8192),  # 25 M parameters: enough to see memory come and go
    "demo": Shape(768, 2048, 12, 12, 4, 16384),  # 102 M parameters
    "0.5b": Shape(896, 4864, 24, 14, 2, 151936, True),
    "7b": Shape(3584, 18944, 28, 28, 4, 152064),
    "32b": Shape(5120, 27648, 64, 40, 8, 152064),
}


def qwen2_config(shape: Shape, dtype: str) -> dict[str, Any]:
    """The `config.json` of a Qwen2 model."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "tie_word_embeddings": shape.tied,
        "torch_dtype": dtype,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "initializer_range": 0.02,
        "use_cache": True,
        "use_sliding_window": False,
        "attention_dropout": 0.0,
    }


def write_model(folder: Path, shape: Shape, *, dtype: str = "float32", seed: int | None = None) -> Path:
    """Write a model folder.

    Args:
        folder: Made if it does not exist.
        shape: The model's sizes.
        dtype: Of the weights, as torch names it.
        seed: Initialises and saves weights; `None` saves none.

    Returns: `folder`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(qwen2_config(shape, dtype), indent=1))
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": 1}))
    _write_tokenizer(folder)
    if seed is not None:
        new_model(folder, seed, dtype).save_pretrained(folder)
    return folder


def new_model(folder: Path, seed: int, dtype: str = "float32") -> Any:
    """A freshly initialised `transformers` model of the folder's configuration."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("proj.bias"):  # zero by default, and a lost bias would go unnoticed
            torch.nn.init.normal_(parameter, std=0.02)
    return model


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<unk>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, 1000)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seed", type=int, default=None)
    arguments = parser.parse_args()
    print(write_model(arguments.folder, SHAPES[arguments.shape], dtype=arguments.dtype, seed=arguments.seed))


if __name__ == "__main__":
    main()
