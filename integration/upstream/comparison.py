"""The two subjects side by side, and the differences that the contract wants."""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Mapping
from importlib import resources
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from integration.upstream.run import Outcomes

Test = dict[str, Any]
MOST_CHARACTERS = 200
ABSENT = ("error", "The run ended before this test.")


def compare(engine: str, native: Outcomes, plugin: Outcomes) -> list[Test]:
    """One entry for each test: id, native, plugin, and the reason of an expected difference or `None`.

    A test that was left out of one run counts as `error` there. A test that does not pass natively has `native_reason`.
    """
    expected = _expected(engine)
    tests: list[Test] = []
    for test in sorted({*native, *plugin}):
        outcomes = [subject.get(test, ABSENT)[0] for subject in (native, plugin)]
        entry: Test = {"id": test, "native": outcomes[0], "plugin": outcomes[1], "expected_difference": None}
        if is_worse(entry):
            entry["expected_difference"] = next((why for name, why in expected.items() if _is(test, name)), None)
            entry["reason"] = plugin.get(test, ABSENT)[1]
        if outcomes[0] != "passed":
            entry["native_reason"] = _in_a_line(native.get(test, ABSENT)[1])
        tests.append(entry)
    return tests


def _in_a_line(reason: str) -> str:
    """pytest's last line about the error itself, else the last line; of paths only the last part."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    errors = [line.removeprefix("E ").strip() for line in lines if line.startswith("E ")]
    return re.sub(r"(?:/[^\s/:'\"]+)+/", "", (errors or lines or [""])[-1])[:MOST_CHARACTERS]


def _is(test: str, name: str) -> bool:
    return test == name or fnmatch.fnmatchcase(test, name.replace("[", "[[]"))


def is_worse(test: Mapping[str, Any]) -> bool:
    """Whether the test passes natively and does not pass with the package."""
    return bool(test["native"] == "passed" and test["plugin"] != "passed")


def is_unexpected(test: Mapping[str, Any]) -> bool:
    return is_worse(test) and not test["expected_difference"]


def score(tests: list[Test]) -> dict[str, int]:
    """How many tests passed natively, with the package, and how many are worse, expectedly and unexpectedly."""
    return {
        "tests": len(tests),
        "passed_native": sum(test["native"] == "passed" for test in tests),
        "passed_plugin": sum(test["plugin"] == "passed" for test in tests),
        "better": sum(test["native"] != "passed" and test["plugin"] == "passed" for test in tests),
        "expected_differences": sum(bool(test["expected_difference"]) for test in tests),
        "unexpected_differences": sum(map(is_unexpected, tests)),
    }


def show(tests: list[Test]) -> None:
    table = Table("test", "native", "with the package", "expected difference")
    for test in tests:
        style = "red" if is_unexpected(test) else "yellow" if is_worse(test) else None
        table.add_row(
            escape(test["id"]), test["native"], test["plugin"], test["expected_difference"] or "", style=style
        )
    console = Console(width=180)
    console.print(table)
    console.print(score(tests))


def _expected(engine: str) -> dict[str, str]:
    text = (resources.files("integration.upstream") / "expected.json").read_text()
    found: dict[str, str] = json.loads(text)[engine]
    return found
