"""A plan as a picture: a bar for each step, the GPU's memory as a line."""

from __future__ import annotations

from pathlib import Path

from rl_memory_plugins.errors import InvalidRequestError, UnsupportedError
from rl_memory_plugins.plan.gpus import GIB
from rl_memory_plugins.plan.making import Plan
from rl_memory_plugins.plan.phases import PARTS

#: Blues are the engine's, the other colours the trainer's.
COLOURS = (
    *("#08306b", "#2171b5", "#6baed6", "#9ecae1", "#c6dbef", "#deebf7"),
    *("#7f2704", "#d94801", "#f16913", "#fd8d3c", "#fdae6b", "#fdd0a2", "#d9d9d9"),
)


def draw(plan: Plan, file: Path) -> None:
    """Write a picture of the phases.

    Args:
        file: Its name's end selects the format: `.png`, `.svg` or `.pdf`.

    Raises:
        UnsupportedError: matplotlib is not installed.
        InvalidRequestError: the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"{error.name} is not installed, which draws pictures: pip install 'rl_memory_plugins[picture]'"
        ) from None
    figure = Figure(figsize=(10, 4.8), layout="constrained")
    axes = figure.subplots()
    names = [phase.name for phase in plan.phases]
    below = [0.0] * len(names)
    for part, colour in zip(PARTS, COLOURS, strict=True):
        heights = [phase.parts.get(part, 0) / GIB for phase in plan.phases]
        if any(heights):
            axes.bar(names, heights, bottom=below, label=part, color=colour, width=0.8)
            below = [low + height for low, height in zip(below, heights, strict=True)]
    axes.axhline(plan.gpu_total / GIB, color="black", linestyle="--", linewidth=1, label=plan.options.card.name)
    axes.set_ylabel("GiB on each GPU")
    axes.set_title(f"{plan.model}, {plan.options.engine} tp {plan.options.tp}, trainer {plan.options.trainer}")
    axes.tick_params(axis="x", rotation=30)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)
    try:
        figure.savefig(file)
    except (OSError, ValueError) as error:
        raise InvalidRequestError(f"cannot write {file}: {error}", field="picture", got=str(file)) from None
