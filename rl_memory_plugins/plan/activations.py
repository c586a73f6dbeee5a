"""Bytes that a forward pass keeps for the backward pass, and those that an engine's forward pass takes.

The rule for a trainer counts what torch saves for a decoder layer of `transformers` with flash or SDPA attention. A
test counts the same with torch's hooks. For one token and one layer, with the widths

    h  hidden    q  heads * head    k  key-value heads * head    i  intermediate    n  heads

    float32               4 (6 h + 2 q + 2 k + 4 i + n + 2)
    bfloat16              16 h + 4 q + 4 k + 8 i + 4 n + 8: the norms compute in float32
    autocast to bfloat16  26 h + 4 q + 4 k + 8 i + 4 n + 8: each matrix product keeps its own cast of its input

Norms of the heads (Qwen3) add 8 q + 8 k in float32 and 6 q + 6 k otherwise. A layer of experts has for `i` the
intermediate widths of a token's experts, and for each of them its input and output once more. With checkpointing each
layer keeps its input, and one layer at a time all of the above. The head and the loss take the logits, their float32
copy, the log-probabilities and their gradient.
"""

from __future__ import annotations

from typing import Literal

from rl_memory_plugins.plan.architectures import Sizes

Compute = Literal["fp32", "bf16", "autocast"]


def _intermediate(sizes: Sizes) -> int:
    """The intermediate width of a token: the larger one of dense layers and layers of experts."""
    experts = sizes.active_experts * sizes.expert_intermediate + sizes.shared_intermediate
    return max(experts, sizes.intermediate if sizes.expert_layers < sizes.layers else 0)


def layer_bytes(sizes: Sizes, compute: Compute) -> int:
    """What one token leaves in one layer."""
    hidden, queries, keys = sizes.hidden, sizes.heads * sizes.head, sizes.kv_heads * sizes.head
    moved = 2 * sizes.active_experts * hidden if sizes.expert_layers else 0
    inner = _intermediate(sizes)
    normed = sizes.head_norms * (queries + keys)
    if compute == "fp32":
        return 8 * normed + 4 * (6 * hidden + 2 * queries + 2 * keys + 4 * inner + moved + sizes.heads + 2)
    norms = 26 if compute == "autocast" else 16
    return norms * hidden + 4 * (queries + keys) + 8 * inner + 2 * moved + 4 * sizes.heads + 8 + 6 * normed


def training_bytes(sizes: Sizes, tokens: int, compute: Compute, *, checkpointing: bool, shards: int = 1) -> int:
    """What a micro-batch of `tokens` takes between its forward and its backward pass.

    Args:
        shards: Tensor-parallel ranks of the trainer with sequence parallelism, which share it all.
    """
    layer = layer_bytes(sizes, compute)
    if checkpointing:
        each = sizes.layers * sizes.hidden * (2 if compute == "bf16" else 4) + layer
    else:
        each = sizes.layers * layer
    head = 3 * 4 if compute == "fp32" else 2 + 3 * 4
    return tokens * (each + head * sizes.vocabulary) // shards


def engine_bytes(sizes: Sizes, tokens: int, requests: int, width: int, ranks: int) -> int:
    """The peak of an engine's forward pass: its widest layer, or the logits of all requests in float32, twice."""
    inner = 3 * _intermediate(sizes) // ranks
    layer = tokens * width * (3 * sizes.hidden + max(inner, 3 * sizes.heads * sizes.head // ranks))
    return max(layer, min(tokens, requests) * 8 * sizes.vocabulary)
