"""A plan, and how one is made from a model and options."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from rl_memory_plugins.errors import InvalidRequestError
from rl_memory_plugins.plan.engine import EnginePlan, plan_engine
from rl_memory_plugins.plan.gpus import GIB
from rl_memory_plugins.plan.host import plan_host
from rl_memory_plugins.plan.model import Model
from rl_memory_plugins.plan.options import Options
from rl_memory_plugins.plan.phases import Phase, plan_phases
from rl_memory_plugins.plan.trainer import TrainerPlan, plan_trainer

#: What a handoff keeps free beside the states that leave during an update (`trainer.room.ROOM_BYTES`).
ROOM_BYTES = 4 << 30

#: What it keeps free beside engines that open before the trainer has left (`trainer.room.AMPLE_BYTES`).
AMPLE_BYTES = 16 << 30


@dataclass(frozen=True)
class Advice:
    """A change of the options, and what it gives.

    Attributes:
        change: The options that change.
        fits: Whether the plan fits with it.
        lacking: Bytes that then still lack, of a GPU and of the host together.
        loses: What the change costs, for a person; empty if only time.
    """

    change: dict[str, Any]
    fits: bool
    lacking: int
    loses: str = ""


@dataclass(frozen=True)
class Plan:
    """What a model takes on each GPU, step by step, and on the host. All sizes are bytes.

    Attributes:
        model: The model's name.
        parameters: Their number.
        counted_by: Where the sizes of tensors come from: `configuration`, `safetensors` or `transformers`.
        options: What was asked for.
        gpu_total: The GPU's bytes.
        engine, trainer: Their parts.
        phases: The steps of a handoff, in their order.
        host: Bytes of the host by part.
        prepared: Bytes of the host that the engine keeps ready for copies of its weights from its start until its first
            level-2 sleep, while a quarter of the host stays free (`prepare_host_memory`).
        overlaps: Whether the optimiser's states may leave beside the update (`overlap` of a handoff).
        beside: Bytes in use on each GPU when the engine opens before the trainer has left, which takes room for all of
            both (`overlap` too); 0 without that room. `phases` are those of a trainer that leaves first.
        lacking_gpu, lacking_host: Bytes that lack; 0 if it fits.
        problems: What does not fit, one sentence each.
        advice: What to change. Each entry was planned as well.
    """

    model: str
    parameters: int
    counted_by: str
    options: Options
    gpu_total: int
    engine: EnginePlan
    trainer: TrainerPlan
    phases: list[Phase]
    host: dict[str, int]
    prepared: int
    overlaps: bool
    beside: int
    lacking_gpu: int
    lacking_host: int
    problems: list[str]
    advice: list[Advice] = dataclasses.field(default_factory=list)

    @property
    def fits(self) -> bool:
        return not self.problems

    @property
    def host_total(self) -> int:
        return sum(self.host.values())

    @property
    def peak(self) -> Phase:
        """The phase that takes most."""
        return max(self.phases, key=lambda phase: phase.total)

    def phase(self, name: str) -> Phase:
        return next(phase for phase in self.phases if phase.name == name)

    def to_record(self) -> dict[str, Any]:
        """A JSON-serialisable dict."""
        made = dataclasses.asdict(self)
        return {**made, "fits": self.fits, "host_total": self.host_total, "peak": self.peak.name}


def make_plan(model: Model, options: Options) -> Plan:
    """A plan without advice.

    Raises:
        InvalidRequestError: the engine cannot cut the model's heads into `tp` parts.
    """
    _require_heads(model, options)
    engine, trainer = plan_engine(model, options), plan_trainer(model, options)
    phases = plan_phases(engine, trainer, options)
    host = plan_host(engine, trainer, options)
    problems = []
    worst = min(phases, key=lambda phase: phase.free)
    lacking = max(-worst.free, 0)
    if lacking:
        problems.append(f"{worst.name} lacks {gib(lacking)} of {gib(options.card.total)} on each GPU")
    if engine.lacking:
        problems.append(f"the fraction {options.share:g} leaves no room for a KV cache: {gib(engine.lacking)} lack")
    total = sum(host.values())
    lacking_host = max(total - int(options.host_gib * GIB), 0) if options.host_gib else 0
    if lacking_host:
        problems.append(f"the host lacks {gib(lacking_host)}: {gib(total)} are needed")
    return Plan(
        model=model.name,
        parameters=model.parameters,
        counted_by=model.counted_by,
        options=options,
        gpu_total=options.card.total,
        engine=engine,
        trainer=trainer,
        phases=phases,
        host=host,
        prepared=engine.weights * options.ranks if options.level == 2 else 0,
        overlaps=_overlaps(phases, trainer, options),
        beside=_beside(phases, trainer, options),
        lacking_gpu=lacking + engine.lacking,
        lacking_host=lacking_host,
        problems=problems,
    )


def _overlaps(phases: list[Phase], trainer: TrainerPlan, options: Options) -> bool:
    if options.trainer == "none" or options.from_host or options.offload == "none":
        return False
    waking = next(phase for phase in phases if phase.name == "wake_weights")
    return waking.free - trainer.optimizer >= ROOM_BYTES


def _beside(phases: list[Phase], trainer: TrainerPlan, options: Options) -> int:
    """What is in use when the engine opens beside the trainer, with torch's cache of its training if that can stay."""
    if not _overlaps(phases, trainer, options) or options.offload != "all":
        return 0
    by_name = {phase.name: phase for phase in phases}
    wakes = by_name["wake_kv_cache"].engine - by_name["sleep"].engine
    with_cache, without = by_name["training"].total + wakes, by_name["load"].total + wakes
    fit = [held for held in (with_cache, without) if held + AMPLE_BYTES <= options.card.total]
    return fit[0] if fit else 0


def _require_heads(model: Model, options: Options) -> None:
    heads, kv_heads = model.sizes.heads, model.sizes.kv_heads
    divides = kv_heads % options.tp == 0 or options.tp % kv_heads == 0 or bool(model.sizes.kv_rank)
    if heads % options.tp or not divides:
        raise InvalidRequestError(
            f"{heads} heads and {kv_heads} key-value heads cannot be cut into {options.tp} parts",
            field="tp",
            got=options.tp,
            allowed=[n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)],
        )


def gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.1f} GiB"
