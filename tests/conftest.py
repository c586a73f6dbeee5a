"""Options of the whole test run."""

from __future__ import annotations

import pytest
from hypothesis import settings

settings.register_profile("no deadline", deadline=None)  # shared machines pause at any moment
settings.load_profile("no deadline")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("engine")
    group.addoption("--engine", default="vllm", choices=("vllm", "sglang"), help="the engine under test")
    group.addoption("--tp", default=1, type=int, help="its tensor-parallel size")
    group.addoption("--dp", default=1, type=int, help="its data-parallel size")
