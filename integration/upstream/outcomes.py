"""A pytest plugin: one JSON line for each phase of a test, so that a run that is killed leaves its outcomes.

`python -m pytest -p integration.upstream.outcomes`, with the file's path in `UPSTREAM_OUTCOMES`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

VARIABLE = "UPSTREAM_OUTCOMES"
REASON_CHARACTERS = 1500
DIED = "The process ended in this test."


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out the tests that have outcomes: an earlier process of this run died after them."""
    done = read(Path(os.environ[VARIABLE]))
    items[:] = [item for item in items if item.nodeid not in done]


def pytest_runtest_logstart(nodeid: str) -> None:
    """An outcome that holds if nothing more is written about this test: the process died in it."""
    _write(nodeid, "error", DIED)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        _write(report.nodeid, "failed" if report.when == "call" else "error", str(report.longrepr))
    elif report.skipped:
        place_and_reason = report.longrepr
        _write(
            report.nodeid,
            "skipped",
            str(place_and_reason[2] if isinstance(place_and_reason, tuple) else place_and_reason),
        )
    elif report.when == "call":
        _write(report.nodeid, "passed", "")


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _write(report.nodeid, "error", str(report.longrepr))


def _write(test: str, outcome: str, reason: str) -> None:
    line = json.dumps({"id": test, "outcome": outcome, "reason": reason[-REASON_CHARACTERS:]})
    with Path(os.environ[VARIABLE]).open("a") as file:
        file.write(line + "\n")


def read(path: Path) -> dict[str, tuple[str, str]]:
    """The outcome and the reason of each test, by its id. The last line about a test counts, but `error` in a teardown
    does not hide that the test itself failed."""
    found: dict[str, tuple[str, str]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        entry = json.loads(line)
        if entry["outcome"] == "error" and found.get(entry["id"], ("", ""))[0] == "failed":
            continue
        found[entry["id"]] = (entry["outcome"], entry["reason"])
    return found
