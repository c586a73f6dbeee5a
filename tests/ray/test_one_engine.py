"""A fleet of one engine: started, put to sleep, updated, killed and replaced. The short part of `tests/ray`."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_memory_plugins.errors import EngineLostError, StateConflictError
from rl_memory_plugins.ray import EngineDescription, EngineFleet, status
from tests.ray.conftest import OPTIONS, SEED, in_engine, kill, model_of, tokens
from tests.vllm.calls import PROMPT
from tests.vllm.conftest import greedy


def test_the_life_of_an_engine(cluster: None, description: EngineDescription, folder: Path) -> None:
    with EngineFleet.start(description, 1) as fleet:
        [engine] = fleet.engines
        assert tokens(fleet, PROMPT, 1) == [greedy(model_of(folder, SEED))]
        model = model_of(folder, 2)
        with fleet.handoff(model).training("two"):
            assert [(one.state, one.reason) for one in status(fleet)] == [("closed", "asleep")]
        assert tokens(fleet, PROMPT, 1) == [greedy(model)]
        kill(engine)
        with pytest.raises(EngineLostError):
            engine.sleep()
        with pytest.raises(StateConflictError, match="no engine of the fleet is up"):
            fleet.sleep()
        assert fleet.replace(model) == [0]
        assert [(one.state, one.weight_version) for one in status(fleet)] == [("serves", "two")]
        assert in_engine(engine, lambda actor: actor._engine.api._drain_timeout_s) == OPTIONS["drain_timeout_s"]
        assert tokens(fleet, PROMPT, 1) == [greedy(model)]
