"""Models that need no download: a Qwen2 or Qwen3-MoE of any size with a toy tokenizer, with or without weights.

    python -m integration.models OUT --shape tiny --seed 1

With `--seed` the folder gets a real checkpoint (safetensors). Without it the folder gets only the configuration, for
engines with dummy weights. Prompts are token ids, or the toy tokenizer's words `w2` to `w999`.
"""

from __future__ import annotations

import argparse
import json
import math
from contextlib import AbstractContextManager, nullcontext
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
    experts: int = 0  # with experts a Qwen3-MoE whose every layer has them, else a Qwen2
    expert_intermediate: int = 0
    head: int = 0  # 0 stands for hidden / heads


SHAPES = {
    "tiny": Shape(256, 512, 4, 4, 2, 4096),
    "small": Shape(512, 1408, 4, 8, 4, 8192),  # 25 M parameters: sleeps show in the memory
    "100m": Shape(768, 2048, 12, 12, 4, 16384),
    "250m": Shape(1024, 2816, 8, 16, 8, 73728),  # the vocabulary has three fifths of the bytes and takes little time
    "0.5b": Shape(896, 4864, 24, 14, 2, 151936, True),
    "1.5b": Shape(1536, 8960, 28, 12, 2, 151936, True),
    "3b": Shape(2048, 11008, 36, 16, 2, 151936, True),
    "7b": Shape(3584, 18944, 28, 28, 4, 152064),
    "32b": Shape(5120, 27648, 64, 40, 8, 152064),
    "72b": Shape(8192, 29568, 80, 64, 8, 152064),
    "tiny-moe": Shape(256, 512, 2, 4, 2, 4096, experts=8, expert_intermediate=64, head=64),
    "moe": Shape(2048, 6144, 12, 32, 4, 151936, experts=128, expert_intermediate=768, head=128),
    "30b-a3b": Shape(2048, 6144, 48, 32, 4, 151936, experts=128, expert_intermediate=768, head=128),
    "narrow-30b-a3b": Shape(64, 128, 48, 4, 2, 512, experts=128, expert_intermediate=32, head=32),
}
"""`moe` is a quarter of the layers of `30b-a3b`, which is Qwen3-30B-A3B: many tensors of 3 MiB. `narrow-30b-a3b` has as
many tensors, 18,867, of 4 KiB and less: Python alone takes time."""


def config(shape: Shape, dtype: str) -> dict[str, Any]:
    """The `config.json` of a model; `transformers` has defaults for the other fields."""
    qwen2 = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": 32768,
        "rope_theta": 1e6,
        "tie_word_embeddings": shape.tied,
        "torch_dtype": dtype,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    if not shape.experts:
        return qwen2
    return {
        **qwen2,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "head_dim": shape.head,
        "num_experts": shape.experts,
        "num_experts_per_tok": min(8, shape.experts // 2),
        "moe_intermediate_size": shape.expert_intermediate,
        "norm_topk_prob": True,
    }


def checkpoint_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a checkpoint, by its name, in the checkpoint's order."""
    hidden, head = shape.hidden, shape.head or shape.hidden // shape.heads
    rows = {"q": shape.heads * head, "k": shape.kv_heads * head, "v": shape.kv_heads * head}
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocabulary, hidden)}
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        for part, count in rows.items():
            found[f"{prefix}.self_attn.{part}_proj.weight"] = (count, hidden)
            if not shape.experts:
                found[f"{prefix}.self_attn.{part}_proj.bias"] = (count,)
        found[f"{prefix}.self_attn.o_proj.weight"] = (hidden, rows["q"])
        if shape.experts:
            found |= {f"{prefix}.self_attn.{part}_norm.weight": (head,) for part in "qk"}
            found[f"{prefix}.mlp.gate.weight"] = (shape.experts, hidden)
            for expert in range(shape.experts):
                found |= _mlp(f"{prefix}.mlp.experts.{expert}", hidden, shape.expert_intermediate)
        else:
            found |= _mlp(f"{prefix}.mlp", hidden, shape.intermediate)
        found |= {f"{prefix}.{norm}_layernorm.weight": (hidden,) for norm in ("input", "post_attention")}
    found["model.norm.weight"] = (hidden,)
    if not shape.tied:
        found["lm_head.weight"] = (shape.vocabulary, hidden)
    return found


def weight_bytes(model: str) -> int:
    """Bytes of a model's checkpoint in bfloat16; 0 for a name that is not in `SHAPES`."""
    if model not in SHAPES:
        return 0
    return sum(2 * math.prod(shape) for shape in checkpoint_shapes(SHAPES[model]).values())


def _mlp(prefix: str, hidden: int, intermediate: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.gate_proj.weight": (intermediate, hidden),
        f"{prefix}.up_proj.weight": (intermediate, hidden),
        f"{prefix}.down_proj.weight": (hidden, intermediate),
    }


#: FP8 with a scale for each block of 128 by 128, as DeepSeek and Qwen publish it.
FP8_BLOCKS = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}

#: Scales of an FP8 KV cache beside weights in 16 bits, as compressed-tensors publishes them.
FP8_CACHE = {
    "quant_method": "compressed-tensors",
    "format": "dense",
    "quantization_status": "frozen",
    "ignore": ["lm_head"],
    "config_groups": {},
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False},
}


def fp8_config(shape: Shape) -> dict[str, Any]:
    """The `quantization_config` of a checkpoint with `FP8_BLOCKS`. Routers stay as they are, as in published ones."""
    routers = [f"model.layers.{layer}.mlp.gate" for layer in range(shape.layers)] if shape.experts else []
    return {**FP8_BLOCKS, "modules_to_not_convert": ["lm_head", *routers]}


def fp8_checkpoint_names(shape: Shape) -> list[str]:
    """The names of a checkpoint's tensors with `FP8_BLOCKS`."""
    names = list(checkpoint_shapes(shape))
    return names + [f"{name}_scale_inv" for name in names if name.endswith("_proj.weight")]


def write_model(folder: Path, shape: Shape, *, dtype: str = "float32", seed: int | None = None) -> Path:
    """Write a model folder.

    Args:
        folder: The folder, which may not exist yet.
        shape: The model's sizes.
        dtype: The weights' dtype, by torch's name.
        seed: The seed of the weights; with `None` no weights are saved.

    Returns: `folder`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(shape, dtype), indent=1))
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": 1}))
    _write_tokenizer(folder)
    if seed is not None:
        new_model(folder, seed, dtype).save_pretrained(folder)
    return folder


def new_model(folder: Path, seed: int, dtype: str = "float32") -> Any:
    """A newly initialised `transformers` model with the folder's configuration."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("proj.bias"):  # by default biases are zero, and no test would notice a lost bias
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
    parser.add_argument("folder", type=Path, help="folder to write")
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--dtype", default="float32", help="dtype in the configuration and of the weights")
    parser.add_argument("--seed", type=int, default=None, help="seed of the weights; by default no weights")
    parser.add_argument("--device", default="cpu", help="where the weights are drawn; a CPU takes minutes for 7b")
    arguments = parser.parse_args()
    with _on(arguments.device):
        print(write_model(arguments.folder, SHAPES[arguments.shape], dtype=arguments.dtype, seed=arguments.seed))


def _on(device: str) -> AbstractContextManager[Any]:
    if device == "cpu":  # without weights nothing here needs torch
        return nullcontext()
    import torch

    return torch.device(device)


if __name__ == "__main__":
    main()
