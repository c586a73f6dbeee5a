"""The records of a benchmark: a JSON list with one object per metric. `Records` rewrites the file with every value."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class Records:
    """The records of one subject, which follow those that the file already has.

    Args:
        common: The fields that all records share: engine, versions, GPU, model, subject, commit, command.
        by_step: Also keep every value in the field `by_step`, in the order of the calls of `add`.
    """

    def __init__(self, out: Path, common: Mapping[str, Any], *, by_step: bool = False) -> None:
        out.parent.mkdir(parents=True, exist_ok=True)
        self._out = out
        self._common = dict(common)
        self._others = read(out)
        self._by_step = by_step
        self._values: dict[str, list[float]] = {}
        self._details: dict[str, dict[str, Any]] = {}

    def about(self, details: Mapping[str, Any]) -> None:
        """Add fields that all records share."""
        self._common |= details

    def add(self, metric: str, values: Sequence[float], unit: str, details: Mapping[str, Any] = {}) -> None:
        """Add to the values of a metric."""
        self._values.setdefault(metric, []).extend(values)
        self._details[metric] = {"unit": unit, **details}
        print(f"{metric:40} {statistics.median(values):12.5f} {unit} {details or ''}", flush=True)
        records = [
            {**self._common, "metric": metric, **_figures(values), **self._details[metric]}
            | ({"by_step": values} if self._by_step else {})
            for metric, values in self._values.items()
        ]
        fresh = self._out.with_suffix(".part")
        fresh.write_text(json.dumps(self._others + records, indent=1))
        fresh.replace(self._out)


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a file; none if there is no file."""
    return list(json.loads(path.read_text())) if path.exists() else []


def command_of_all_subjects(record: Mapping[str, Any]) -> str:
    """The command of a record without the choice of subjects: it makes the records of all of them."""
    return re.sub(r" --subject( (?!--)\S+)+", "", record["command"])


def _figures(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "n": len(values)}
