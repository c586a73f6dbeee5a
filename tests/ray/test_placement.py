"""Where Ray places a fleet, and what stays of its place when it cannot start."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import ray
from ray.util.placement_group import placement_group_table

from integration.waiting import wait_until
from rl_memory_plugins.errors import InvalidRequestError
from rl_memory_plugins.ray import EngineDescription, EngineFleet
from tests.ray.conftest import OPTIONS, in_engine, model_of, tokens
from tests.vllm.calls import PROMPT
from tests.vllm.conftest import engine_options, greedy


def test_the_ranks_of_an_engine_stay_in_its_bundle(cluster: None, folder: Path) -> None:
    """Two ranks, and the trainer's group with bundles that are not the engine's."""
    group = ray.util.placement_group([{"CPU": 1}, {"CPU": 1}])
    ray.get(group.ready())
    description = EngineDescription("vllm", engine_options(folder, tensor_parallel_size=2), OPTIONS)
    with EngineFleet.start(description, 1, placement=group, bundles=[1]) as fleet:
        model = model_of(folder, 2)
        fleet.sleep(2)
        fleet.wake_up(["weights"])
        fleet.update(model, "two")
        fleet.wake_up()
        assert tokens(fleet, PROMPT, 1) == [greedy(model)]
        [engine] = fleet.engines
        ranks = [rank["rank"] for one in engine.memory()["engines"] for rank in one["ranks"]]
        assert ranks == [0, 1]
        found = in_engine(engine, lambda actor: ray.util.get_current_placement_group().id)
        assert found == group.id
        assert in_engine(engine, lambda actor: len(psutil.Process().children(recursive=True))) > 2  # the ranks' own
    ray.util.remove_placement_group(group)


def test_an_engine_that_cannot_start_leaves_no_fleet(cluster: None, folder: Path) -> None:
    before = set(placement_group_table())
    arguments = engine_options(folder, max_model_len=1 << 30)
    with pytest.raises(Exception, match="max_model_len|1073741824"):
        EngineFleet.start(EngineDescription("vllm", arguments), 1)
    (made,) = set(placement_group_table()) - before
    wait_until(lambda: placement_group_table()[made]["state"] == "REMOVED", "the placement group is removed")
    with pytest.raises(InvalidRequestError, match="no engine 'other'"):
        EngineFleet.start(EngineDescription("other", arguments), 1)
