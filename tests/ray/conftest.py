"""A local Ray, and fleets of real vLLM engines on the CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from integration.models import SHAPES, new_model, write_model
from integration.waiting import wait_until
from rl_memory_plugins.ray import EngineActorHandle, EngineDescription, EngineFleet
from tests.vllm.conftest import engine_options, environment

OPTIONS = {"drain_timeout_s": 77, "poison": True}
SEED = 1


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny", SHAPES["tiny"], seed=SEED)


@pytest.fixture(scope="session")
def cluster(folder: Path) -> Iterator[None]:
    """A local Ray whose workers have what an engine needs on the CPU, and no option of this package."""
    before = dict(os.environ)
    # Ray gives its workers a niceness of 15: beside other tests their engines would take minutes to start.
    os.environ.update({**environment(folder), "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"})
    try:
        # Ray counts CPUs as its user says: these processes mostly wait for each other.
        ray.init(address="local", num_cpus=4, include_dashboard=False, object_store_memory=100 << 20)
        yield
    finally:
        ray.shutdown()
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(scope="session")
def description(folder: Path) -> EngineDescription:
    return EngineDescription("vllm", engine_options(folder), OPTIONS)


def model_of(folder: Path, seed: int) -> torch.nn.Module:
    return new_model(folder, seed)


def kill(engine: EngineActorHandle) -> None:
    """Kill the actor's process, and wait until Ray has restarted the actor."""
    pid = engine.about().pid
    os.kill(pid, 9)
    wait_until(lambda: engine.phase(engine.actor.about.remote()) == "empty", "Ray restarts the actor", 240)
    assert engine.about().pid != pid


def in_engine(engine: EngineActorHandle, call: Any) -> Any:
    """The result of `call(actor)` in the process of the actor."""
    return ray.get(engine.actor.__ray_call__.remote(call))


def tokens(fleet: EngineFleet, prompt: list[int], count: int = 4) -> list[list[int]]:
    """Greedy answers to `count` equal prompts, from all engines in turn."""
    found = fleet.generate([prompt] * count, {"temperature": 0, "max_tokens": 8, "ignore_eos": True})
    return [answer.token_ids for answer in found]
