"""OpenRLHF's own engine actor in a local Ray, with the package and with the adapter, with a real vLLM on the CPU.

The trainer's rank is the adapter's class over OpenRLHF's, around a model in this process in place of DeepSpeed's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from integration.engines.base import REPOSITORY
from integration.models import SHAPES, new_model, write_model
from rl_memory_plugins.errors import EngineAsleepError, ManifestError, RLMemoryError
from tests.vllm.conftest import PROMPT, environment, greedy

sys.path.append(str(REPOSITORY / "integration" / "trainers" / "openrlhf_on_cpu"))

import ray
from openrlhf.trainer.ray import ppo_actor, vllm_engine
from openrlhf.trainer.ray.vllm_engine import batch_vllm_engine_call

from rl_memory_plugins.integrations import openrlhf as integration
from tests.trainers.openrlhf_worker import OnCpu, handles

OWN_ENGINE = vllm_engine.RolloutRayActor
SEEDS = (2, 3, 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny", SHAPES["tiny"], dtype="bfloat16", seed=1)


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[None]:
    variables = {
        **environment(folder),
        "PYTHONPATH": str(REPOSITORY),
        "RAY_USAGE_STATS_ENABLED": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        ray.init(num_cpus=2, num_gpus=1, include_dashboard=False, object_store_memory=100 << 20)
        yield
    finally:
        ray.shutdown()
        os.environ.clear()
        os.environ.update(before)


class Engine:
    """An engine's actor, and the calls that OpenRLHF makes to it."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        [answer] = batch_vllm_engine_call([self.actor], method, *args, **kwargs)
        return answer

    def status(self) -> Any:
        """The status of the engine's only rank, and the version of the weights."""

        [engine] = ray.get(self.actor.__ray_call__.remote(lambda actor: actor.llm.rl_memory.status_now()))
        return engine.ranks[0], engine.weight_version

    @property
    def weights(self) -> str:
        return str(self.status()[0].tags["weights"].state)

    @property
    def content(self) -> str:
        return str(self.status()[0].content)

    @property
    def version(self) -> str:
        return str(self.status()[1])

    def generate(self) -> list[int]:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        return list(self.call("generate", PROMPT, sampling).outputs[0].token_ids)


def model_of(folder: Path, seed: int) -> torch.nn.Module:
    return new_model(folder, seed).to(torch.bfloat16)


def engine_arguments(folder: Path) -> dict[str, Any]:
    """As `create_vllm_engines` passes them."""
    return {
        "model": str(folder),
        "enforce_eager": True,
        "tensor_parallel_size": 1,
        "seed": 1,
        "distributed_executor_backend": "uni",
        "max_model_len": 1024,
        "enable_prefix_caching": False,
        "dtype": "bfloat16",
        "trust_remote_code": True,
        "full_determinism": False,
        "gpu_memory_utilization": 0.5,
        "bundle_indices": None,
        "num_gpus": 0.2,
        "enable_sleep_mode": True,
    }


def test_openrlhf_s_own_sync_on_an_engine_with_the_package(cluster: None, folder: Path) -> None:
    """One call for each parameter, by OpenRLHF's own worker extension."""
    actor = OWN_ENGINE.options(num_gpus=0.2, runtime_env={"env_vars": {"RL_MEMORY": "1"}}).remote(
        **engine_arguments(folder), worker_extension_cls=f"{OnCpu.__module__}.{OnCpu.__name__}"
    )
    try:
        engine = Engine(actor)
        engine.call("sleep")  # as `create_vllm_engines` does
        engine.call("wake_up")
        assert engine.generate() == greedy(model_of(folder, 1))
        for seed, level in zip(SEEDS, (1, 2, 1), strict=True):
            model = model_of(folder, seed)
            engine.call("sleep", level=level)
            engine.call("wake_up", tags=["weights"])
            assert engine.content == ("valid" if level == 1 else "stale")
            for name, parameter in model.named_parameters():
                engine.call(
                    "update_weight_cuda_ipc",
                    name,
                    dtype=parameter.dtype,
                    shape=parameter.shape,
                    ipc_handles=handles(parameter.data),
                )
            engine.call("wake_up")
            assert engine.generate() == greedy(model)
    finally:
        ray.kill(actor)


@pytest.fixture(scope="module")
def engine(cluster: None, folder: Path) -> Iterator[Engine]:
    """The engine that OpenRLHF makes with the adapter in place."""
    from ray.util.placement_group import placement_group, remove_placement_group

    integration.install()
    group = placement_group([{"GPU": 1, "CPU": 1}])
    ray.get(group.ready())
    [actor] = vllm_engine.create_vllm_engines(
        1, 1, str(folder), 1, False, False, True, 1024, group, 0.5, vllm_enable_sleep=True
    )
    yield Engine(actor)
    ray.kill(actor)
    remove_placement_group(group)


class Rank:
    """A trainer of one rank."""

    def __init__(self, engine: Engine) -> None:
        self.policy = ppo_actor.PolicyModelActor.__ray_actor_class__.__new__(
            ppo_actor.PolicyModelActor.__ray_actor_class__
        )
        args = SimpleNamespace(
            train=SimpleNamespace(colocate_all=True, async_enable=False),
            ds=SimpleNamespace(tensor_parallel_size=1, lora=SimpleNamespace(rank=0), load_in_4bit=False, zero_stage=2),
            vllm=SimpleNamespace(tensor_parallel_size=1),
        )
        self.policy.strategy = SimpleNamespace(args=args)
        self.policy.vllm_engines = [engine.actor]

    def sync(self, model: torch.nn.Module, version: str, stage: int = 2) -> None:
        self.policy.strategy.args.ds.zero_stage = stage
        self.policy.actor = SimpleNamespace(is_vlm=False, model=SimpleNamespace(module=model))
        assert self.policy.broadcast_to_vllm(weight_version=version)


def test_openrlhf_s_first_sleep_keeps_the_weights(engine: Engine, folder: Path) -> None:
    assert engine.weights == "preserved"
    engine.call("wake_up")
    assert engine.generate() == greedy(model_of(folder, 1))
    engine.call("sleep")  # as after an evaluation
    engine.call("wake_up")
    assert engine.generate() == greedy(model_of(folder, 1))


@pytest.mark.parametrize("stage", [2, 3])
def test_syncs_with_the_adapter_after_level_2(engine: Engine, folder: Path, stage: int) -> None:
    rank = Rank(engine)
    for step, seed in enumerate(SEEDS, start=10 * stage):
        model = model_of(folder, seed)
        engine.call("discard_at_next_sleep")
        engine.call("sleep")
        assert engine.weights == "discarded"
        engine.call("wake_up", tags=["weights"])
        assert engine.content == "stale"
        rank.sync(model, str(step), stage)
        assert (engine.content, engine.version) == ("valid", str(step))
        engine.call("wake_up")
        assert engine.generate() == greedy(model)
        engine.call("sleep")  # after an evaluation: level 1 again
        engine.call("wake_up")
        assert engine.generate() == greedy(model)


def test_an_update_that_breaks_off_keeps_the_engine_closed_until_the_next(
    engine: Engine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import deepspeed

    rank = Rank(engine)
    model, other = model_of(folder, 5), model_of(folder, 6)
    misshapen = model_of(folder, 6)
    misshapen.model.norm.weight = torch.nn.Parameter(misshapen.model.norm.weight[:-1])

    class Failing(deepspeed.zero.GatheredParameters):
        left = 5

        def __enter__(self) -> None:
            Failing.left -= 1
            if Failing.left == 0:
                raise RuntimeError("the trainer is out of memory")
            super().__enter__()

    def broken_off() -> None:
        with monkeypatch.context() as patch, pytest.raises(RLMemoryError, match="out of memory"):
            patch.setattr(deepspeed.zero, "GatheredParameters", Failing)
            rank.sync(other, "41", stage=3)

    def refused() -> None:
        with pytest.raises(ManifestError, match=r"model\.norm\.weight"):
            rank.sync(misshapen, "41")

    engine.call("wake_up")
    rank.sync(model, "40")
    for fail in (broken_off, refused):
        engine.call("discard_at_next_sleep")
        engine.call("sleep")
        engine.call("wake_up", tags=["weights"])
        fail()
        assert engine.content in ("stale", "failed")
        assert engine.version in ("40", "42")
        engine.call("wake_up")
        with pytest.raises(EngineAsleepError):
            engine.generate()
        rank.sync(other, "42")
        assert engine.generate() == greedy(other)
