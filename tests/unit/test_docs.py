"""The documentation names every option, error, route and file, as they are."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
from fake_control import FakeControl

import rl_memory_plugins
from rl_memory_plugins import errors
from rl_memory_plugins.config import ENV_PREFIX, RLMemoryConfig
from rl_memory_plugins.engine_hooks import EngineHooks
from rl_memory_plugins.server.auth import ControlAuth
from rl_memory_plugins.server.examples import INSTALLATION
from rl_memory_plugins.server.router import build_router
from rl_memory_plugins.transition import STEPS
from rl_memory_plugins.weights.wire import PROTOCOL

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"
NATIVE_STATES = ("mended", "partly mended", "still there", "does not concern", "not decided")
STATES = ("mended", "prevented", "refused", "not affected", "same as native", "not decided")
ERRORS = {name: error for name, error in vars(errors).items() if name.endswith("Error")}


def rows(path: Path) -> list[list[str]]:
    """The cells of all table rows of a page."""
    lines = (line for line in path.read_text().splitlines() if line.startswith("|"))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize("option", RLMemoryConfig.model_fields)
def test_each_option_has_a_row_with_its_default_and_variable_and_a_section(option, monkeypatch):
    monkeypatch.delenv(ENV_PREFIX + option.upper(), raising=False)
    found = [row for row in rows(DOCS / "options.md") if row[0] == f"`{option}`"]
    assert len(found) == 1
    _, default, variable = found[0]
    assert variable == f"`{ENV_PREFIX}{option.upper()}`"
    named = {} if default == "unset" else {option: default.strip("`")}
    assert getattr(RLMemoryConfig.parse(named), option) == RLMemoryConfig.model_fields[option].default
    assert f"\n### `{option}`\n" in (DOCS / "options.md").read_text()


def test_no_option_is_documented_that_does_not_exist():
    sections = re.findall(r"^### `(\w+)`$", (DOCS / "options.md").read_text(), re.MULTILINE)
    assert sections == list(RLMemoryConfig.model_fields)


@pytest.mark.parametrize("name", ERRORS)
def test_each_error_has_a_row_with_its_status(name):
    [row] = [row for row in rows(DOCS / "errors.md") if row[0] == f"`{name}`"]
    assert row[1] == str(ERRORS[name].status)


@pytest.mark.parametrize("name", [name for name in ERRORS if name != "OutOfMemoryError"])  # only a base
def test_each_error_has_a_remedy(name):
    assert f"\n### `{name}`\n" in (DOCS / "errors.md").read_text()


def test_the_readme_lists_all_errors_with_their_statuses():
    listed = {row[1].strip("`"): row[0] for row in rows(REPOSITORY / "README.md") if row[0].isdigit() and len(row) == 4}
    listed = {name: status for name, status in listed.items() if name in ERRORS}
    expected = {name: str(error.status) for name, error in ERRORS.items()}
    for base in ("RLMemoryError", "OutOfMemoryError"):
        del expected[base]
    assert listed == expected


def test_each_route_is_in_the_readme_and_has_a_section():
    router = build_router(FakeControl, ControlAuth(), prefixes=[""])
    routes = {f"{method} {route.path}" for route in router.routes for method in route.methods}
    sections = re.findall(r"^## `((?:GET|POST) .*)`$", (DOCS / "http.md").read_text(), re.MULTILINE)
    assert set(sections) == routes
    in_readme = {row[0].strip("`") for row in rows(REPOSITORY / "README.md") if row[0].startswith(("`GET", "`POST"))}
    assert in_readme == routes


@pytest.mark.parametrize("transition", STEPS)
def test_each_step_of_a_report_is_listed(transition):
    [row] = [row for row in rows(DOCS / "contract.md") if row[0] == f"`{transition}`" and "`total`" in row[-1]]
    assert tuple(re.findall(r"`(\w+)`", row[1])) == STEPS[transition]


def test_what_an_adapter_implements_is_listed():
    table = {row[0] for row in rows(DOCS / "add-an-engine.md")}
    listed = {name for cell in table for name in re.findall(r"^`(\w+)\(", cell)}
    assert {name for name in vars(EngineHooks) if not name.startswith("_")} <= listed


def test_files_that_the_pages_name_exist():
    package = REPOSITORY / "rl_memory_plugins"
    pages = [*DOCS.glob("*.md"), REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md"]
    for page in pages:
        if page.name == "compatibility.md":  # names files of the engines
            continue
        for name in re.findall(r"`([\w./]+/[\w.]+\.py)`", page.read_text()):
            assert (package / name).exists() or (REPOSITORY / name).exists(), f"{page.name}: {name}"
    for row in rows(DOCS / "architecture.md"):
        for name in re.findall(r"`(\w+\.py)`", row[-1]):
            assert (package / name).exists(), name


def defined_in(path: Path) -> set[str]:
    """The names of the functions of a file; empty if the file does not exist."""
    tree = ast.parse(path.read_text() if path.exists() else "")
    return {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}


def test_tests_that_the_pages_name_exist():
    named = {found for page in DOCS.glob("*.md") for found in re.findall(r"(tests/[^`\s]*)::(\w*)", page.read_text())}
    assert named
    for file, name in sorted(named):
        assert name in defined_in(REPOSITORY / file), f"{file}::{name}"


def test_each_known_bug_has_a_state_with_the_package_and_a_test():
    bugs = [row for row in rows(DOCS / "known-bugs.md") if len(row) == 5 and row[0] not in ("report", "---")]
    assert bugs
    for report, _, native, ours, shown in bugs:
        assert native.startswith(NATIVE_STATES), report
        assert ours.startswith(STATES), report
        assert re.fullmatch(r"(`tests/[\w/]+\.py::test_\w+`(, |$))+", shown), report
        assert "not decided" not in (native, ours), f"{report}: without a reason"


def test_pythons_page_lists_what_the_package_exports():
    exported = rows(DOCS / "python.md")
    exported = exported[: next(i for i, row in enumerate(exported) if row[0] == "method")]  # the first table
    listed = {name for row in exported for name in re.findall(r"`(\w+)`", row[0])}
    assert listed - set(ERRORS) == set(rl_memory_plugins.__all__) - set(ERRORS) - {"__version__"}


def test_the_example_of_an_installation_has_the_present_protocol():
    [example] = INSTALLATION.values()
    assert example["protocol"] == PROTOCOL
    assert f'"protocol": {PROTOCOL},' in (DOCS / "http.md").read_text()


def test_json_examples_are_json():
    for page in DOCS.glob("*.md"):
        for example in re.findall(r"^```json\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            json.loads(example)


def test_each_page_is_in_the_navigation():
    navigation = (REPOSITORY / "mkdocs.yml").read_text()
    for page in DOCS.glob("*.md"):
        assert page.name in navigation
