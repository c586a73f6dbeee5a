"""The demo's picture: one round with a column of equal width for each stage, and the whole run over its seconds."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from integration.timeline import Stage, Timeline

GB = 1e9
COLOURS = {"engine": "#1f6fb2", "trainer": "#e07b1a"}
GREY = "#5a5a5a"
HANDOVER = ("handover", GREY)
TURNS = {"roll out": ("engine's turn", COLOURS["engine"]), "train": ("trainer's turn", COLOURS["trainer"])}


def draw(path: Path, title: str, timeline: Timeline, shown: Sequence[Stage], rewards: Mapping[float, float]) -> None:
    """Write a PNG.

    Args:
        path: The file.
        title: The title above the picture.
        timeline: A run with the sources of `COLOURS`.
        shown: The stages of one round, in their order.
        rewards: The rewards of the whole run, by the timeline's seconds.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    with plt.rc_context({"font.size": 10.5, "axes.spines.top": False, "axes.spines.right": False}):
        figure, (one, whole) = plt.subplots(2, 1, figsize=(13, 8), height_ratios=(3, 1.25), constrained_layout=True)
        figure.suptitle(title, fontsize=14, fontweight="bold")
        _draw_round(one, timeline, shown)
        _draw_run(whole, timeline, rewards)
        figure.savefig(path, dpi=110)
        plt.close(figure)


def _draw_round(axes: Any, timeline: Timeline, shown: Sequence[Stage]) -> None:
    top = sum(timeline.peak(name) for name in COLOURS) / GB
    together = timeline.peak_together() / GB
    training = next(number for number, stage in enumerate(shown) if stage.name == "train")
    _draw_turns(axes, shown, top * 1.13)
    axes.vlines(range(1, len(shown)), 0, together, color=GREY, linewidth=0.3)
    for name, colour in COLOURS.items():
        places, values = _by_stage(timeline, name, shown)
        axes.fill_between(places, values, color=colour, alpha=0.2, linewidth=0)
        axes.plot(places, values, color=colour, linewidth=2.6)
        _label(axes, name, places, values, training)
    for height, text in (
        (top, f"side by side the two would need {top:.1f} GB"),
        (together, f"taking turns they never hold more than {together:.1f} GB"),
    ):
        axes.axhline(height, color=GREY, linestyle="--", linewidth=1.2)
        axes.text(6.5, height, text, va="bottom", ha="center", color=GREY)
    axes.set_xticks([number + 0.5 for number in range(len(shown))], [_caption(stage) for stage in shown])
    axes.tick_params(axis="x", length=0)
    axes.set(xlim=(0, len(shown)), ylim=(0, top * 1.22), ylabel="resident memory, GB")
    axes.set_title("one round; every stage is drawn equally wide", loc="left", fontsize=11, color=GREY)


def _draw_turns(axes: Any, shown: Sequence[Stage], height: float) -> None:
    """Colour the background by whose turn it is."""
    turns = [(number, TURNS.get(stage.name, HANDOVER)) for number, stage in enumerate(shown)]
    for turn, group in itertools.groupby(turns, key=lambda found: found[1]):
        numbers = [number for number, _ in group]
        first, last = numbers[0], numbers[-1] + 1
        text, colour = turn
        axes.axvspan(first, last, color=colour, alpha=0.07, linewidth=0)
        axes.text((first + last) / 2, height, text, ha="center", va="center", color=colour, fontweight="bold")
        axes.axvline(last, color=GREY, linewidth=0.8)


def _by_stage(timeline: Timeline, name: str, shown: Sequence[Stage]) -> tuple[list[float], list[float]]:
    """The curve of one source: places, where stage n lies between n and n + 1, and values in GB."""
    import numpy as np

    samples = np.array(timeline.samples[name]) / GB
    places: list[float] = []
    values: list[float] = []
    for number, stage in enumerate(shown):
        inside = [when for when in timeline.times if stage.start < when < stage.end]
        for when in [stage.start, *inside, stage.end]:
            places.append(number + (when - stage.start) / max(stage.seconds, 1e-9))
            values.append(float(np.interp(when, timeline.times, samples)))
    return places, values


def _label(axes: Any, name: str, places: list[float], values: list[float], training: int) -> None:
    """Label the curve with its value in the first stage, and with the farthest value from that in the training."""
    first = values[0]
    inside = [value for place, value in zip(places, values, strict=True) if training <= place <= training + 1]
    other = max(inside, key=lambda value: abs(value - first))
    labels = ((0.5, first, "top" if other < first else "bottom"), (training + 0.5, other, "bottom"))
    for place, value, anchor in labels:  # the awake engine's label lies below its curve, away from the dashed lines
        height = value + (0.1 if anchor == "bottom" else -0.15)
        text = f"{name} {value:.1f} GB"
        axes.text(place, height, text, va=anchor, ha="center", color=COLOURS[name], fontweight="bold")
    if other < first:
        given_back = f"gives back\n{first - other:.1f} GB, {1 - other / first:.0%}"
        axes.text(2.07, (first + other) / 2 + 0.5, given_back, va="center", color=COLOURS[name])


def _caption(stage: Stage) -> str:
    first, _, second = stage.name.partition(" ")
    return f"{first}\n{second}\n{stage.seconds:.2f} s"


def _draw_run(axes: Any, timeline: Timeline, rewards: Mapping[float, float]) -> None:
    for name, colour in COLOURS.items():
        values = [value / GB for value in timeline.samples[name]]
        axes.fill_between(timeline.times, values, color=colour, alpha=0.18, linewidth=0)
        axes.plot(timeline.times, values, color=colour, linewidth=1.4)
    top = max(timeline.peak(name) for name in COLOURS) / GB
    for when, reward in rewards.items():
        axes.text(when, top * 1.05, f"reward {reward:.2f}", color=GREY, ha="right", va="bottom")
    axes.set(xlim=(0, timeline.stages[-1].end), ylim=(0, top * 1.3), xlabel="seconds", ylabel="GB")
    axes.set_title("the whole run, in true seconds", loc="left", fontsize=11, color=GREY)
