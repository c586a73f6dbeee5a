"""The tensors of known kinds of models, from their configuration alone.

The tests compare every kind with what `transformers` makes from the same configuration.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rl_memory_plugins.plan.tensors import Tensor

_BIASED = ("qwen2", "qwen2_moe")  # keys, queries and values have biases
_HEAD_NORMS = ("qwen3", "qwen3_moe", "gemma3_text")
_FOUR_NORMS = ("gemma2", "gemma3_text")
_DEEPSEEK = ("deepseek_v2", "deepseek_v3")
_EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", *_DEEPSEEK)
#: Tied unless the configuration says otherwise.
_TIED = ("gemma2", "gemma3_text")

KNOWN = ("llama", "mistral", "qwen2", "qwen3", "phi3", *_FOUR_NORMS, *_EXPERTS)


class Sizes:
    """A configuration's sizes, under one name for each.

    Raises:
        KeyError: a size is missing.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.kind = str(config.get("model_type", ""))
        self.hidden = int(config["hidden_size"])
        self.layers = int(config["num_hidden_layers"])
        self.heads = int(config["num_attention_heads"])
        self.kv_heads = int(config.get("num_key_value_heads") or self.heads)
        self.head = int(config.get("head_dim") or self.hidden // self.heads)
        self.vocabulary = int(config["vocab_size"])
        self.intermediate = int(config["intermediate_size"])
        experts = config.get("n_routed_experts") or config.get("num_local_experts") or config.get("num_experts")
        self.experts = int(experts or 0)
        self.active_experts = min(int(config.get("num_experts_per_tok") or 0), self.experts)
        self.expert_intermediate = int(config.get("moe_intermediate_size") or self.intermediate)
        self.shared_intermediate = int(config.get("shared_expert_intermediate_size") or 0) or (
            int(config.get("n_shared_experts") or 0) * self.expert_intermediate
        )
        self.kv_rank = int(config.get("kv_lora_rank") or 0)  # of multi-head latent attention
        self.rope_head = int(config.get("qk_rope_head_dim") or 0)
        self.head_norms = self.kind in _HEAD_NORMS
        self.tied = bool(config.get("tie_word_embeddings", self.kind in _TIED))
        kinds = config.get("layer_types") or []
        self.attention_layers: int = self.layers - sum(kind == "linear_attention" for kind in kinds)
        self.expert_layers = _expert_layers(config, self) if self.experts else 0


def _expert_layers(config: Mapping[str, Any], sizes: Sizes) -> int:
    if sizes.kind in _DEEPSEEK:
        return max(sizes.layers - int(config.get("first_k_dense_replace") or 0), 0)
    step, dense = int(config.get("decoder_sparse_step") or 1), set(config.get("mlp_only_layers") or [])
    return sum((layer + 1) % step == 0 and layer not in dense for layer in range(sizes.layers))


def tensors_of(config: Mapping[str, Any]) -> list[Tensor]:
    """The parameters of a model of one of the `KNOWN` kinds, tied ones once.

    Raises:
        KeyError: the configuration lacks a size.
    """
    sizes = Sizes(config)
    hidden, layers = sizes.hidden, sizes.layers
    found = [Tensor("model.embed_tokens.weight", (sizes.vocabulary, hidden)), *_attention(config, sizes)]
    dense = layers - sizes.expert_layers
    if dense:
        found += _mlp("model.layers.*.mlp", hidden, sizes.intermediate, dense)
    if sizes.expert_layers:
        found += _experts(config, sizes)
    norms = 4 if sizes.kind in _FOUR_NORMS else 2
    found.append(Tensor("model.layers.*.input_layernorm.weight", (hidden,), norms * layers))
    found.append(Tensor("model.norm.weight", (hidden,)))
    if not sizes.tied:
        found.append(Tensor("lm_head.weight", (sizes.vocabulary, hidden)))
    return found


def _attention(config: Mapping[str, Any], sizes: Sizes) -> Iterator[Tensor]:
    prefix, hidden, layers = "model.layers.*.self_attn", sizes.hidden, sizes.layers
    if sizes.kv_rank:
        yield from _latent_attention(config, sizes)
        return
    rows = {"q": sizes.heads * sizes.head, "k": sizes.kv_heads * sizes.head, "v": sizes.kv_heads * sizes.head}
    all_biased = bool(config.get("attention_bias")) and sizes.kind not in _BIASED
    for part, count in rows.items():
        yield Tensor(f"{prefix}.{part}_proj.weight", (count, hidden), layers)
        if all_biased or sizes.kind in _BIASED:
            yield Tensor(f"{prefix}.{part}_proj.bias", (count,), layers)
    yield Tensor(f"{prefix}.o_proj.weight", (hidden, rows["q"]), layers)
    if all_biased:
        yield Tensor(f"{prefix}.o_proj.bias", (hidden,), layers)
    if sizes.head_norms:
        yield Tensor(f"{prefix}.q_norm.weight", (sizes.head,), 2 * layers)
    if sizes.kind == "gpt_oss":
        yield Tensor(f"{prefix}.sinks", (sizes.heads,), layers)


def _latent_attention(config: Mapping[str, Any], sizes: Sizes) -> Iterator[Tensor]:
    """Multi-head latent attention: keys and values come from one small vector for each token."""
    prefix, hidden, layers = "model.layers.*.self_attn", sizes.hidden, sizes.layers
    plain, value = int(config["qk_nope_head_dim"]), int(config["v_head_dim"])
    queries = sizes.heads * (plain + sizes.rope_head)
    rank = int(config.get("q_lora_rank") or 0)
    if rank:
        yield Tensor(f"{prefix}.q_a_proj.weight", (rank, hidden), layers)
        yield Tensor(f"{prefix}.q_a_layernorm.weight", (rank,), layers)
        yield Tensor(f"{prefix}.q_b_proj.weight", (queries, rank), layers)
    else:
        yield Tensor(f"{prefix}.q_proj.weight", (queries, hidden), layers)
    yield Tensor(f"{prefix}.kv_a_proj_with_mqa.weight", (sizes.kv_rank + sizes.rope_head, hidden), layers)
    yield Tensor(f"{prefix}.kv_a_layernorm.weight", (sizes.kv_rank,), layers)
    yield Tensor(f"{prefix}.kv_b_proj.weight", (sizes.heads * (plain + value), sizes.kv_rank), layers)
    yield Tensor(f"{prefix}.o_proj.weight", (hidden, sizes.heads * value), layers)


def _mlp(prefix: str, hidden: int, intermediate: int, count: int) -> Iterator[Tensor]:
    yield Tensor(f"{prefix}.gate_proj.weight", (intermediate, hidden), count)
    yield Tensor(f"{prefix}.up_proj.weight", (intermediate, hidden), count)
    yield Tensor(f"{prefix}.down_proj.weight", (hidden, intermediate), count)


def _experts(config: Mapping[str, Any], sizes: Sizes) -> Iterator[Tensor]:
    prefix, hidden, layers = "model.layers.*.mlp", sizes.hidden, sizes.expert_layers
    inner = sizes.expert_intermediate
    yield from _mlp(f"{prefix}.experts.*", hidden, inner, layers * sizes.experts)
    yield Tensor(f"{prefix}.gate.weight", (sizes.experts, hidden), layers)
    if sizes.kind == "gpt_oss":  # all its linear layers have biases
        yield Tensor(f"{prefix}.experts.*.gate_up_proj.bias", (2 * inner,), layers * sizes.experts)
        yield Tensor(f"{prefix}.experts.*.down_proj.bias", (hidden,), layers * sizes.experts)
        yield Tensor(f"{prefix}.router.bias", (sizes.experts,), layers)
    if sizes.shared_intermediate:
        yield from _mlp(f"{prefix}.shared_experts", hidden, sizes.shared_intermediate, layers)
    if config.get("shared_expert_intermediate_size") and sizes.kind == "qwen2_moe":
        yield Tensor(f"{prefix}.shared_expert_gate.weight", (1, hidden), layers)
