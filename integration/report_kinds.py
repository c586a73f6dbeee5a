"""The table of the kinds of weights, from the records of `integration.kinds`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from integration.kinds.ways import WAYS

SHOWN = {"passed": "yes", "refused": "refused", "failed": "**no**", "engine_cannot": "-"}


def table(results: Path, names: Mapping[str, str]) -> list[str]:
    """One line per kind and a column per engine and way, and the reasons of what does not pass."""
    runs: dict[str, dict[tuple[str, str], dict[str, Any]]] = {}
    for path in sorted(results.glob("kinds-*.json")):
        records = json.loads(path.read_text())
        devices = " and ".join(dict.fromkeys(record["device"] for record in records))
        title = f"{names[records[0]['engine']]} {records[0]['engine_version']}, {devices}"
        runs[title] = {(record["kind"], record["way"]): record for record in records}
    kinds = dict.fromkeys(kind for run in runs.values() for kind, _ in run)
    lines = ["| kind | " + " | ".join(f"{title}: {', '.join(WAYS)}" for title in runs) + " |"]
    lines.append("|---|" + "---|" * len(runs))
    for kind in kinds:
        cells = [_cells([run.get((kind, way)) for way in WAYS]) for run in runs.values()]
        lines.append(f"| {kind} | " + " | ".join(cells) + " |")
    lines += ["", "Kinds of which every way passes that the engine has:", ""]
    lines += [f"- {title}: {_passed(run)}" for title, run in runs.items()]
    lines.append("")
    lines += ["| engine | kinds and ways | outcome and reason |", "|---|---|---|"]
    for title, run in runs.items():
        lines += [f"| {title} | {', '.join(places)} | {reason} |" for reason, places in _reasons(run).items()]
    return lines


def _cells(records: Sequence[Mapping[str, Any] | None]) -> str:
    """The ways in their order; a way that was not tried has an empty place, and so has a kind without any."""
    return ", ".join("" if one is None else SHOWN[one["outcome"]] for one in records) if any(records) else ""


def _passed(run: Mapping[tuple[str, str], Mapping[str, Any]]) -> int:
    kinds = {kind for kind, _ in run}
    outcomes = {kind: {record["outcome"] for (one, _), record in run.items() if one == kind} for kind in kinds}
    return sum("passed" in found and found <= {"passed", "engine_cannot"} for found in outcomes.values())


def _reasons(run: Mapping[tuple[str, str], Mapping[str, Any]]) -> dict[str, list[str]]:
    """By reason, the kinds with the ways that it concerns."""
    by_kind: dict[tuple[str, str], list[str]] = {}
    for (kind, way), record in run.items():
        if record["outcome"] != "passed":
            by_kind.setdefault((kind, f"{record['outcome'].replace('_', ' ')}, {_escaped(record)}"), []).append(way)
    found: dict[str, list[str]] = {}
    for (kind, reason), ways in by_kind.items():
        found.setdefault(reason, []).append(kind if len(ways) == len(WAYS) else f"{kind} ({', '.join(ways)})")
    return found


def _escaped(record: Mapping[str, Any]) -> str:
    return f"`{record['reason'].replace('|', '/').replace('`', '')}`" if record["reason"] else "no reason recorded"
