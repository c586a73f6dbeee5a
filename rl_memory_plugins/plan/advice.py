"""What to change in a plan that does not fit. Each change is planned, and named only if it helps."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from rl_memory_plugins.errors import InvalidRequestError
from rl_memory_plugins.plan.making import Advice, Plan, make_plan
from rl_memory_plugins.plan.model import Model
from rl_memory_plugins.plan.options import Options

#: Smaller micro-batches compute no longer well.
LEAST_TOKENS = 256
MOST_GPUS = 8
_STEPS = 100

_LOSES = {
    "fraction": "a smaller KV cache",
    "kv_gib": "a smaller KV cache",
    "optimizer": "another optimiser",
    "precision": "products in bfloat16",
    "gpus": "more GPUs",
    "level": "the engine cannot answer before an update",
    "tp": "more GPUs",
}


def with_advice(model: Model, plan: Plan) -> Plan:
    """The plan, with advice if it does not fit."""
    if plan.fits:
        return plan
    found = sorted(_single(model, plan), key=lambda one: (not one.fits, one.lacking, bool(one.loses)))
    if not any(one.fits for one in found):
        together = _together(model, plan)
        found = [together, *found] if together else found
    return dataclasses.replace(plan, advice=found)


def _single(model: Model, plan: Plan) -> list[Advice]:
    """The changes that help, each for itself."""
    return [advice for change in _changes(model, plan.options) if (advice := _tried(model, plan, change))]


def lacking(plan: Plan) -> int:
    return plan.lacking_gpu + plan.lacking_host


def _changes(model: Model, options: Options) -> Iterator[dict[str, Any]]:
    if options.trainer != "none":
        if options.offload != "all":
            yield {"offload": "all"}
        if not options.from_host and options.offload == "all":
            yield {"from_host": True}
        if not options.checkpointing:
            yield {"checkpointing": True}
        yield from _first_that_fits(model, options, "micro_tokens", _halves(options.micro_tokens))
        yield from _first_that_fits(model, options, "bucket_mib", _halves(options.bucket_mib, 32))
        if options.trainer == "ddp":
            yield {"trainer": "fsdp2"}
        if options.optimizer == "adamw":
            yield {"optimizer": "adamw8bit"}
        if options.precision == "fp32":
            yield {"precision": "mixed"}
    if options.level == 1:
        yield {"level": 2}
    if options.engines > 1 and not options.share_host_backups and options.level == 1:
        yield {"share_host_backups": True}
    if options.kv_gib:
        smaller = [options.kv_gib * step / _STEPS for step in range(_STEPS - 1, 0, -1)]
        yield from _first_that_fits(model, options, "kv_gib", [round(gib, 2) for gib in smaller])
    else:
        shares = [step / _STEPS for step in range(_STEPS, 0, -1)]
        yield from _first_that_fits(model, options, "fraction", [one for one in shares if one != options.share])
    more = [options.ranks << shift for shift in range(1, 4) if options.ranks << shift <= MOST_GPUS]
    if options.trainer in ("fsdp1", "fsdp2", "megatron"):
        yield from _first_that_fits(model, options, "gpus", more)
    wider = [options.tp << shift for shift in range(1, 4) if options.tp << shift <= MOST_GPUS]
    if options.trainer != "plain":
        yield from _first_that_fits(model, dataclasses.replace(options, gpus=0), "tp", wider)


def _halves(value: int, least: int = LEAST_TOKENS) -> list[int]:
    found = []
    while value // 2 >= least:
        value //= 2
        found.append(value)
    return found


def _first_that_fits(model: Model, options: Options, field: str, values: list[Any]) -> Iterator[dict[str, Any]]:
    """The first value with which the plan fits, or else the one that helps most."""
    best: tuple[int, Any] | None = None
    for value in values:
        change = {field: value, "gpus": 0} if field == "tp" else {field: value}
        made = _planned(model, options, change)
        if made is not None and (best is None or lacking(made) < best[0]):
            best = lacking(made), change
            if made.fits:
                break
    if best is not None:
        yield best[1]


def _planned(model: Model, options: Options, change: dict[str, Any]) -> Plan | None:
    try:
        return make_plan(model, dataclasses.replace(options, **change))
    except InvalidRequestError:  # e.g. heads that this many ranks cannot share
        return None


def _tried(model: Model, plan: Plan, change: dict[str, Any]) -> Advice | None:
    made = _planned(model, plan.options, change)
    if made is None or lacking(made) >= lacking(plan):
        return None
    return Advice(change, made.fits, lacking(made), _loses(change))


def _loses(change: dict[str, Any]) -> str:
    return ", ".join(dict.fromkeys(_LOSES[name] for name in change if name in _LOSES))


def _together(model: Model, plan: Plan) -> Advice | None:
    """Changes one after the other, those first that lose nothing, until the plan fits."""
    change: dict[str, Any] = {}
    while not plan.fits:
        steps = _single(model, plan)
        if not steps:
            return None
        best = min(steps, key=lambda one: (not one.fits, bool(one.loses), one.lacking))
        change |= best.change
        plan = make_plan(model, dataclasses.replace(plan.options, **best.change))
    return Advice(change, True, 0, _loses(change))
