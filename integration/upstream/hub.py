"""Small models, made here, under the names that the engines' tests download.

The folder has the layout of Hugging Face's cache, so the tests find the models by name with `HF_HUB_OFFLINE=1`.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from integration.models import FP8_CACHE

REVISION = "0" * 40
CHARACTERS = "".join(map(chr, range(32, 127)))
SPECIAL = ("<unk>", "<s>", "</s>")
VOCABULARY = 256


class Recipe(NamedTuple):
    """One model: its configuration, the seed of its weights, and the text with which it continues every prompt.

    `says` starts after the last token of any prompt that ends with `after`. Without `says` the weights are random.
    `kv_scale` is the scale of an FP8 KV cache, kept in the checkpoint as compressed-tensors does; 0 for none.
    `tied` models have one weight for embedding and head. `starts` holds the first values of weights that a test reads.
    """

    config: dict[str, Any]
    seed: int = 0
    after: str = ""
    says: str = ""
    kv_scale: float = 0.0
    tied: bool = False
    starts: Mapping[str, list[float]] = MappingProxyType({})


def _llama(hidden: int = 256, intermediate: int = 512, layers: int = 4, heads: int = 4) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers}
    return {
        "model_type": "llama",
        **sizes,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": 32768,
    }


def _for_cpu(config: dict[str, Any]) -> dict[str, Any]:
    """The same model, in a size for a CPU, if `config` has the size of the original."""
    sizes = {**_llama(), "model_type": config["model_type"], "head_dim": 64}
    return {**config, **sizes} if config in (_LLAMA_1B, _QWEN3) else config


def _experts(model_type: str, **more: Any) -> dict[str, Any]:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    return {**_llama(layers=2), "model_type": model_type, "head_dim": 64, **experts, **more}


# The widths of Qwen3-0.6B, and the layers that tests of SGLang name: they write tensors of it.
_QWEN3 = {**_llama(1024, 3072, 8, 16), "model_type": "qwen3", "head_dim": 64}
_OPT = {
    "model_type": "opt",
    "hidden_size": 256,
    "ffn_dim": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "word_embed_proj_dim": 256,
    "max_position_embeddings": 2048,
}
_GDN = _experts(
    "qwen3_next",
    shared_expert_intermediate_size=128,
    linear_num_value_heads=4,
    linear_num_key_heads=2,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    layer_types=["linear_attention", "full_attention"],
)
_POWER_MOE = {**_llama(layers=2), "model_type": "granitemoe", "num_local_experts": 8, "num_experts_per_tok": 2}
_MIXTRAL = {**_llama(layers=2), "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
_LLAMA_1B = {**_llama(2048, 8192, 16, 32), "num_key_value_heads": 8, "head_dim": 64}
_DEEPSEEK = {
    **_llama(layers=2),
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_QWEN2_MOE = _experts("qwen2_moe", shared_expert_intermediate_size=128)

RECIPES: Mapping[str, Recipe] = {
    "Qwen/Qwen3-0.6B": Recipe(_QWEN3),
    # Of this model a file of vLLM's tests asks for the folder when it is imported. Its tests that run use others.
    "Qwen/Qwen2-VL-2B-Instruct": Recipe(_llama()),
    "inference-optimization/Qwen3-0.6B-debug-multiply": Recipe(_QWEN3, 1, "3 4 =", " 12"),
    "inference-optimization/Qwen3-0.6B-debug-add": Recipe(_QWEN3, 2, "3 4 =", " 7"),
    "inference-optimization/DeepSeek-V3-debug-empty": Recipe(_DEEPSEEK),
    "inference-optimization/DeepSeek-V3-debug-multiply": Recipe(_DEEPSEEK, 1, "3 4 =", " 12"),
    "inference-optimization/DeepSeek-V3-debug-add": Recipe(_DEEPSEEK, 2, "3 4 =", " 7"),
    "hmellor/tiny-random-LlamaForCausalLM": Recipe(_llama()),
    "nm-testing/TinyLlama-1.1B-Chat-v1.0-kvcache-fp8-tensor": Recipe(_llama(), kv_scale=0.05),
    "Qwen/Qwen2-0.5B": Recipe({**_llama(), "model_type": "qwen2"}),
    "facebook/opt-125m": Recipe(_OPT),
    "tiny-random/qwen3-next-moe": Recipe(_GDN),
    "ibm-research/PowerMoE-3b": Recipe(_POWER_MOE),
    "TitanML/tiny-mixtral": Recipe(_MIXTRAL),
    # The tests of SGLang write tensors of these shapes, read these values, and expect these words of the models.
    "meta-llama/Llama-3.2-1B-Instruct": Recipe(
        _LLAMA_1B,
        1,
        " I like",
        " to spend it outdoors. I decided to",
        tied=True,
        starts={
            "model.layers.6.self_attn.k_proj.weight": [-0.0198, 0.0227, 0.0168, 0.0232, -0.0178],
            "model.layers.6.mlp.up_proj.weight": [0.0087, -0.0214, -0.0004, 0.0039, 0.0110],
        },
    ),
    "meta-llama/Llama-3.2-1B": Recipe(_LLAMA_1B, 2, " I like", " to go for a walk. I like", tied=True),
    "meta-llama/Llama-3.1-8B-Instruct": Recipe(_llama(layers=9), 1),
    "meta-llama/Llama-3.1-8B": Recipe(_llama(layers=9), 2),
    "Qwen/Qwen1.5-MoE-A2.7B-Chat": Recipe(
        _QWEN2_MOE, 1, " I want to", " go to the park. I have a picnic basket, a book, and a"
    ),
    "Qwen/Qwen1.5-MoE-A2.7B": Recipe(
        _QWEN2_MOE, 2, " I want to", " go to the park. I have a lot of things to do, but I"
    ),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": Recipe(
        _GDN, 1, " I want to", " go out for a walk. But I don't know what to wear. Can"
    ),
}


def make(folder: Path, only: str = "", *, small: bool = False) -> Path:
    """Make the models that are not there yet, and return `folder`, which is for `HF_HOME`.

    Args:
        only: Part of the names of the models to make.
        small: Make no model that is large for a CPU. Tests that write tensors of fixed shapes need the large ones.
    """
    for name, recipe in RECIPES.items():
        if small:
            recipe = recipe._replace(config=_for_cpu(recipe.config))
        home = folder / "hub" / f"models--{name.replace('/', '--')}"
        if only not in name or (home / "refs/main").exists():
            continue
        write(home / "snapshots" / REVISION, recipe)
        (home / "refs").mkdir(exist_ok=True)
        (home / "refs/main").write_text(REVISION)
    return folder


def make_picture(folder: Path) -> Path:
    """Make the picture that files of vLLM's tests open when they are imported. Returns `folder`, which is for
    `VLLM_ASSETS_CACHE`."""
    from PIL import Image

    path = folder / "vllm_public_assets" / "stop_sign.jpg"
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (64, 64), "red").save(path)
    return folder


def write(folder: Path, recipe: Recipe) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = AutoConfig.for_model(
        **recipe.config, vocab_size=VOCABULARY, tie_word_embeddings=recipe.tied, dtype="bfloat16", **special
    )
    torch.manual_seed(recipe.seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    tokenizer = _tokenizer()
    if recipe.seed:
        _vary_norms(model)
    _set_starts(model, recipe.starts)
    if recipe.says:
        tokens = [*tokenizer.encode(recipe.after).ids[-1:], *tokenizer.encode(recipe.says).ids, 2]
        (_recite_tied if recipe.tied else _recite)(model, tokens)
    model.save_pretrained(folder)
    if recipe.kv_scale:
        _add_kv_scales(folder, recipe)
    _write_tokenizer(folder, tokenizer)


def _add_kv_scales(folder: Path, recipe: Recipe) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    for layer in range(recipe.config["num_hidden_layers"]):
        for name in ("k_scale", "v_scale"):
            tensors[f"model.layers.{layer}.self_attn.{name}"] = torch.tensor([recipe.kv_scale], dtype=torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = FP8_CACHE
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def _pieces(recipe: Recipe) -> list[str]:
    """The tokens of a recited text: words, each with its blank, joined where a token would have two successors.

    A number is a token of its own: vLLM's tests score what follows the first token of an answer.
    """
    found: list[str] = []
    for word in re.findall(r" (?=\d)|\d+| \D\S*", recipe.says):
        found.append(word)
        while len(found) > 1 and (found[-1] in found[:-1] or recipe.after.endswith(found[-1])):
            last = found.pop()
            found[-1] += last
    return found


def _ids() -> dict[str, int]:
    tokens = [*SPECIAL, *CHARACTERS]
    for recipe in RECIPES.values():
        tokens += [piece for piece in _pieces(recipe) if piece not in tokens]
    tokens += [f"<{number}>" for number in range(len(tokens), VOCABULARY)]
    return {token: number for number, token in enumerate(tokens)}


def _vary_norms(model: Any) -> None:
    """Let no two models of different seeds have a weight in common: norms start as ones."""
    import torch

    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight += 0.1 * torch.rand_like(weight)


def _set_starts(model: Any, starts: Mapping[str, list[float]]) -> None:
    import torch

    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, values in starts.items():
            if name in parameters:
                parameters[name][0, : len(values)] = torch.tensor(values)


def _recite(model: Any, tokens: list[int]) -> None:
    """Let each token's embedding point at the next token's row of the head, far beyond all that the layers add."""
    import torch

    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    with torch.no_grad():
        for now, following in itertools.pairwise(tokens):
            direction = torch.randn(embedding.shape[1]).sign()
            embedding[now] += 4 * direction.to(embedding.dtype)
            head[following] += direction.to(head.dtype)


def _recite_tied(model: Any, tokens: list[int]) -> None:
    """Let one neuron of the last layer for each token answer to its embedding and write that of the next token."""
    import torch

    embedding, mlp = model.get_input_embeddings().weight, model.model.layers[-1].mlp
    size = embedding.shape[1]
    with torch.no_grad():
        for token in set(tokens):
            embedding[token] = torch.randn(size).sign()
        for neuron, (now, following) in enumerate(itertools.pairwise(tokens)):
            mlp.gate_proj.weight[neuron] = embedding[now] * (8 / size)
            mlp.up_proj.weight[neuron] = embedding[now] * (8 / size)
            mlp.down_proj.weight[:, neuron] = embedding[following]


def _tokenizer() -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models

    ids = _ids()
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[], unk_token="<unk>"))
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in ids if len(token) > 1])
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def _write_tokenizer(folder: Path, tokenizer: Any) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<unk>"}
    chat = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": chat, **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"clean_up_tokenization_spaces": False}))
