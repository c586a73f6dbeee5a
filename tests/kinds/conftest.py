"""The engine whose kinds are tested."""

from __future__ import annotations

import pytest

from integration.kinds.preload import preload


@pytest.fixture(scope="session")
def engine(request: pytest.FixtureRequest) -> str:
    name: str = request.config.getoption("--engine")
    preload(name)
    return name
