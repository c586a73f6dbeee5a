"""The table of the engines' own tests, from the records of `make upstream`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path


def table(results: Path, names: Mapping[str, str]) -> list[str]:
    """One line per record, the lines of docs/compatibility.md."""
    lines = [
        "| engine | device | tests | pass natively | pass with the package | expected differences | others | record |"
    ]
    lines.append("|---|---|---:|---:|---:|---:|---:|---|")
    for path in sorted(results.glob("upstream-*.json")):
        record = json.loads(path.read_text())
        score = record["score"]
        cells = [
            f"{names[record['engine']]} {record['engine_version']}",
            _named(record["device"]),
            *(str(score[name]) for name in ("tests", "passed_native", "passed_plugin")),
            *(str(score[name]) for name in ("expected_differences", "unexpected_differences")),
            f"`{path.name}`" + ("" if record.get("complete", True) else ", a part"),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _named(devices: Sequence[str]) -> str:
    return ", ".join(f"{count} {name}" if count > 1 else name for name, count in Counter(devices).items())
