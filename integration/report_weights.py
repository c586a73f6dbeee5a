"""The tables of `bench_weights`: one row per route, one table per engine and model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

ROUTES = {
    "direct": "the trainer's own tensors, kept open (`cuda_direct`)",
    "direct_unkept": "the trainer's own tensors, opened for each update",
    "staged": "staged through two slots (`cuda_ipc`)",
    "cpu": "from page-locked host memory (`cuda_ipc`)",
    "native": "the engine's own route, one handle per tensor",
    "native_packed": "the engine's own route, in buckets",
}
HEAD = ("", "whole call", "first call", "engine closed", "peak extra memory, engine", "peak extra memory, trainer")

Record = dict[str, Any]
Metrics = dict[str, dict[str, Record]]  # by metric and subject


class Run(NamedTuple):
    """The subject of one table. `host` is empty for the usual host."""

    engine: str
    version: str
    model: str
    host: str = ""


def page(title: str, metrics: Metrics) -> list[str]:
    """Lines of Markdown; none if no update was measured."""
    records = {metric: record for metric, subjects in metrics.items() for record in subjects.values()}
    about = [record for metric, record in records.items() if metric.startswith("update_") and "tensors" in record]
    if not about:
        return []
    first = about[0]
    lines = [f"### Weight updates through {title}: {first['tensors']} tensors, {first['bytes'] / 1e9:.1f} GB", ""]
    lines += ["| " + " | ".join(HEAD) + " |", "|---" + "|---:" * (len(HEAD) - 1) + "|"]
    if "copy_floor_s" in records:
        lines.append(f"| only a copy on the GPU (the floor) | {_ms(records['copy_floor_s'])} | | | | |")
    for route, name in ROUTES.items():
        if f"update_{route}_s" not in records:
            continue
        cells = [
            _ms(records.get(f"update_{route}_s")),
            _ms(records.get(f"update_{route}_first_s")),
            _ms(records.get(f"engine_closed_{route}_s")),
            _mib(records.get(f"peak_extra_mib_engine_{route}")),
            _mib(records.get(f"peak_extra_mib_trainer_{route}")),
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    commands = dict.fromkeys(record["command"] for record in about)
    return [*lines, "", *(f"Measured by `{command}`." for command in commands), ""]


def headline(runs: Mapping[Run, Metrics], shown: Sequence[Run], names: Mapping[str, str]) -> list[str]:
    """One table with a column for each run in `shown`; no lines if `shown` is empty."""
    if not shown:
        return []
    first = runs[shown[0]]["update_direct_s"]["plugin"]
    engines = " | ".join(f"{names[run.engine]} {run.version}" for run in shown)
    lines = [f"| new weights, {first['bytes'] / 1e9:.1f} GB | {engines} |"]
    lines.append("|---" + "|---:" * len(shown) + "|")
    for route, name in ROUTES.items():
        cells = [
            _ms(next(iter(runs[run].get(f"update_{route}_s", {}).values()), None))  # each route is of one subject
            for run in shown
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def _ms(record: Record | None) -> str:
    return "-" if record is None else f"{1000 * record['median']:.1f} ms"


def _mib(record: Record | None) -> str:
    return "-" if record is None else f"{record['median']:.0f} MiB"
