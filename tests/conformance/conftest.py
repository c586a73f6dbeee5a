"""One suite for every engine: `pytest tests/conformance --engine vllm --tp 2`.

A session starts one server. Before each test the engine is brought to the known state: awake, valid, holding
the checkpoint's weights. That a test leaves the engine able to get there is part of what is tested.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from integration.engines import ENGINES
from integration.engines.base import Launch, Server
from integration.models import SHAPES, new_model, write_model

PROMPT = [5, 6, 7, 8]
SEED, OTHER_SEED = 1, 2
STALL_S = 3.0


class Weights:
    """The trainer's copies of two sets of weights, and what the engine must answer under each."""

    def __init__(self, folder: Path) -> None:
        self.first = new_model(folder, SEED)
        self.other = new_model(folder, OTHER_SEED)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "small", SHAPES["small"], seed=SEED)


@pytest.fixture(scope="session")
def weights(model_folder: Path) -> Weights:
    return Weights(model_folder)


@pytest.fixture(scope="session")
def fault_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="session")
def launch(request: pytest.FixtureRequest, model_folder: Path, fault_dir: Path) -> Launch:
    tp, dp = request.config.getoption("--tp"), request.config.getoption("--dp")
    return Launch(
        model_folder,
        tp=tp,
        dp=dp,
        options={"fault_dir": str(fault_dir), "update_timeout_s": STALL_S, "drain_timeout_s": 60, "poison": True},
        # One arrangement has a key and the other has none, so that both rules are tested on a real server.
        api_key="secret-key" if tp * dp > 1 else "",
        host="0.0.0.0",
    )


@pytest.fixture(scope="session")
def running_server(
    request: pytest.FixtureRequest, launch: Launch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    kind = ENGINES[request.config.getoption("--engine")]()
    server = Server(kind, launch, tmp_path_factory.mktemp("server") / "server.log")
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def first_tokens(running_server: Server) -> list[int]:
    """The greedy answer under the checkpoint's weights, before anything has slept."""
    return running_server.generate(PROMPT)


@pytest.fixture
def server(running_server: Server, weights: Weights, first_tokens: list[int], fault_dir: Path) -> Iterator[Server]:
    restore(running_server, weights, first_tokens)
    yield running_server
    assert running_server.is_alive(), running_server.tail()
    for fault in fault_dir.iterdir():
        fault.unlink()
    restore(running_server, weights, first_tokens)


def restore(server: Server, weights: Weights, first_tokens: list[int]) -> None:
    """Bring the engine to the known state by correct calls alone."""
    control = server.control
    control.wake_up()
    if control.memory()["content"] != "valid" or server.generate(PROMPT) != first_tokens:
        control.update_weights(weights.first)
    assert server.generate(PROMPT) == first_tokens


def pytest_report_header(config: Any) -> str:
    return f"engine: {config.getoption('--engine')}, tp={config.getoption('--tp')}, dp={config.getoption('--dp')}"
