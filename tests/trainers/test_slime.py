"""The adapter for slime and miles over a stand-in of their sender, with toy engines that take real updates.

`test_slime_engine.py` runs the trainers' own classes. The last tests read the trainers' sources, where SLIME_SOURCE and
MILES_SOURCE name them.
"""

from __future__ import annotations

import ast
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

for folder in ("trainer", "weights"):
    sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / folder))

from process_pair import ProcessPair  # noqa: E402
from toy_engine import ToyEngine  # noqa: E402
from toys import checkpoint, loaded  # noqa: E402

from rl_memory_plugins import trainer as package  # noqa: E402
from rl_memory_plugins.errors import UnsupportedError, WeightUpdateError  # noqa: E402
from rl_memory_plugins.hooking import Hooks  # noqa: E402
from rl_memory_plugins.integrations import slime  # noqa: E402
from tests.trainers import slime_on_cpu, slime_stand_in  # noqa: E402

URL = "http://127.0.0.1:1"


class Engine(ToyEngine):
    """A toy in place of `EngineClient`."""

    def close(self) -> None:
        pass


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    engine = Engine()
    monkeypatch.setattr(package, "EngineClient", {URL: engine}.__getitem__)
    return engine


@pytest.fixture(params=["slime", "miles"])
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(slime, "hooks", Hooks("slime", "miles"))
    for module, made in slime_stand_in.modules(request.param).items():
        monkeypatch.setitem(sys.modules, module, made)
    return str(request.param)


def sync(updater: Any, seed: int) -> None:
    updater.tensors = checkpoint(seed)
    updater.update_weights()


def test_each_sync_is_one_update_under_the_trainer_s_version(name: str, engine: Engine) -> None:
    updater = slime_stand_in.enabled(name)(slime_stand_in.handle(URL, name))
    for step in (1, 2):
        sync(updater, step)
        engine.ranks[0].model.assert_unchanged(loaded(checkpoint(step)))
        assert engine.version == str(step)
    assert engine.log == [("post_update", "1"), ("post_update", "2")]
    assert updater.chunks.conversions == 1 + 2
    assert updater.own == []


def test_a_sync_that_ends_early_is_an_error_and_the_next_mends_it(name: str, engine: Engine) -> None:
    updater = slime_stand_in.enabled(name)(slime_stand_in.handle(URL, name))
    sync(updater, 1)
    updater.tensors = checkpoint(2)
    last = updater.tensors.popitem()[0]
    with pytest.raises(WeightUpdateError, match=last):
        updater.update_weights()
    # The only bucket was not whole, so no byte has left.
    assert engine.valid and engine.version == "1"
    engine.ranks[0].model.assert_unchanged(loaded(checkpoint(1)))
    sync(updater, 3)
    engine.ranks[0].model.assert_unchanged(loaded(checkpoint(3)))
    assert engine.valid and engine.version == "3"


@pytest.mark.parametrize(
    "others",
    [
        {"use_distribute": True},
        {"quantization_config": {"quant_method": "fp8"}},
        {"is_lora": True},
        {"_mm_tower_named_tensors": list},
        {"offload_rollout": False},
        {"sglang_pp_size": 2},
        {"rollout_num_gpus_per_engine": 16},
        {"mtp_num_layers": 1},
        {"sglang_speculative_algorithm": "EAGLE"},
        {"prefill_num_servers": 1},
        {"indep_dp": True},
    ],
    ids=lambda others: next(iter(others)),
)
def test_other_syncs_stay_the_trainer_s_own(name: str, engine: Engine, others: dict[str, Any]) -> None:
    updater = slime_stand_in.enabled(name)(slime_stand_in.handle(URL, name), **others)
    sync(updater, 1)
    assert updater.own == [1]
    assert engine.log == []


def test_a_trainer_without_the_sender_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slime, "hooks", Hooks("slime", "miles"))
    for module in slime_stand_in.modules():
        monkeypatch.setitem(sys.modules, module, None)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="UpdateWeightFromTensor"):
        slime.enable()


# -- two ranks -------------------------------------------------------------------------------------------------


def gathered(rank: int, with_own_engine: bool) -> list[str]:
    """Every rank converts in step. Rank 1 has an engine of its own, or none."""
    import torch.distributed as dist

    sys.modules.update(slime_stand_in.modules())
    slime.hooks = Hooks("slime")
    engine = Engine(first_device=rank) if rank == 0 or with_own_engine else None
    package.EngineClient = lambda url: engine  # type: ignore[assignment, misc]
    handle = None if engine is None else slime_stand_in.handle(URL)
    updater = slime_stand_in.enabled()(handle, rank, dist.barrier)
    for step in (1, 2):
        sync(updater, step)
        if engine is not None:
            engine.ranks[0].model.assert_unchanged(loaded(checkpoint(step)))
    if engine is not None:
        engine.fail["post_update"] = WeightUpdateError("the engine is out of memory")
    with pytest.raises(Exception, match="out of memory"):
        sync(updater, 3)
    sync(updater, 4)
    return [] if engine is None else [str(engine.version)]


def with_groups_made_anew(rank: int) -> list[str]:
    """slime destroys its process groups while it sleeps, the world included, and makes them anew before a sync."""
    from datetime import timedelta

    import torch.distributed as dist

    sys.path.insert(0, str(slime_on_cpu.source_of("slime")))
    from slime.utils import distributed_utils, reloadable_process_group

    groups: Any = reloadable_process_group
    groups.monkey_patch_torch_dist()
    distributed_utils.init_gloo_group()
    groups.register_default_process_group(timeout=timedelta(seconds=30))
    groups._uses_accelerator_backend = lambda backend: True  # as if the world were NCCL's
    groups._wrap_low_level_call = lambda **_: contextlib.nullcontext()  # asks the GPU for its memory
    sys.modules.update({name: made for name, made in slime_stand_in.modules().items() if name not in sys.modules})
    slime.hooks = Hooks("slime")
    engine = Engine()
    package.EngineClient = lambda url: engine  # type: ignore[assignment, misc]
    updater = slime_stand_in.enabled()(slime_stand_in.handle(URL) if rank == 0 else None, rank, dist.barrier)
    made = []
    for step in (1, 2, 3):
        sync(updater, step)
        made.append(len(groups.ReloadableProcessGroup.GROUPS[os.getpid()]))
        world = dist.group.WORLD
        groups.destroy_process_groups()
        groups.reload_process_groups()
        assert dist.group.WORLD is not world
    assert made == [1, 1, 1]
    return [str(engine.version)]


@pytest.fixture(scope="module")
def pair() -> Iterator[ProcessPair]:
    with ProcessPair() as pair:
        yield pair


@pytest.mark.parametrize(("with_own_engine", "versions"), [(True, [["4"], ["4"]]), (False, [["4"], []])])
def test_two_ranks_send_and_fail_together(pair: ProcessPair, with_own_engine: bool, versions: list[list[str]]) -> None:
    assert pair.run(gathered, with_own_engine, timeout_s=60) == versions


# -- the trainers' sources --------------------------------------------------------------------------------------


@pytest.mark.skipif(slime_on_cpu.source_of("slime") is None, reason="SLIME_SOURCE names no checkout of slime")
def test_slime_s_process_groups_may_be_made_anew_between_syncs() -> None:
    with ProcessPair() as pair:
        assert pair.run(with_groups_made_anew, timeout_s=60) == [["3"], ["None"]]


@pytest.fixture(params=["slime", "miles"])
def source(request: pytest.FixtureRequest) -> Path:
    folder = slime_on_cpu.source_of(request.param)
    if folder is None:
        pytest.skip(f"{request.param.upper()}_SOURCE names no checkout of {request.param}")
    return Path(folder, request.param, "backends")


def function(file: Path, name: str) -> str:
    """The source of a function or method."""
    text = file.read_text()
    found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef) and node.name == name]
    return ast.get_source_segment(text, found[0]) or ""


def test_the_trainer_calls_the_hook_before_it_makes_the_sender(source: Path) -> None:
    """`actor.py` imports Megatron's training loop, so it is read and not run."""
    initialize = function(source / "megatron_utils" / "initialize.py", "init")
    assert "load_function(args.custom_megatron_init_path)" in initialize
    actor = function(source / "megatron_utils" / "actor.py", "init")
    positions = [actor.index(text) for text in ("init(args", "UpdateWeightFromTensor", "update_weight_cls(")]
    assert positions == sorted(positions)


def test_the_engine_s_actor_tells_its_address(source: Path) -> None:
    actor = source / "sglang_utils" / "sglang_engine.py"
    names = {node.name for node in ast.walk(ast.parse(actor.read_text())) if isinstance(node, ast.FunctionDef)}
    assert {"get_url", "get_topology_info"} & names
