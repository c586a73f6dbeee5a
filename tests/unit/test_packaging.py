"""What `pyproject.toml`, the Makefile and the hosted checks say of each other and of the code."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:  # pytest brings it there
    import tomli as tomllib

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "rl_memory_plugins"
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
MAKEFILE = (REPOSITORY / "Makefile").read_text()
CHECKS = re.search(r"^check: (.*)$", MAKEFILE, re.MULTILINE)[1].split()


def names(requirements):
    return {re.match(r"[\w.-]+", requirement)[0] for requirement in requirements}


def with_extras(extra):
    """The distributions that an extra installs, those of the extras that it names among them."""
    found = names(EXTRAS[extra]) - {PROJECT["name"]}
    for inner in re.findall(rf"{PROJECT['name']}\[([\w,]+)\]", " ".join(EXTRAS[extra])):
        for one in inner.split(","):
            found |= with_extras(one)
    return found


def test_a_trainer_installs_three_distributions():
    assert names(PROJECT["dependencies"]) | with_extras("trainer") == {"httpx", "msgspec", "torch"}


@pytest.mark.parametrize("extra", ["vllm", "sglang", "cuda"])
def test_an_engines_extra_installs_the_server_and_the_command_line(extra):
    assert with_extras("server") | with_extras("cli") <= with_extras(extra)


def test_each_extra_that_an_error_names_exists():
    named = {
        (path.name, extra)
        for path in PACKAGE.rglob("*.py")
        for pattern in (r'needs\("(\w+)"\)', r"rl_memory_plugins\[(\w+)\]")
        for extra in re.findall(pattern, path.read_text())
    }
    assert {"config.py", "cli.py", "checkpoint.py", "cuda_driver.py"} <= {name for name, _ in named}
    assert not {(name, extra) for name, extra in named if extra not in EXTRAS}


def test_the_version_stands_in_one_place_and_is_the_last_of_the_changelog():
    [latest, *_] = re.findall(r"^## (\d\S+)", (REPOSITORY / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert latest == PROJECT["version"]
    assert not [path for path in PACKAGE.rglob("*.py") if f'"{PROJECT["version"]}"' in path.read_text()]


def test_the_hooks_before_a_commit_are_the_parts_of_make_check():
    hooks = re.findall(r"entry: make (\S+)", (REPOSITORY / ".pre-commit-config.yaml").read_text())
    assert hooks == CHECKS


def test_the_hosted_checks_run_targets_that_exist():
    workflow = (REPOSITORY / ".github" / "workflows" / "ci.yml").read_text()
    targets = set(re.findall(r"run: make ([\w.-]+)", workflow))
    assert {"check", "test", "release"} <= targets
    for target in targets:
        stem = re.sub(r"-\d\.\d+$", "-%", target)
        assert re.search(rf"^{re.escape(stem)}:", MAKEFILE, re.MULTILINE), target


def test_the_tested_pythons_are_those_that_are_promised():
    tested = re.search(r"^PYTHONS := (.*)$", MAKEFILE, re.MULTILINE)[1].split()
    promised = [line.rsplit(" ", 1)[1] for line in PROJECT["classifiers"] if "Python :: 3." in line]
    assert tested == promised and PROJECT["requires-python"] == f">={tested[0]}"
