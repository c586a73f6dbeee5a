"""verl's own server, worker extension and sender in a local Ray, and the adapter, with a real vLLM on the CPU."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from integration.engines.base import REPOSITORY
from integration.models import SHAPES, new_model, write_model
from rl_memory_plugins.client import EngineClient
from rl_memory_plugins.errors import EngineAsleepError, ManifestError, WeightUpdateError
from tests.vllm.conftest import PROMPT, environment, greedy

os.environ["VERL_USE_EXTERNAL_MODULES"] = "integration.trainers.verl_on_cpu"  # before the first import of verl

from verl.workers.rollout.vllm_rollout import vllm_rollout

from rl_memory_plugins.integrations import verl as integration

ADAPTER = integration.__name__
SEEDS = (2, 3, 4)


class Verl:
    """One engine of verl's, and what a trainer of one process calls."""

    def __init__(self, folder: Path) -> None:
        import ray
        from omegaconf import OmegaConf
        from verl.utils.config import omega_conf_to_dataclass
        from verl.workers.rollout.replica import RolloutMode
        from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

        classes = "verl.workers.config"
        model = OmegaConf.create(
            {"_target_": f"{classes}.HFModelConfig", "path": str(folder), "external_lib": ADAPTER},
        )
        rollout = OmegaConf.create(
            {
                "_target_": f"{classes}.RolloutConfig",
                "name": "vllm",
                "tensor_model_parallel_size": 1,
                "dtype": "float32",
                "enforce_eager": True,
                "max_model_len": 1024,
                "max_num_seqs": 4,
                "max_num_batched_tokens": 2048,
                "engine_kwargs": {"vllm": {"kv_cache_memory_bytes": 64 << 20}},
                "checkpoint_engine": {
                    "_target_": f"{classes}.CheckpointEngineConfig",
                    "update_weights_bucket_megabytes": 8,  # several buckets
                },
            }
        )
        self.config = omega_conf_to_dataclass(rollout)
        self.server = (
            ray.remote(vLLMHttpServer)
            .options(name="vllm_server_0_0", max_concurrency=100)
            .remote(
                config=self.config,
                model_config=model,
                rollout_mode=RolloutMode.HYBRID,
                workers=[None],
                replica_rank=0,
                node_rank=0,
                gpus_per_node=1,
                nnodes=1,
                cuda_visible_devices="0",
            )
        )
        ray.get(self.server.launch_server.remote(), timeout=600)
        self.model_config = omega_conf_to_dataclass(model)
        host, port = ray.get(self.server.get_server_address.remote())
        self.engine = EngineClient(f"http://{host}:{port}")

    def expected(self, model: torch.nn.Module) -> list[int]:
        """verl's engine answers no tokens that the tokenizer does not have."""
        return greedy(model, vocabulary=len(self.model_config.tokenizer))

    def adapter(self, make: type) -> Any:
        return make(config=self.config, model_config=self.model_config, device_mesh=None)

    def contents(self) -> set[str]:
        return {rank["content"] for engine in self.engine.memory()["engines"] for rank in engine["ranks"]}

    async def generate(self, name: str) -> list[int]:
        sampling = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
        return list((await self.server.generate.remote(PROMPT, sampling, name)).token_ids)

    async def cycle(self, adapter: Any, weights: Any, step: int) -> list[int]:
        """What verl does between two steps, and what the engine then answers."""
        await adapter.release()
        assert self.engine.is_sleeping()
        await adapter.resume(["weights"])
        assert self.contents() == {"stale"}  # level 2
        await adapter.update_weights(weights, global_steps=step, peft_config=None, base_sync_done=True)
        await adapter.resume(["kv_cache"])
        assert self.contents() == {"valid"}
        return await self.generate(f"{type(adapter).__name__}-{step}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny", SHAPES["tiny"], seed=1)


@pytest.fixture(scope="module")
def verl(folder: Path) -> Iterator[Verl]:
    import ray

    variables = {**environment(folder), "PYTHONPATH": str(REPOSITORY), "RAY_USAGE_STATS_ENABLED": "0"}
    before = dict(os.environ)
    os.environ.update(variables, RANK="0", RAY_LOCAL_WORLD_SIZE="1")
    try:
        ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 << 20)
        yield Verl(folder)
    finally:
        ray.shutdown()
        os.environ.clear()
        os.environ.update(before)


def tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.state_dict().items()


@pytest.fixture
def sent_by_verl(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry for each update through verl's sender."""
    sent: list[str] = []
    original = vllm_rollout.BucketedWeightSender.async_send_weights

    async def send(self: Any, weights: Any) -> None:
        sent.append(self.zmq_handle)
        await original(self, weights)

    monkeypatch.setattr(vllm_rollout.BucketedWeightSender, "async_send_weights", send)
    return sent


def test_verl_s_own_sender_on_an_engine_with_the_package(verl: Verl, folder: Path, sent_by_verl: list[str]) -> None:
    async def run() -> None:
        adapter = verl.adapter(vllm_rollout.ServerAdapter)
        for step, seed in enumerate(SEEDS):
            model = new_model(folder, seed)
            assert await verl.cycle(adapter, tensors(model), step) == verl.expected(model)

    asyncio.run(run())
    assert len(sent_by_verl) == len(SEEDS)


def test_after_verl_s_first_update_the_adapter_sends(verl: Verl, folder: Path, sent_by_verl: list[str]) -> None:
    async def run() -> None:
        adapter = verl.adapter(integration.VllmRollout)
        for step, seed in enumerate(SEEDS, start=10):
            model = new_model(folder, seed)
            assert await verl.cycle(adapter, tensors(model), step) == verl.expected(model)
            assert verl.engine.weight_version() == str(step)
            assert len(sent_by_verl) == 1

    asyncio.run(run())


def test_an_update_that_breaks_off_keeps_the_engine_closed_until_the_next(verl: Verl, folder: Path) -> None:
    def broken(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        for number, one in enumerate(tensors(model)):
            if number == 5:
                raise RuntimeError("the trainer is out of memory")
            yield one

    def misshapen(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors(model):
            yield name, tensor[:-1] if name == "model.norm.weight" else tensor

    async def run() -> None:
        adapter = verl.adapter(integration.VllmRollout)
        model, other = new_model(folder, 5), new_model(folder, 6)
        await verl.cycle(adapter, tensors(model), 20)
        for make in (broken, misshapen):
            with pytest.raises((WeightUpdateError, ManifestError)):
                await verl.cycle(adapter, make(other), 21)
            assert verl.contents() <= {"stale", "failed"}  # stale, if nothing was written
            assert verl.engine.weight_version() == "20"
            await adapter.resume(["kv_cache"])
            with pytest.raises(Exception, match=EngineAsleepError.__name__):
                await verl.generate("too early")
            assert await verl.cycle(adapter, tensors(other), 22) == verl.expected(other)
            await verl.cycle(adapter, tensors(model), 20)

    asyncio.run(run())
