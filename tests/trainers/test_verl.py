"""The adapter for verl on verl's own classes, with toy ranks that take real updates in place of an engine.

Stand-ins: verl's server actor and verl's own sync, which need Ray and an engine.
"""

from __future__ import annotations

import asyncio
import json
import sys
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

from integration.trainers import verl_on_cpu  # noqa: E402, F401
from rl_memory_plugins.errors import ManifestError, UnsupportedError, WeightUpdateError  # noqa: E402
from rl_memory_plugins.hooking import Hooks  # noqa: E402


class Remote:
    """A method of a Ray actor: notes its calls."""

    def __init__(self, log: list[Any], name: str, answer: Any = None) -> None:
        self._log, self._name, self._answer = log, name, answer

    async def remote(self, *arguments: Any) -> Any:
        self._log.append((self._name, *arguments))
        return self._answer


@pytest.fixture
def adapter() -> Any:
    from rl_memory_plugins.integrations import verl

    return verl


class Rollout:
    """The adapter's rollout of one trainer rank and one engine.

    Attributes:
        own: The names that verl's own sync has sent, by sync.
        log: What was asked of the server.
    """

    def __init__(
        self,
        adapter: Any,
        monkeypatch: pytest.MonkeyPatch,
        *,
        pd_role: str | None = None,
        checkpoint_quantization: Any = None,
        **config: Any,
    ) -> None:
        from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

        self.own: list[list[str]] = []
        self.log: list[Any] = []
        self.engine = ToyEngine()

        async def own_sync(_: Any, weights: Any, **kwargs: Any) -> None:
            self.own.append([] if hasattr(weights, "__aiter__") else [name for name, _ in weights])

        async def engines_here(_: Any) -> list[ToyEngine]:
            return [self.engine]

        monkeypatch.setattr(ServerAdapter, "update_weights", own_sync)
        monkeypatch.setattr(adapter.VllmRollout, "_engines_here", engines_here)
        made = self.made = adapter.VllmRollout.__new__(adapter.VllmRollout)
        off = SimpleNamespace(enable=False, enable_rollout=False)
        made.config = SimpleNamespace(**{"dtype": "bfloat16", "quantization": None, "qat": None, "mtp": off, **config})
        made._has_server, made._pd_role = True, pd_role
        made.model_config = SimpleNamespace(hf_config=SimpleNamespace(quantization_config=checkpoint_quantization))
        made.server_handle = SimpleNamespace(set_global_steps=Remote(self.log, "set_global_steps"))

    def sync(self, tensors: Any, step: int | None, **kwargs: Any) -> None:
        weights = iter(tensors.items()) if isinstance(tensors, dict) else tensors
        asyncio.run(self.made.update_weights(weights, global_steps=step, **kwargs))

    def assert_holds(self, tensors: dict[str, torch.Tensor]) -> None:
        self.engine.ranks[0].model.assert_unchanged(loaded(tensors))


@pytest.fixture
def rollout(adapter: Any, monkeypatch: pytest.MonkeyPatch) -> Rollout:
    return Rollout(adapter, monkeypatch)


def test_verl_finds_the_adapter_s_rollout(adapter: Any) -> None:
    from verl.workers.rollout.base import get_rollout_class
    from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

    assert get_rollout_class("vllm") is adapter.VllmRollout
    assert issubclass(adapter.VllmRollout, ServerAdapter)


def test_a_configuration_without_draft_models(adapter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rollout = Rollout(adapter, monkeypatch, mtp=None)
    rollout.sync(checkpoint(1), 0)
    rollout.sync(checkpoint(2), 1)
    rollout.assert_holds(checkpoint(2))


def test_the_first_sync_is_verl_s_own_and_later_ones_are_updates(rollout: Rollout) -> None:
    first, second, third = (checkpoint(seed) for seed in (1, 2, 3))
    rollout.sync(first, 0)
    assert rollout.own == [list(first)]
    assert rollout.engine.version == "0"
    rollout.sync(second, 1)
    rollout.assert_holds(second)
    assert rollout.engine.version == "1"
    rollout.sync(third, 2)
    rollout.assert_holds(third)
    assert rollout.engine.version == "2"
    assert len(rollout.own) == 1
    assert rollout.log == [("set_global_steps", 1), ("set_global_steps", 2)]


def test_masters_are_cast_to_the_dtype_of_each_of_the_engine_s_tensors(rollout: Rollout) -> None:
    """Some of the toy's tensors are in float32, as gates of experts are. They keep the master's digits."""
    assert {tensor.dtype for tensor in checkpoint().values()} == {torch.bfloat16, torch.float32}
    for step in range(3):
        rollout.sync({name: tensor.float() for name, tensor in checkpoint(step).items()}, step)
        if step:
            rollout.assert_holds(checkpoint(step))
    updates = [call for call in rollout.engine.log if call[0] == "post_update"]
    assert len(updates) == 4  # the first names the weights; the engine has refused the second


def test_a_sync_that_ends_early_is_an_error_and_can_be_repeated(rollout: Rollout) -> None:
    rollout.sync(checkpoint(1), 0)
    former, tensors = rollout.engine.ranks[0].model.snapshot(), checkpoint(2)
    last = list(tensors)[-1]
    with pytest.raises(WeightUpdateError, match=f"ended before it yielded {last}"):
        rollout.sync({name: tensor for name, tensor in tensors.items() if name != last}, 1)
    assert rollout.engine.valid and rollout.engine.version == "0"  # its one bucket was never sent
    rollout.engine.ranks[0].model.assert_unchanged(former)
    rollout.sync(tensors, 1)
    rollout.assert_holds(tensors)
    assert rollout.engine.valid


class Trainer:
    """What verl's FSDP engine reads of itself to list its parameters, around a module with these parameters."""

    _uses_fsdp2_cpu_offload_policy = _is_offload_param = _qat_enabled = False

    def __init__(self, tensors: dict[str, torch.Tensor], mesh: Any, kind: str = "qwen3_moe") -> None:
        self.module = Tree(tensors)
        torch.distributed.fsdp.fully_shard(self.module, mesh=mesh)
        self.model_config = SimpleNamespace(lora={}, hf_config=SimpleNamespace(model_type=kind))

    def weights(self) -> Any:
        from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

        weights, peft_config = FSDPEngine.get_per_tensor_param(self)
        assert peft_config is None
        return weights


def masters(seed: int) -> dict[str, torch.Tensor]:
    return {name: tensor.float() for name, tensor in checkpoint(seed).items()}


def test_parameters_of_fsdp2_are_an_update_from_the_first_sync_on(rollout: Rollout, mesh: Any) -> None:
    for step in range(3):
        rollout.sync(Trainer(masters(step), mesh).weights(), step)
        rollout.assert_holds(checkpoint(step))
        assert rollout.engine.version == str(step)
    assert rollout.own == []
    updates = [call for call in rollout.engine.log if call[0] == "post_update"]
    assert len(updates) == 4  # the engine has refused the dtypes of the first


def test_an_unknown_parameter_of_fsdp2_is_an_error_each_time(rollout: Rollout, mesh: Any) -> None:
    for step in range(2):
        with pytest.raises(ManifestError, match=r"other\.weight"):
            rollout.sync(Trainer({**masters(1), "other.weight": torch.zeros(2)}, mesh).weights(), step)


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_parameters_of_fsdp2_are_those_of_verl_s_generator(adapter: Any, mesh: Any, kind: str) -> None:
    """verl splits packed experts, but for one model. Tied weights are sent once."""
    assert adapter.VllmRollout  # wraps verl's generator
    tensors = {
        "embed.weight": torch.randn(8, 4),
        "layer.mlp.experts.gate_up_proj": torch.randn(3, 8, 4),
        "layer.mlp.experts.down_proj": torch.randn(3, 4, 4, dtype=torch.bfloat16),
        "norm.weight": torch.randn(4),
    }
    trainer = Trainer(tensors, mesh, kind)
    own = dict(trainer.weights())
    source = trainer.weights().source({"norm.weight": "bfloat16", "layer.mlp.experts.1.up_proj.weight": "bfloat16"})
    made = dict(source.tensors())
    assert [spec.name for spec in source.specs()] == list(made)
    assert set(made) == set(own)
    assert len(own) == (4 if kind == "gpt_oss" else 2 + 3 * 3)
    for spec in source.specs():
        assert made[spec.name].dtype == getattr(torch, spec.dtype)
        assert torch.equal(made[spec.name], own[spec.name].to(made[spec.name].dtype))
    assert made["norm.weight"].dtype == torch.bfloat16


def test_a_model_that_fsdp2_does_not_hold_keeps_verl_s_generator(
    adapter: Any, rollout: Rollout, mesh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed.fsdp, "fully_shard", lambda module, mesh: module)
    monkeypatch.setattr(Trainer, "_uses_fsdp2_cpu_offload_policy", True)  # or verl moves it to a GPU first
    for step in range(2):
        rollout.sync(Trainer(masters(step), mesh).weights(), step)
    assert [set(sync) for sync in rollout.own] == [set(masters(0))]
    rollout.assert_holds(checkpoint(1))


def test_tensors_that_the_engine_does_not_know_are_an_error(rollout: Rollout) -> None:
    other = {"other.weight": torch.zeros(2)}
    rollout.sync(checkpoint(1) | other, 0)
    with pytest.raises(ManifestError, match=r"other\.weight"):
        rollout.sync(checkpoint(2) | other, 1)


async def stream(tensors: dict[str, torch.Tensor]) -> Any:
    for item in tensors.items():
        yield item


@pytest.mark.parametrize(
    ("config", "kwargs"),
    [
        ({}, {"peft_config": {"r": 8}}),
        ({}, {"wire_format": "delta_flush"}),
        ({"quantization": "fp8"}, {}),
        ({"qat": {"enable": True}}, {}),
        ({"pd_role": "prefill"}, {}),
        ({"checkpoint_quantization": {"quant_method": "fp8"}}, {}),
        ({"mtp": SimpleNamespace(enable=True, enable_rollout=True)}, {}),
        ({}, {"from_elsewhere": True}),
    ],
)
def test_other_syncs_stay_verl_s_own(
    adapter: Any, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], kwargs: dict[str, Any]
) -> None:
    rollout = Rollout(adapter, monkeypatch, **config)
    for step in (0, 1):
        rest = dict(kwargs)
        elsewhere = rest.pop("from_elsewhere", False)
        rollout.sync(stream(checkpoint(step)) if elsewhere else checkpoint(step), step, **rest)
    assert len(rollout.own) == 2
    assert rollout.engine.version is None


def test_the_engine_has_the_package_and_keeps_other_options(adapter: Any) -> None:
    from verl.workers.rollout.vllm_rollout import vllm_async_server  # the process of a server has it

    adapter.hooks.install(adapter._install)
    plain = vllm_async_server.build_cli_args_from_config({"dtype": "bfloat16"})
    assert plain == ["--dtype", "bfloat16", "--additional_config", '{"rl_memory": {}}']
    options = {"rl_memory": {"poison": True}, "other": 1}
    chosen = vllm_async_server.build_cli_args_from_config({"additional_config": options})
    assert json.loads(chosen[1]) == options


@pytest.mark.parametrize(
    ("options", "checkpoint_options", "kept"),
    [
        ({}, {}, False),
        ({"load_format": "auto"}, {}, True),
        ({"quantization": "fp8"}, {}, True),
        ({"speculative_algorithm": "EAGLE"}, {}, True),
        ({"enable_lora": True}, {}, True),
        ({}, {"quantization_config": {"quant_method": "fp8"}}, True),
    ],
)
def test_sglang_keeps_no_copy_of_random_weights_that_a_sync_replaces(
    adapter: Any, tmp_path: Path, options: dict[str, Any], checkpoint_options: dict[str, Any], kept: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(checkpoint_options))
    plain = {"load_format": "dummy", "quantization": None, "speculative_algorithm": None, "enable_lora": None}
    arguments = SimpleNamespace(model_path=str(tmp_path), enable_weights_cpu_backup=True, **{**plain, **options})
    launched = adapter._keep_no_random_weights(lambda cls, server_args: server_args)(None, arguments)
    assert launched is arguments
    assert arguments.enable_weights_cpu_backup is kept


def test_the_engine_s_address(adapter: Any) -> None:
    made = adapter.VllmRollout.__new__(adapter.VllmRollout)
    made._has_server = True
    for host, url in (("10.0.0.7", "http://10.0.0.7:80"), ("fe80::1", "http://[fe80::1]:80")):
        made.server_handle = SimpleNamespace(get_server_address=Remote([], "address", (host, 80)))
        [engine] = asyncio.run(made._engines_here())
        assert engine.url == url
    made._has_server = False  # a rank that does not lead its replica
    assert asyncio.run(made._engines_here()) == []


def test_a_verl_without_the_registry_is_named(adapter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "ROLLOUTS", "verl.workers.rollout.base:_NOT_THERE")
    with pytest.raises(UnsupportedError, match=r"_NOT_THERE.*verl 0\.9"):
        Hooks("verl").install(lambda hooks: hooks.require(adapter.ROLLOUTS))
