"""The tables of engines that take turns on one GPU, from the records of `integration.bench_turns`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from integration.records import command_of_all_subjects

SUBJECTS = {"plugin": "`take_turns_s`", "native": "the engine's own sleep", "restart": "restart"}
#: Each metric's row title, the field of the record, the factor to the unit of the table, that unit, and the digits.
ROWS = [
    ("swaps_per_minute", "swaps in a minute", "median", 1, "", 1),
    ("first_token_s", "first token of the sleeping model, median", "p50", 1, "s", 2),
    ("first_token_s", "first token of the sleeping model, 99 of 100", "p99", 1, "s", 2),
    ("awake_token_s", "first token of the model that is awake", "p50", 1000, "ms", 0),
    ("swap_s", "swap", "median", 1, "s", 2),
    ("sleep_s", "of it the sleep", "median", 1, "s", 2),
    ("wake_s", "of it the wake", "median", 1, "s", 2),
    ("first_sleep_s", "first sleep", "median", 1, "s", 2),
    ("swap_limit_s", "bytes copied to the host", "bytes_out", 1e-9, "GB", 1),
    ("swap_limit_s", "bytes copied to the GPU", "bytes_in", 1e-9, "GB", 1),
    ("swap_limit_s", "limit: both by the link", "median", 1, "s", 2),
    ("swap_ratio", "swap / limit", "median", 1, "", 2),
    ("swaps", "swaps measured", "median", 1, "", 0),
]

Metrics = dict[str, dict[str, dict[str, Any]]]
"""By metric and subject, the record."""


def pages(results: Path, names: Mapping[str, str]) -> list[str]:
    """A table for each file of records; no lines if there is none."""
    lines: list[str] = []
    for path in sorted(results.glob("turns-*.json"), key=lambda path: path.stem):
        found: Metrics = {}
        for record in json.loads(path.read_text()):
            found.setdefault(record["metric"], {})[record["subject"]] = record
        lines += _page(found, names)
    return lines


def _page(found: Metrics, names: Mapping[str, str]) -> list[str]:
    measured = found.get("swap_s")
    if measured is None:  # the run was cut short
        return []
    subjects = [subject for subject in SUBJECTS if subject in measured]
    about = measured[subjects[0]]
    model = f"two engines of {about['model'].upper()} shape, {about['memory']:g} of one {about['gpu']} each"
    lines = [f"### {names[about['engine']]} {about['engine_version']}, {model}, torch {about['torch']}", ""]
    lines.append("| | " + " | ".join(SUBJECTS[subject] for subject in subjects) + " |")
    lines.append("|---|" + "---:|" * len(subjects))
    for metric, title, field, factor, unit, digits in ROWS:
        values = [found.get(metric, {}).get(subject, {}).get(field) for subject in subjects]
        if any(value is not None for value in values):
            cells = ["-" if value is None else f"{value * factor:.{digits}f}" for value in values]
            lines.append(f"| {title}{', ' + unit if unit else ''} | " + " | ".join(cells) + " |")
    same = found.get("answers_identical", {})
    words = {None: "-", 1: "yes", 0: "**no**"}
    cells = [words[same.get(subject, {}).get("median")] for subject in subjects]
    lines.append("| answers identical | " + " | ".join(cells) + " |")
    command = command_of_all_subjects(about)
    return [*lines, "", f"Measured by `{command}`, commit {about['commit']}.", ""]
