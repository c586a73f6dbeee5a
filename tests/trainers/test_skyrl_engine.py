"""SkyRL's own servers, client, trainer ranks and dispatch in a local Ray, with the adapter and real vLLMs on the CPU.

Stand-ins: `integration.trainers.skyrl_on_cpu`, and new weights in place of training.
"""

from __future__ import annotations

import asyncio
import base64
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch

from integration.engines.vllm import FORKING
from integration.models import SHAPES, new_model, write_model
from integration.trainers import skyrl_on_cpu
from rl_memory_plugins.client import EngineClient
from rl_memory_plugins.integrations import skyrl as adapter
from tests.vllm.conftest import PROMPT, environment, greedy

RANKS = 2  # trainer ranks; each has an engine on its GPU
ENGINE = "generator.inference_engine"

from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient  # noqa: E402
from skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker import FSDPPolicyWorkerBase  # noqa: E402


class Policy(FSDPPolicyWorkerBase):
    """SkyRL's trainer rank, whose weights a test sets."""

    def take(self, folder: str, seed: int) -> None:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        state = new_model(Path(folder), seed).state_dict()
        set_model_state_dict(self.model.model, state, options=StateDictOptions(full_state_dict=True))

    def break_next(self, after: int) -> None:
        """The next sync fails on every rank after some chunks."""
        extract = type(self.weight_extractor).extract_weights

        def broken(dtype: torch.dtype) -> Iterator[Any]:
            del self.weight_extractor.extract_weights
            for number, chunk in enumerate(extract(self.weight_extractor, dtype)):
                if number == after:
                    raise RuntimeError("the trainer is out of memory")
                yield chunk

        self.weight_extractor.extract_weights = broken


class SkyRL:
    """SkyRL's experiment, with all that a sync needs."""

    def __init__(self, folder: Path, logs: Path) -> None:
        from skyrl.backends.skyrl_train.workers.worker import PPORayActorGroup
        from skyrl.backends.skyrl_train.workers.worker_dispatch import WorkerDispatch
        from skyrl.train.config import SkyRLTrainConfig
        from skyrl.train.entrypoints.main_base import BasePPOExp

        class Experiment(BasePPOExp):
            def get_train_dataset(self) -> Any:
                return []

            get_eval_dataset = get_train_dataset

        engine = {
            "num_engines": RANKS,
            "model_dtype": "float32",
            "enforce_eager": True,
            "distributed_executor_backend": "mp",  # without a GPU Ray has no place for the engine's workers
            "enable_ray_prometheus_stats": False,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 2048,
            "engine_init_kwargs": f"{{max_model_len: 1024, kv_cache_memory_bytes: {64 << 20}, enable_scale_out: true}}",
        }
        placement = {f"{role}_num_gpus_per_node": RANKS for role in ("policy", "critic", "ref")}
        options = {
            "trainer.policy.model.path": folder,
            "trainer.log_path": logs,
            "trainer.flash_attn": False,
            "trainer.remove_microbatch_padding": False,
            **{f"trainer.placement.{name}": value for name, value in placement.items()},
            **{f"{ENGINE}.{name}": value for name, value in engine.items()},
        }
        cfg = SkyRLTrainConfig.from_cli_overrides([f"{name}={value}" for name, value in options.items()])
        self.folder = folder
        self.experiment = Experiment(cfg)
        adapter.use(self.experiment)
        self.experiment.trainer = SimpleNamespace(global_step=0)
        self.client = self.experiment.get_inference_client()  # SkyRL's engines begin asleep
        self.urls = self.client.server_urls
        self.engines = [EngineClient(url) for url in self.urls]
        worker = ray.remote(num_gpus=1)(Policy)
        pg = self.experiment.colocate_pg
        self.policy = PPORayActorGroup(cfg.trainer, 1, RANKS, worker, pg=pg, num_gpus_per_actor=0.2, colocate_all=True)
        self.dispatch = WorkerDispatch(cfg, self.policy, inference_engine_client=self.client)
        self.dispatch.init_model("policy", str(folder), num_training_steps=1)
        self.dispatch.init_weight_sync_state(self.client)

    def on_all(self, method: str, *args: Any) -> None:
        ray.get(self.policy.async_run_ray_method("pass_through", method, *args))

    async def sync(self, step: int, seed: int) -> None:
        """What SkyRL does between two steps."""
        await self.client.sleep(level=2)
        assert all(engine.is_sleeping() for engine in self.engines)
        self.experiment.trainer.global_step = step
        self.on_all("take", str(self.folder), seed)
        await self.dispatch.save_weights_for_sampler()

    async def answers(self) -> list[list[int]]:
        """What each engine answers."""
        batch = {
            "prompt_token_ids": [PROMPT],
            "sampling_params": {"temperature": 0, "max_tokens": 8, "ignore_eos": True},
        }
        found = []
        for url in self.urls:
            client = RemoteInferenceClient(url, [url], 1, model_name=str(self.folder))
            found.append((await client.generate(batch))["response_ids"][0])
            await client.teardown()
        return found

    def expected(self, seed: int) -> list[list[int]]:
        return [greedy(new_model(self.folder, seed))] * RANKS

    def versions(self) -> list[str]:
        return [engine.weight_version() for engine in self.engines]

    def contents(self) -> set[str]:
        engines = [one for engine in self.engines for one in engine.memory()["engines"]]
        return {rank["content"] for engine in engines for rank in engine["ranks"]}


@pytest.fixture(scope="module")
def skyrl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SkyRL]:
    folder = write_model(tmp_path_factory.mktemp("model") / "tiny", SHAPES["tiny"], seed=1)
    variables = {**environment(folder), "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    paths = [str(FORKING), variables["PYTHONPATH"]]  # a new interpreter would not import `skyrl_on_cpu`
    before = dict(os.environ)
    os.environ.update(variables, PYTHONPATH=os.pathsep.join(paths), CUDA_VISIBLE_DEVICES="0,1")
    try:
        ray.init(num_gpus=RANKS)
        yield SkyRL(folder, tmp_path_factory.mktemp("logs"))
    finally:
        ray.shutdown()
        os.environ.clear()
        os.environ.update(before)


def test_each_sync_is_one_update_of_all_engines(skyrl: SkyRL) -> None:
    async def run() -> None:
        for step, seed in enumerate((2, 3, 4), start=10):
            await skyrl.sync(step, seed)
            assert skyrl.contents() == {"valid"}
            assert skyrl.versions() == [str(step)] * RANKS
            assert await skyrl.answers() == skyrl.expected(seed)

    asyncio.run(run())


def test_a_sync_that_breaks_off_keeps_the_engines_closed_until_the_next(skyrl: SkyRL) -> None:
    async def run() -> None:
        await skyrl.sync(20, 5)
        skyrl.on_all("break_next", 5)
        with pytest.raises(Exception, match="the trainer is out of memory"):
            await skyrl.sync(21, 6)
        assert skyrl.contents() == {"stale"}  # the chunks before the failure do not fill a bucket
        await skyrl.client.wake_up(tags=["kv_cache"])
        with pytest.raises(Exception, match="the engine does not admit requests: its weights"):
            await skyrl.answers()
        assert skyrl.versions() == ["20"] * RANKS
        await skyrl.sync(22, 6)
        assert skyrl.versions() == ["22"] * RANKS
        assert await skyrl.answers() == skyrl.expected(6)

    asyncio.run(run())


def test_skyrl_s_own_calls_on_engines_with_the_package(skyrl: SkyRL, tmp_path: Path) -> None:
    """SkyRL's chunks, in files that stand in for the memory of a GPU."""
    client = skyrl.client

    async def send(model: torch.nn.Module) -> None:
        await client.start_weight_update(is_checkpoint_format=True)
        tensors = list(model.state_dict().items())
        for start in range(0, len(tensors), 7):
            chunk = tensors[start : start + 7]
            packed = torch.cat([tensor.flatten() for _, tensor in chunk])
            path = tmp_path / f"{start}.bin"
            path.write_bytes(packed.numpy().tobytes())
            opened = skyrl_on_cpu.open_shared, (str(path), packed.numel(), None, None, None, None, "cpu")
            handles = pickle.dumps({torch.cuda.current_device(): opened})
            described = {
                "names": [name for name, _ in chunk],
                "dtype_names": ["float32" for _ in chunk],
                "shapes": [list(tensor.shape) for _, tensor in chunk],
                "sizes": [tensor.numel() for _, tensor in chunk],
                "ipc_handles_pickled": base64.b64encode(handles).decode(),
            }
            await client.update_weights_ipc(described)
        await client.finish_weight_update()

    async def run() -> None:
        for seed in (7, 8):
            await client.sleep(level=2)
            await client.wake_up(tags=["weights"])
            assert skyrl.contents() == {"stale"}
            await send(new_model(skyrl.folder, seed))
            await client.wake_up(tags=["kv_cache"])
            assert skyrl.contents() == {"valid"}
            assert await skyrl.answers() == skyrl.expected(seed)

    asyncio.run(run())
