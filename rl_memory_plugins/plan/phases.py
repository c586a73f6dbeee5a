"""The steps of a `RolloutHandoff`, and what is on a GPU in each of them.

rollout         the engine answers
sleep           the engine has released its memory
load            the trainer's parameters and states are back
training        forward and backward
optimizer step  the activations are gone, the gradients are there
offload_others  states and gradients have left
wake_weights    the engine's weights are mapped; with `from_host` the trainer's have left before
sync            the update is under way
offload         the trainer's parameters have left
wake_kv_cache   the engine has all of its memory
"""

from __future__ import annotations

from dataclasses import dataclass

from rl_memory_plugins.plan.engine import EnginePlan
from rl_memory_plugins.plan.options import Options
from rl_memory_plugins.plan.trainer import TrainerPlan

PHASES = (
    "rollout",
    "sleep",
    "load",
    "training",
    "optimizer step",
    "offload_others",
    "wake_weights",
    "sync",
    "offload",
    "wake_kv_cache",
)
ALONE = ("rollout", "sleep", "wake_weights", "sync", "wake_kv_cache")
"""The phases of an engine without a trainer on its GPUs."""

#: What is counted, in the order of tables and pictures.
PARTS = (
    "engine process",
    "engine weights",
    "KV cache",
    "CUDA graphs",
    "engine activations",
    "engine update",
    "trainer process",
    "parameters",
    "optimizer",
    "gradients",
    "copies",
    "activations",
    "buckets",
)


@dataclass(frozen=True)
class Phase:
    """One step.

    Attributes:
        name: One of `PHASES`.
        parts: Bytes on one GPU by part; parts of 0 bytes are left out.
        total: Their sum.
        free: Of the GPU's bytes; negative if the phase does not fit.
    """

    name: str
    parts: dict[str, int]
    total: int
    free: int

    @property
    def engine(self) -> int:
        return sum(nbytes for part, nbytes in self.parts.items() if part in PARTS[:6])

    @property
    def trainer(self) -> int:
        return self.total - self.engine


def plan_phases(engine: EnginePlan, trainer: TrainerPlan, options: Options) -> list[Phase]:
    """All phases in their order."""
    stays = {"all": (), "optimizer": ("parameters",), "none": ("parameters", "optimizer")}[options.offload]
    own = {
        "parameters": trainer.parameters,
        "optimizer": trainer.optimizer,
        "gradients": trainer.gradients,
        "copies": trainer.copies,
        "activations": trainer.activations,
        "buckets": trainer.buckets,
    }
    asleep = {"engine process": engine.process, "trainer process": trainer.process}
    weights = {"engine weights": engine.weights}
    awake = {**weights, "KV cache": engine.kv_cache, "CUDA graphs": engine.graphs}
    sent = () if options.from_host and options.offload == "all" else ("parameters",)
    trained = ("parameters", "optimizer", "gradients")

    def phase(name: str, engine_parts: dict[str, int], *of_trainer: str) -> Phase:
        kept = {part: own[part] for part in own if part in (*of_trainer, *stays)}
        parts = {**asleep, **engine_parts, **kept}
        parts = {part: parts[part] for part in PARTS if parts.get(part)}
        total = sum(parts.values())
        return Phase(name, parts, total, options.card.total - total)

    found = [
        phase("rollout", {**awake, "engine activations": engine.activations}),
        phase("sleep", {}),
        phase("load", {}, "parameters", "optimizer"),
        phase("training", {}, *trained, "copies", "activations"),
        phase("optimizer step", {}, *trained),
        phase("offload_others", {}, "parameters"),
        phase("wake_weights", weights, *sent),
        phase("sync", {**weights, "engine update": engine.update}, *sent, "buckets"),
        phase("offload", weights),
        phase("wake_kv_cache", awake),
    ]
    return found if options.trainer != "none" else [one for one in found if one.name in ALONE]
