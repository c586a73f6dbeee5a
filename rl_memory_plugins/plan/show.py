"""A plan in the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rl_memory_plugins.plan.gpus import GIB
from rl_memory_plugins.plan.making import Advice, Plan, gib
from rl_memory_plugins.plan.phases import PARTS, Phase

if TYPE_CHECKING:
    from rich.console import Console

BAR = 20  # characters; the table then fits a terminal of 80
MARKS = "█▒·!"
"""The engine's memory, the trainer's, what is free, and that some lacks."""
ASCII_MARKS = "#=.!"

#: The options of `rl-memory plan` whose name is not that of the field.
_WORDS = {"from_host": "--from-host", "share_host_backups": "--share-host-backups", "checkpointing": "--checkpointing"}


def show(plan: Plan, console: Console) -> None:
    """Print a plan: its phases as a table with bars, what each part takes, the host, and what to change."""
    from rich.table import Table

    options = plan.options
    where = f"{options.ranks} x {options.card.name}, {gib(plan.gpu_total)} each"
    several = f"{options.engines} {options.engine} engines" if options.engines > 1 else options.engine
    console.print(f"{plan.model}: {plan.parameters / 1e9:.2f} B parameters, counted from its {plan.counted_by}")
    console.print(f"{where}; {several} with tp {options.tp}; trainer {options.trainer}")
    marks = MARKS if console.encoding.lower().startswith("utf") else ASCII_MARKS
    phases = Table("step", "engine", "trainer", "in use", "free", f"{marks[0]} engine {marks[1]} trainer")
    for column in phases.columns[1:5]:
        column.justify = "right"
    for phase in plan.phases:
        phases.add_row(
            phase.name, *map(_number, (phase.engine, phase.trainer, phase.total, phase.free)), bar(phase, marks)
        )
    console.print(phases)
    parts = Table("on each GPU", "GiB", "in the steps")
    parts.columns[1].justify = "right"
    for part in PARTS:
        holding = [phase for phase in plan.phases if part in phase.parts]
        if holding:
            steps = "all" if len(holding) == len(plan.phases) else ", ".join(phase.name for phase in holding)
            parts.add_row(part, _number(holding[0].parts[part]), steps)
    console.print(parts)
    host = Table("on the host", "GiB")
    host.columns[1].justify = "right"
    for part, nbytes in plan.host.items():
        host.add_row(part, _number(nbytes))
    host.add_row("together", _number(plan.host_total))
    console.print(host)
    for line in _notes(plan):
        console.print(line, soft_wrap=True)


def bar(phase: Phase, marks: str = MARKS) -> str:
    """The GPU's memory as characters: the engine's, the trainer's, and what is free or lacks."""
    scale = BAR / (phase.total + phase.free)
    engine, used = round(phase.engine * scale), round(phase.total * scale)
    within = min(used, BAR)
    engine = min(engine, within)
    drawn = marks[0] * engine + marks[1] * (within - engine) + marks[2] * (BAR - within)
    return drawn + (marks[3] if phase.free < 0 else "")


def _number(nbytes: int) -> str:
    return f"{nbytes / GIB:.1f}"


def _notes(plan: Plan) -> list[str]:
    causes = ", ".join(f"{cause} {_number(nbytes)}" for cause, nbytes in plan.engine.asleep.items())
    lines = [
        f"The KV cache holds {plan.engine.kv_tokens:,} tokens.",
        f"Asleep, the engine keeps {gib(plan.engine.process)} on each GPU: {causes}.",
    ]
    if plan.prepared:
        lines.append(
            f"From its start until the first sleep the engine keeps {gib(plan.prepared)} of the host ready, if a "
            "quarter of the host stays free."
        )
    if plan.options.trainer != "none":
        done = "leave beside the update" if plan.overlaps else "leave before the update"
        lines.append(f"The optimiser's states {done}.")
    if plan.beside:
        lines.append(
            f"With a PausableMemory the engine opens before the trainer has left: {gib(plan.beside)} are then in use "
            "on each GPU. The table has a trainer that leaves first."
        )
    if plan.fits:
        return [*lines, f"It fits: {plan.peak.name} takes most, and leaves {gib(plan.peak.free)} on each GPU."]
    lines += [f"It does not fit: {problem}." for problem in plan.problems]
    return lines + [f"  {line}" for line in map(advised, plan.advice)] if plan.advice else [*lines, "  Nothing helps."]


def advised(advice: Advice) -> str:
    """One line: the options, and what they give."""
    words = " ".join(
        _option(name, value) for name, value in advice.change.items() if not (name == "gpus" and not value)
    )
    outcome = "fits" if advice.fits else f"still lacks {gib(advice.lacking)}"
    return f"{words}: {outcome}" + (f" ({advice.loses})" if advice.loses else "")


def _option(name: str, value: Any) -> str:
    return _WORDS.get(name) or f"--{name.replace('_', '-')} {value}"
