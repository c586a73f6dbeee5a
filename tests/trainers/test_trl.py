"""The adapter on TRL's own classes, without an engine. `integration.trainers.trl_grpo` runs the whole of it."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration

from rl_memory_plugins.errors import UnsupportedError, WeightUpdateError
from rl_memory_plugins.hooking import Hooks
from rl_memory_plugins.integrations import trl


def stopped_at(step: int, model: Any) -> Any:
    """The callback of a trainer that has taken so many steps."""
    made = trl.callback()
    made.on_init_end(None, SimpleNamespace(global_step=0), None, model=model)
    made.on_train_begin(None, SimpleNamespace(global_step=step), None)
    return made


class Vllm:
    """Stands in for a colocated engine: what it loads, call by call."""

    def __init__(self) -> None:
        self.calls: list[dict[str, torch.Tensor]] = []
        runner = SimpleNamespace(model=self)
        self.llm_engine = SimpleNamespace(
            model_executor=SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
        )

    def load_weights(self, tensors: Any) -> None:
        self.calls.append(dict(tensors))

    def reset_prefix_cache(self) -> None:
        pass


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The versions that the engine is told."""
    from rl_memory_plugins.engines.vllm import client

    told: list[str] = []
    monkeypatch.setattr(client, "api_of", lambda engine, make: SimpleNamespace(notice_loads=told.append))
    return told


def colocated(run: Any, *, zero3: bool = False, fsdp: int | None = None) -> Any:
    generation = VLLMGeneration.__new__(VLLMGeneration)
    generation.mode, generation.enable_sleep_mode = "colocate", False
    generation.model, generation.llm, generation.accelerator = torch.nn.Linear(4, 3), Vllm(), None
    generation._dist = SimpleNamespace(
        is_zero3=zero3, fsdp_version=fsdp, is_fsdp=False, gather_params=lambda params: nullcontext()
    )
    if run is not None:
        generation.rl_memory = run
    return generation


def test_a_sync_is_one_load_of_all_tensors_with_the_step_as_version(named: list[str]) -> None:
    generation = colocated(stopped_at(7, None).run)
    generation.sync_weights()
    [loaded] = generation.llm.calls
    assert loaded.keys() == {"weight", "bias"}
    assert torch.equal(loaded["weight"], generation.model.weight)
    assert named == ["7"]


@pytest.mark.parametrize("sharding", [{"zero3": True}, {"fsdp": 1}])
def test_tensors_that_are_freed_after_each_step_of_the_loop_stay_in_trl_s_loop(
    named: list[str], sharding: dict[str, Any]
) -> None:
    generation = colocated(stopped_at(7, None).run, **sharding)
    generation.sync_weights()
    assert [list(call) for call in generation.llm.calls] == [["weight"], ["bias"]]
    assert named == ["7"]


def test_a_trainer_without_the_callback_stays_as_it_is(named: list[str]) -> None:
    stopped_at(7, None)
    generation = colocated(None)
    generation.sync_weights()
    assert [list(call) for call in generation.llm.calls] == [["weight"], ["bias"]]
    assert named == []


def test_the_engine_of_a_trainer_with_the_callback_has_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    import rl_memory_plugins.vllm

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):  # TRL sets them
        monkeypatch.setenv(name, "0")
    made: list[dict[str, Any]] = []
    stock: list[dict[str, Any]] = []
    monkeypatch.setattr(rl_memory_plugins.vllm, "LLM", lambda *args, **kwargs: made.append(kwargs))
    monkeypatch.setattr(vllm_generation, "LLM", lambda *args, **kwargs: stock.append(kwargs))
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    model.name_or_path = other.name_or_path = "folder"
    kept = stopped_at(0, model)
    accelerator: Any = SimpleNamespace(
        num_processes=1,
        process_index=0,
        local_process_index=0,
        wait_for_everyone=lambda: None,
        state=SimpleNamespace(deepspeed_plugin=None, fsdp_plugin=None),
    )
    VLLMGeneration(model, accelerator, None)
    VLLMGeneration(other, accelerator, None)
    assert [one["rl_memory"] for one in made] == [True]
    assert len(stock) == 1 and "rl_memory" not in stock[0]
    assert kept.run.version == "0"


class Server:
    """Stands in for `EngineClient`."""

    def __init__(self, fail_after: int | None = None) -> None:
        self.sent: dict[str, torch.Tensor] = {}
        self.version = ""
        self._fail_after = fail_after

    def update_weights(self, source: Any, *, weight_version: str) -> None:
        self.specs = source.specs()
        for number, (name, tensor) in enumerate(source.tensors()):
            if number == self._fail_after:
                raise WeightUpdateError("the engine is gone", reason="disconnected")
            self.sent[name] = tensor
        self.version = weight_version


def update(server: Server, step: int = 3) -> list[str]:
    """Send two tensors. Returns the names that the trainer has gathered."""
    run = stopped_at(step, None).run
    client = trl._client_class(run).__new__(trl._client_class(run))
    client.engine, client.dtype = server, torch.bfloat16
    gathered: list[str] = []

    def tensors() -> Any:
        for name, tensor in (("a", torch.ones(2, 3)), ("b", torch.arange(4))):
            gathered.append(name)
            yield name, tensor

    try:
        client.update_named_params([("a", "float32", [2, 3]), ("b", "int64", [4])], tensors())
    except WeightUpdateError:
        gathered.append("failed")
    return gathered


def test_a_server_gets_its_own_dtype_and_the_step() -> None:
    server = Server()
    assert update(server) == ["a", "b"]
    assert [(spec.name, spec.dtype, spec.shape) for spec in server.specs] == [
        ("a", "bfloat16", (2, 3)),
        ("b", "int64", (4,)),
    ]
    assert [(name, tensor.dtype) for name, tensor in server.sent.items()] == [
        ("a", torch.bfloat16),
        ("b", torch.int64),
    ]
    assert server.version == "3"


@pytest.mark.parametrize("fail_after", [0, 1])
def test_after_a_failed_update_the_other_processes_are_not_left_in_a_gather(fail_after: int) -> None:
    assert update(Server(fail_after)) == ["a", "b", "failed"]


def test_a_release_of_trl_without_a_symbol_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trl, "hooks", Hooks("trl"))
    monkeypatch.delattr(VLLMGeneration, "_iter_named_params")
    monkeypatch.delattr(vllm_generation, "VLLMClient")
    before = VLLMGeneration._init_vllm, VLLMGeneration.sync_weights
    with pytest.raises(UnsupportedError) as caught:
        trl.callback()
    VLLMGeneration._init_vllm, VLLMGeneration.sync_weights = before
    assert caught.value.details["symbols"] == [
        "trl.generation.vllm_generation:VLLMGeneration._iter_named_params",
        "trl.generation.vllm_generation:VLLMClient",
    ]
