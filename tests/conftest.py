"""Options of the whole test run."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.run_report import RunReport

# Shared machines pause at any moment.
settings.register_profile("no deadline", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no deadline")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("engine")
    group.addoption("--engine", default="vllm", choices=("vllm", "sglang"), help="the engine under test")
    group.addoption("--tp", default=1, type=int, help="its tensor-parallel size")
    group.addoption("--pp", default=1, type=int, help="its pipeline-parallel size")
    group.addoption("--dp", default=1, type=int, help="its data-parallel size")
    group.addoption("--ray", action="store_true", help="vLLM's ranks are actors on two nodes of a local Ray")
    group.addoption("--device", default="cpu", choices=("cpu", "cuda"), help="where it runs")
    group.addoption("--fork", action="store_true", help="on the CPU: its processes are forks, which start in seconds")
    group.addoption("--kinds", default="chosen", choices=("chosen", "all"), help="the kinds of weights of tests/kinds")
    group.addoption("--updates", default=500, type=int, help="how many updates the long run makes")
    group.addoption(
        "--rounds", default=100, type=int, help="how often data-parallel experts are resumed under requests"
    )
    group.addoption("--traffic-s", default=120.0, type=float, help="how long two engines on one device get requests")
    group.addoption("--need-browser", action="store_true", help="tests in a browser fail where there is none")
    parser.getgroup("reporting").addoption("--report", type=Path, help="write versions and outcomes here, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--report")
    if path is not None:
        config.pluginmanager.register(RunReport(path, config.getoption("--engine")))


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # collections while tests run need not look at all that was imported for them
