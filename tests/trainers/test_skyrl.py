"""The adapter for SkyRL on SkyRL's own classes, with toy ranks that take real updates in place of engines."""

from __future__ import annotations

import asyncio
import copy
import pickle
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

for folder in ("trainer", "weights"):
    sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / folder))

from models import Tree  # noqa: E402
from toy_engine import ToyEngine  # noqa: E402
from toys import checkpoint, loaded  # noqa: E402

from integration.models import SHAPES, write_model  # noqa: E402
from integration.trainers import skyrl_on_cpu  # noqa: E402, F401
from rl_memory_plugins import trainer  # noqa: E402
from rl_memory_plugins.errors import ManifestError, UnsupportedError, WeightUpdateError  # noqa: E402
from rl_memory_plugins.integrations import skyrl as adapter  # noqa: E402
from rl_memory_plugins.weights.manifest import Mismatch, manifest_error  # noqa: E402

ENGINE = "generator.inference_engine"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny", SHAPES["tiny"])


def config(model: Path, **overrides: Any) -> Any:
    from skyrl.train.config import SkyRLTrainConfig

    given = {"trainer.policy.model.path": model, "trainer.placement.colocate_all": True, **overrides}
    return SkyRLTrainConfig.from_cli_overrides([f"{name}={value}" for name, value in given.items()])


def client(*urls: str) -> Any:
    from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient

    return RemoteInferenceClient(proxy_url=urls[0], server_urls=list(urls), data_parallel_size=1)


def experiment(cfg: Any) -> Any:
    """SkyRL's experiment without a data set and without engines."""
    from skyrl.train.entrypoints.main_base import BasePPOExp

    class Experiment(BasePPOExp):
        def get_train_dataset(self) -> Any:
            return []

        get_eval_dataset = get_train_dataset

        def get_colocate_pg(self, timeout: int = 0) -> None:
            return None

        def _get_new_inference_client(self) -> Any:
            return client("http://engine")

    return Experiment(cfg)


# -- what an experiment gets -----------------------------------------------------------------------------------


def test_the_engines_of_an_experiment_have_the_package(model: Path) -> None:
    from skyrl.backends.skyrl_train.inference_servers.utils import build_vllm_cli_args

    made = experiment(config(model))
    adapter.use(made)
    assert build_vllm_cli_args(made.cfg).additional_config == {"rl_memory": {}}


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ("{rl_memory: {poison: true}, other: 1}", {"rl_memory": {"poison": True}, "other": 1}),
        ("{other: 1}", {"rl_memory": {}, "other": 1}),
    ],
)
def test_options_that_the_configuration_names_stay(model: Path, named: str, expected: dict[str, Any]) -> None:
    from skyrl.backends.skyrl_train.inference_servers.utils import build_vllm_cli_args

    made = experiment(config(model, **{f"{ENGINE}.engine_init_kwargs.additional_config": named}))
    adapter.use(made)
    assert build_vllm_cli_args(made.cfg).additional_config == expected


def test_the_client_carries_the_global_step(model: Path) -> None:
    made = experiment(config(model))
    adapter.use(made)
    carrier = made.get_inference_client()
    assert pickle.loads(pickle.dumps(carrier)).rl_memory is None  # before there is a trainer
    made.trainer = SimpleNamespace(global_step=7)
    assert pickle.loads(pickle.dumps(carrier)).rl_memory == "7"
    made.trainer.global_step = 8
    arrived = pickle.loads(pickle.dumps(carrier))
    assert arrived.rl_memory == "8" and arrived.server_urls == ["http://engine"]
    assert pickle.loads(pickle.dumps(arrived)).rl_memory == "8"


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"trainer.placement.colocate_all": False}, "other GPUs"),
        ({f"{ENGINE}.weight_sync_backend": "gloo"}, "other GPUs"),
        ({"trainer.placement.policy_num_nodes": 2}, "other nodes"),
        ({"trainer.policy.model.lora.rank": 8}, "LoRA"),
        ({f"{ENGINE}.data_parallel_size": 2}, "data-parallel"),
        ({f"{ENGINE}.enable_pd": True}, "prefill"),
        ({f"{ENGINE}.speculative_config": "{method: mtp}"}, "draft"),
        ({f"{ENGINE}.engine_init_kwargs.quantization": "fp8"}, "quantise"),
    ],
)
def test_other_experiments_stay_skyrl_s_own(
    model: Path, overrides: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = experiment(config(model, **overrides))
    before = copy.deepcopy(made.cfg.generator.inference_engine.engine_init_kwargs)
    adapter.use(made)
    assert reason in adapter.reason_against(made.cfg)
    assert reason in caplog.text
    assert made.cfg.generator.inference_engine.engine_init_kwargs == before
    assert not hasattr(made.get_inference_client(), "rl_memory")


def test_merged_lora_adapters_are_whole_models(model: Path) -> None:
    merged = {"trainer.policy.model.lora.rank": 8, "trainer.strategy": "megatron"}
    assert adapter.reason_against(config(model, **merged)) is None


def test_a_skyrl_without_the_strategies_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "SYNC", "skyrl.backends.skyrl_train.not_there")
    with pytest.raises(UnsupportedError, match=r"not_there.*skyrl 0\.3"):
        adapter.use(SimpleNamespace())


# -- what a trainer rank sends ---------------------------------------------------------------------------------


class Rank:
    """What SkyRL's FSDP worker does at a sync, with the strategy that SkyRL gives it.

    Attributes:
        engines: By address, the toy engines.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, mesh: Any, *urls: str) -> None:
        from skyrl.backends.skyrl_train import weight_sync

        self.engines = {url: ToyEngine(first_device=number) for number, url in enumerate(urls)}
        monkeypatch.setattr(trainer, "EngineClient", self.engines.__getitem__)
        self.mesh = mesh
        adapter._arrive(None)
        self.strategy = weight_sync.get_transfer_strategy_cls("nccl", True)
        engine = SimpleNamespace(model_dtype="bfloat16", run_engines_locally=True)
        init_info = self.strategy.create_init_info(engine, inference_world_size=1)
        assert init_info.to_api_payload() == {}  # SkyRL asks the engines to begin with it
        self.sender = self.strategy.create_sender(init_info, client(*urls))

    def chunks(self, tensors: dict[str, torch.Tensor]) -> tuple[Iterator[Any], dict[str, Any]]:
        from skyrl.backends.skyrl_train.weight_sync import CudaIpcTransferStrategy
        from skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker import FSDPWeightExtractor

        module = Tree(tensors)
        torch.distributed.fsdp.fully_shard(module, mesh=self.mesh)
        extractor = FSDPWeightExtractor(module, self.strategy is CudaIpcTransferStrategy, 1.0)
        return extractor.extract_weights(torch.bfloat16), extractor.get_weight_metadata(torch.bfloat16)

    def sync(self, tensors: dict[str, torch.Tensor], step: int, change: Any = lambda chunks: chunks) -> None:
        chunks, metadata = self.chunks(tensors)
        adapter._arrive(str(step))
        asyncio.run(self.sender.send_chunks(change(chunks), weight_metadata=metadata))

    def assert_hold(self, tensors: dict[str, torch.Tensor], step: int) -> None:
        sent = {name: tensor.to(torch.bfloat16).to(tensor.dtype) for name, tensor in tensors.items()}
        for engine in self.engines.values():
            engine.ranks[0].model.assert_unchanged(loaded(sent))
            assert engine.valid and engine.version == str(step)


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch, mesh: Any) -> Rank:
    return Rank(monkeypatch, mesh, "http://engine")


def test_each_sync_is_one_update_in_the_dtypes_of_the_engine(rank: Rank) -> None:
    """Some of the toy's tensors are in float32, as gates of experts are. SkyRL sends all in one dtype."""
    for step in range(3):
        rank.sync(checkpoint(step), step)
        rank.assert_hold(checkpoint(step), step)
    [engine] = rank.engines.values()
    updates = [call for call in engine.log if call[0] == "post_update"]
    assert [version for _, version in updates] == ["0", "1", "2"]


def test_trainer_ranks_hear_of_each_other_s_dtypes_in_turn(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks raise the error of one of them. Ranks with other pipeline stages have refused other tensors."""
    refused = ["norm.weight", "scale"]
    sent: list[dict[str, str]] = []

    def push(engines: Any, source: Any, peers: Any, *, weight_version: str) -> None:
        sent.append({spec.name: spec.dtype for spec in source.specs()})
        if refused:
            raise manifest_error([Mismatch("dtype", refused.pop(0), "another dtype", expected="float32")])

    monkeypatch.setattr(trainer, "push_from_all", push)
    rank.sync(checkpoint(1), 1)
    assert len(sent) == 3
    assert {name for name, dtype in sent[-1].items() if dtype == "float32"} == {"norm.weight", "scale"}


def test_all_engines_get_the_update(monkeypatch: pytest.MonkeyPatch, mesh: Any) -> None:
    rank = Rank(monkeypatch, mesh, "http://one", "http://two")
    rank.sync(checkpoint(1), 1)
    rank.assert_hold(checkpoint(1), 1)


@pytest.mark.parametrize(
    ("ranks", "urls", "owners"), [(1, "ab", [0, 0]), (2, "ab", [0, 1]), (4, "ab", [0, 2]), (4, "a", [0])]
)
def test_an_engine_belongs_to_the_rank_on_its_first_gpu(
    monkeypatch: pytest.MonkeyPatch, ranks: int, urls: str, owners: list[int]
) -> None:
    monkeypatch.setattr(trainer, "EngineClient", lambda url: url)
    for number in range(ranks):
        monkeypatch.setattr(trainer, "Peers", lambda number=number: SimpleNamespace(rank=number, size=ranks))
        sender = adapter.Sender(list(urls))
        sender._meet()
        assert sender._engines == [url for url, owner in zip(urls, owners, strict=True) if owner == number]


def test_a_sync_that_breaks_off_is_an_error_and_the_next_mends_it(rank: Rank) -> None:
    def broken(chunks: Iterable[Any]) -> Iterator[Any]:
        for number, chunk in enumerate(chunks):
            if number == 5:
                raise RuntimeError("the trainer is out of memory")
            yield chunk

    def short(chunks: Iterable[Any]) -> list[Any]:
        return list(chunks)[:-1]

    rank.sync(checkpoint(1), 1)
    [engine] = rank.engines.values()
    for change, error in ((broken, "out of memory"), (short, "ended before it yielded")):
        with pytest.raises(WeightUpdateError, match=error):
            rank.sync(checkpoint(2), 2, change)
        rank.assert_hold(checkpoint(1), 1)  # the one bucket was never sent
        rank.sync(checkpoint(1), 1)
        rank.assert_hold(checkpoint(1), 1)


def test_tensors_that_the_engine_does_not_know_are_an_error_each_time(rank: Rank) -> None:
    for step in range(2):
        with pytest.raises(ManifestError, match=r"other\.weight"):
            rank.sync({**checkpoint(1), "other.weight": torch.zeros(2)}, step)


def test_other_strategies_stay_skyrl_s_own() -> None:
    from skyrl.backends.skyrl_train import weight_sync

    adapter._arrive(None)
    for backend, colocated in (("nccl", False), ("gloo", True)):
        found = weight_sync.get_transfer_strategy_cls(backend, colocated)
        assert found is weight_sync.BroadcastTransferStrategy
