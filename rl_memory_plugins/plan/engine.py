"""What an engine holds on each of its GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from rl_memory_plugins.plan import activations
from rl_memory_plugins.plan.measured import ENGINES
from rl_memory_plugins.plan.model import WIDTHS, Model
from rl_memory_plugins.plan.options import Options


@dataclass(frozen=True)
class EnginePlan:
    """Bytes on one GPU.

    Attributes:
        weights, kv_cache, graphs: By tag: what a sleep releases. `kv_cache` is 0 if the fraction leaves no room.
        activations: The peak of a forward pass.
        asleep: What stays during a sleep, by cause as in `GET /memory`: `context`, `workspace`, `nccl`.
        kv_tokens: Tokens that the KV cache of the engine holds.
        update: What an update takes beside the trainer's buckets: vLLM reloads transformed weights layer by layer, and
            keeps what is outside the layers until the end.
        lacking: Bytes by which the fraction is too small for any KV cache.
    """

    weights: int
    kv_cache: int
    graphs: int
    activations: int
    asleep: dict[str, int]
    kv_tokens: int
    lacking: int
    update: int

    @property
    def process(self) -> int:
        """All that stays during a sleep."""
        return sum(self.asleep.values())


def plan_engine(model: Model, options: Options) -> EnginePlan:
    sizes, ranks, width = model.sizes, options.tp, WIDTHS[options.dtype]
    own = ENGINES[options.engine]
    total = options.card.total
    weights = model.weight_bytes(ranks, width)
    asleep = {"context": own.context, "workspace": own.workspace + own.layer * sizes.layers}
    if ranks > 1:
        asleep["nccl"] = own.communicators
    process = sum(asleep.values())
    graphs = own.graph * graph_batches(options.max_running) * sizes.layers
    forward = activations.engine_bytes(sizes, options.card.prefill_tokens, options.max_running, width, ranks)
    if options.kv_bytes:
        room = options.kv_bytes
    elif options.engine == "vllm":  # its fraction covers all that the engine takes
        room = int(options.share * total) - weights - graphs - forward - process
    else:  # SGLang's covers weights and KV cache, of the memory that is free before the weights
        room = int(options.share * (total - process)) - weights
    per_token = model.kv_bytes_per_token(ranks, 1 if options.kv_dtype == "fp8" else width)
    kv_cache = max(room, 0)
    return EnginePlan(
        weights=weights,
        kv_cache=kv_cache,
        graphs=graphs,
        activations=forward,
        asleep=asleep,
        kv_tokens=kv_cache // per_token,
        lacking=max(per_token - room, 0),
        update=model.outer * width // ranks if model.quantised and options.engine == "vllm" else 0,
    )


def graph_batches(most: int) -> int:
    """How many batch sizes an engine captures for up to `most` requests: 1, 2, 4, then each eighth."""
    most = min(most, 512)
    return sum(size <= most for size in (1, 2, 4)) + most // 8
