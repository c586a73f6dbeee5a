"""A trainer that knows vLLM's own weight transfer alone: init, start, update, finish, with the backend `rl_memory`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from requests import HTTPError
from vllm.distributed.weight_transfer.base import ModuleSource, ParamMeta, WeightSource
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from integration.engines.base import Launch, Server
from integration.engines.vllm import Vllm
from integration.models import new_model
from rl_memory_plugins.errors import InvalidRequestError, ManifestError, RLMemoryError
from rl_memory_plugins.integrations.vllm_transfer import RLMemoryTrainerInitInfo
from tests.vllm.conftest import OTHER_SEED, PROMPT, SEED

RANKS = 2


class WithTransfer(Vllm):
    def command(self, launch: Launch, port: int) -> list[str]:
        return [*super().command(launch, port), "--weight-transfer-config", '{"backend": "rl_memory"}']


@pytest.fixture(scope="module")
def started(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "server.log"
    launch = Launch(model_folder, tp=RANKS, kv_bytes=64 << 20, forked=True, options={"poison": True})
    with Server(WithTransfer(), launch, log) as server:
        yield server


@pytest.fixture
def server(started: Server, model_folder: Path, first_tokens: list[int]) -> Iterator[Server]:
    yield started
    started.control.wake_up()
    trainer(started, ModuleSource(new_model(model_folder, SEED))).send_weights()
    assert started.generate(PROMPT) == first_tokens, started.tail()


def trainer(server: Server, source: WeightSource, **options: Any) -> Any:
    return WeightTransferTrainerFactory.trainer_init(
        RLMemoryTrainerInitInfo(rank=0, receivers=RANKS, timeout_s=30, options=options),
        client=HTTPVLLMWeightSyncClient(server.url),
        source=source,
    )


class Broken(ModuleSource):  # type: ignore[misc]
    """Names a tensor that no model has, or fails in the middle."""

    def __init__(self, model: torch.nn.Module, *, unknown: bool) -> None:
        super().__init__(model)
        self._unknown = unknown
        self.yielded = 0

    def metadata(self) -> list[ParamMeta]:
        return [*super().metadata(), *([ParamMeta("unknown", torch.float32, (1,))] if self._unknown else [])]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in super().__iter__():
            self.yielded += 1
            if self.yielded > 20 and not self._unknown:
                raise ConnectionError("the trainer's gather has failed")
            yield name, tensor


@pytest.mark.parametrize("level", [0, 1, 2])
def test_the_four_calls(server: Server, model_folder: Path, other_tokens: list[int], level: int) -> None:
    server.control.sleep(level)
    server.control.wake_up()
    updates = trainer(server, ModuleSource(new_model(model_folder, OTHER_SEED)))
    for step in ("7", "8"):  # one connection serves many updates
        updates.send_weights(weight_version=step)
        assert server.control.memory()["content"] == "valid"
        assert server.control.memory()["weight_version"] == step
    assert server.generate(PROMPT) == other_tokens


def test_a_wrong_manifest_moves_no_byte(server: Server, model_folder: Path, first_tokens: list[int]) -> None:
    source = Broken(new_model(model_folder, OTHER_SEED), unknown=True)
    with pytest.raises(ManifestError, match="unknown"):
        trainer(server, source).send_weights()
    assert server.control.memory()["content"] == "valid"
    assert server.generate(PROMPT) == first_tokens
    assert source.yielded  # the trainer's other ranks gather, so this one did too


def test_an_update_that_breaks_off_closes_the_engine_until_the_next(server: Server, model_folder: Path) -> None:
    with pytest.raises(RLMemoryError):
        trainer(server, Broken(new_model(model_folder, OTHER_SEED), unknown=False), bucket_bytes=1 << 20).send_weights()
    assert server.control.memory()["content"] == "failed"
    assert server.post(PROMPT).status_code == 503


def test_the_engine_is_closed_between_the_update_and_its_finish(server: Server, model_folder: Path) -> None:
    class Watching(HTTPVLLMWeightSyncClient):  # type: ignore[misc]
        seen = ""

        def finish_weight_update(self, weight_version: str | None = None) -> None:
            self.seen = server.control.memory()["content"]
            super().finish_weight_update(weight_version)

    client = Watching(server.url)
    WeightTransferTrainerFactory.trainer_init(
        RLMemoryTrainerInitInfo(rank=0, receivers=RANKS),
        client=client,
        source=ModuleSource(new_model(model_folder, OTHER_SEED)),
    ).send_weights()
    assert client.seen == "updating"
    assert server.control.memory()["content"] == "valid"


def test_while_the_weights_sleep_the_start_is_refused(server: Server, model_folder: Path) -> None:
    server.control.sleep(1)
    with pytest.raises(Exception, match=r"409|500|Error"):
        trainer(server, ModuleSource(new_model(model_folder, OTHER_SEED))).send_weights()
    assert server.control.memory()["content"] == "valid"


def test_other_ranks_of_the_trainer_gather_only(model_folder: Path) -> None:
    source = Broken(new_model(model_folder, SEED), unknown=True)
    rank = WeightTransferTrainerFactory.trainer_init(RLMemoryTrainerInitInfo(rank=1), client=None, source=source)
    rank.send_weights()
    assert source.yielded == len(source.metadata()) - 1


def test_a_source_is_needed() -> None:
    with pytest.raises(InvalidRequestError, match="source"):
        WeightTransferTrainerFactory.trainer_init(RLMemoryTrainerInitInfo(rank=0), client=None)


class Newer:
    """A `WeightSource` of vLLM 0.33: its metadata is a property that names owners, and it has two iterations."""

    def __init__(self, model: torch.nn.Module, owners: tuple[int, ...] | None = None) -> None:
        self._model = model
        self.whole, self.yielded = True, 0
        metas = [SimpleNamespace(name=name, dtype=one.dtype, shape=one.shape) for name, one in model.named_parameters()]
        metas[-1].owners = owners
        self.metadata = metas

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._model.named_parameters():
            self.yielded += 1
            yield name, tensor

    def implements_iter_full(self) -> bool:
        return self.whole


def test_a_source_of_vllm_0_33(server: Server, model_folder: Path, other_tokens: list[int]) -> None:
    source: Any = Newer(new_model(model_folder, OTHER_SEED), owners=(0, 1))
    trainer(server, source).send_weights()
    assert server.generate(PROMPT) == other_tokens


def test_a_source_that_rank_0_does_not_own_is_refused(model_folder: Path) -> None:
    source: Any = Newer(new_model(model_folder, SEED), owners=(1,))
    for rank in (0, 1):
        with pytest.raises(InvalidRequestError, match=r"rank 0, which does not own 1 tensors, such as \S+"):
            WeightTransferTrainerFactory.trainer_init(RLMemoryTrainerInitInfo(rank=rank), client=None, source=source)


def test_a_source_without_whole_tensors_is_refused(model_folder: Path) -> None:
    source: Any = Newer(new_model(model_folder, SEED))
    source.whole = False
    with pytest.raises(InvalidRequestError, match="Newer has no iter_full"):
        WeightTransferTrainerFactory.trainer_init(RLMemoryTrainerInitInfo(rank=0), client=None, source=source)


def test_rank_0_gathers_to_the_end_when_an_update_breaks_off(server: Server, model_folder: Path) -> None:
    """The other ranks of the trainer do, and would wait for it."""
    source: Any = Newer(new_model(model_folder, OTHER_SEED))

    class Ending(HTTPVLLMWeightSyncClient):  # type: ignore[misc]
        def update_weights(self, update_info: Any) -> None:
            raise ConnectionError("the rollout server is gone")

    updates = WeightTransferTrainerFactory.trainer_init(
        RLMemoryTrainerInitInfo(rank=0, receivers=RANKS, timeout_s=5), client=Ending(server.url), source=source
    )
    with pytest.raises(Exception, match="is gone"):
        updates.send_weights()
    assert source.yielded == len(source.metadata)
    with contextlib.suppress(HTTPError):  # ends the session: the trainer did not
        HTTPVLLMWeightSyncClient(server.url).finish_weight_update()
