"""The tables of whole training steps, from the records of `integration.bench_step`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from integration.records import command_of_all_subjects

SUBJECTS = {
    "native": "natively",
    "offloader": "`Offloader`",
    "pausable": "`PausableMemory`",
    "pausable_overlap": "with overlap",
}
#: Each metric's row title, the factor to the unit of the table, and that unit.
METRICS = {
    "release_s": ("last token to the trainer's computation", 1000, "ms"),
    "return_s": ("end of the training to the first token", 1000, "ms"),
    "transition_s": ("transition: both", 1000, "ms"),
    "first_transition_s": ("first transition", 1000, "ms"),
    "training_s": ("training, with waits for states", 1000, "ms"),
    "step_s": ("transition and training", 1000, "ms"),
    "peak_gpu_mib": ("most memory in use on a GPU", 1 / 1024, "GiB"),
    "host_mib": ("host memory", 1 / 1024, "GiB"),
}
COUNTS = {1: "one", 2: "two", 4: "four"}

Metrics = dict[str, dict[str, dict[str, Any]]]
"""By metric and subject, the record."""


def pages(results: Path, docs: Path, names: Mapping[str, str]) -> list[str]:
    """A table for each file of records, with the pictures that `docs` has in its folder `steps`."""
    lines: list[str] = []
    for path in sorted(results.glob("step-*.json"), key=lambda path: path.stem):
        found: Metrics = {}
        for record in json.loads(path.read_text()):
            found.setdefault(record["metric"], {})[record["subject"]] = record
        lines += _page(found, docs, names)
    return lines


def _page(found: Metrics, docs: Path, names: Mapping[str, str]) -> list[str]:
    subjects = [subject for subject in SUBJECTS if subject in found["transition_s"]]
    about = found["transition_s"][subjects[0]]
    engine, model, gpus = about["engine"], about["model"], about.get("gpus", 1)
    title = f"{names[engine]} {about['engine_version']}, {model.upper()} shape, {COUNTS[gpus]} {about['gpu']}"
    lines = [f"### Steps of {title}, torch {about['torch']}", ""]
    lines.append("| | " + " | ".join(SUBJECTS[subject] for subject in subjects) + " |")
    lines.append("|---|" + "---:|" * len(subjects))
    for metric, (row, factor, unit) in METRICS.items():
        if metric in found:
            values = [found[metric].get(subject) for subject in subjects]
            cells = ["-" if one is None else f"{one['median'] * factor:.{0 if unit == 'ms' else 1}f}" for one in values]
            lines.append(f"| {row}, {unit} | " + " | ".join(cells) + " |")
    lines += _ratios(found, subjects)
    losses = [found["losses"][subject]["by_step"] for subject in subjects]
    equal = "equal bit by bit" if all(one == losses[0] for one in losses) else "**not equal**"
    limit = found["transition_limit_s"][subjects[0]]
    moved = f"{limit['bytes'] / 1e9:.1f} GB"
    losses = f" The losses of all subjects are {equal}." if len(subjects) > 1 else ""
    lines += ["", f"Each way {moved} cross the link of a GPU.{losses}", ""]
    command = command_of_all_subjects(about)
    lines += [f"Measured by `{command}`.", ""]
    shape = model if gpus == 1 else f"{model}-tp{gpus}"
    for subject in subjects:
        picture = Path("steps", f"step-{engine}-{shape}-{subject}.svg")
        if (docs / picture).exists():
            lines += [f"![memory of the GPU over two steps, {SUBJECTS[subject]}]({picture})", ""]
    return lines


def _ratios(found: Metrics, subjects: list[str]) -> list[str]:
    def row(title: str, parts: Mapping[str, tuple[float, float] | None]) -> str:
        cells = ["-" if pair is None else f"{pair[0] / pair[1]:.2f}" for pair in parts.values()]
        return f"| {title} | " + " | ".join(cells) + " |"

    def median(metric: str, subject: str) -> float:
        return float(found[metric][subject]["median"])

    transitions = {subject: median("transition_s", subject) for subject in subjects}
    limit = min(median("transition_limit_s", one) for one in subjects)  # the link is not slower for one of them
    lines = [
        row("transition / limit", {one: (transitions[one], limit) for one in subjects}),
        row("first / later", {one: (median("first_transition_s", one), transitions[one]) for one in subjects}),
    ]
    if "native" in transitions:
        lines.append(row("transition / native", {one: (transitions[one], transitions["native"]) for one in subjects}))
    return lines
