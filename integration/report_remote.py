"""The tables of updates from one GPU to another, from the records of `integration.bench_remote`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SUBJECTS = {
    "broadcast": "NCCL's broadcast of the same bytes, without an engine (the limit)",
    "native": "the engine's own route",
    "plugin": "the plugin, by a communicator",
    "plugin_auto": "the plugin, by what `auto` takes",
}
HEAD = (
    "",
    "transport",
    "whole call, ms",
    "best to worst, ms",
    "GB/s",
    "first call, ms",
    "engine closed, ms",
    "peak extra memory, trainer's GPU, MiB",
    "engine's GPU, MiB",
)

Record = dict[str, Any]
Rows = dict[str, dict[str, Record]]
"""By subject and metric, the record."""


def pages(results: Path, names: Mapping[str, str]) -> list[str]:
    """A table for each file of records; nothing if there is none.

    Args:
        results: The folder of the records.
        names: What the engines are called, by their name in the records.
    """
    lines: list[str] = []
    for path in sorted(results.glob("remote-*.json")):
        found: Rows = {}
        for record in json.loads(path.read_text()):
            found.setdefault(record["subject"], {})[record["metric"]] = record
        lines += _page({subject: row for subject, row in found.items() if "update_s" in row}, names)
    return lines


def _page(found: Rows, names: Mapping[str, str]) -> list[str]:
    if not found:
        return []
    about = next(iter(found.values()))["update_s"]
    engine = f"{names[about['engine']]} {about['engine_version']}"
    title = f"{engine}, {about['model'].upper()} shape ({about['bytes'] / 1e9:.1f} GB)"
    lines = [f"### From one {about['gpu']} to another: {title}, torch {about['torch']}", ""]
    lines += [f"| {' | '.join(HEAD)} |", "|---|---" + "|---:" * (len(HEAD) - 2) + "|"]
    for subject, name in SUBJECTS.items():
        if subject not in found:
            continue
        row = found[subject]
        update = row["update_s"]
        cells = [
            f"`{update['transport']}`",
            _cell(update, 1000),
            f"{1000 * update['min']:.1f} to {1000 * update['max']:.1f}",
            _cell(row.get("gb_per_s"), 1),
            _cell(row.get("update_first_s"), 1000, 0),
            _cell(row.get("closed_s"), 1000),
            _cell(row.get("peak_extra_mib_trainer"), 1, 0),
            _cell(row.get("peak_extra_mib_engine"), 1, 0),
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    commands = dict.fromkeys(row["update_s"]["command"] for row in found.values())
    return [*lines, "", *(f"Measured by `{command}`." for command in commands), ""]


def _cell(record: Record | None, factor: float, digits: int = 1) -> str:
    return "-" if record is None else f"{factor * record['median']:.{digits}f}"
