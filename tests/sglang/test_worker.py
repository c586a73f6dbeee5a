"""A rank's memory by SGLang's region names, without an engine: what a sleep discards, and what it must not."""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rl_memory_plugins.config import RLMemoryConfig
from rl_memory_plugins.engines import post_load
from rl_memory_plugins.engines.sglang import worker
from rl_memory_plugins.engines.sglang.worker import Memory, RegionAdapter, SglangWorker
from rl_memory_plugins.errors import UnsupportedError
from rl_memory_plugins.tags import Content, Level, Tag
from rl_memory_plugins.weights.engine_updates import EngineUpdates

ELEMENTS = 1 << 16  # whole pages, which is what a sleep on a CPU releases


class Model(torch.nn.Module):
    """With a parameter, a buffer, and a tensor that is neither."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((ELEMENTS,), value), requires_grad=False)
        self.register_buffer("table", torch.full((ELEMENTS,), value + 1))
        self.scales = torch.full((ELEMENTS,), value + 2)

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.get_parameter(name).copy_(tensor)


@pytest.mark.parametrize("level", [Level.PRESERVE, Level.DISCARD])
def test_buffers_plain_tensors_and_draft_models_survive(level: Level) -> None:
    """Stock: only the target model's named buffers are kept; other tensors and the draft model's are lost."""
    config = RLMemoryConfig(poison=True)
    memory = Memory(config, lambda: ("cpu", 0), types.SimpleNamespace(model_path="target", revision=None))
    adapter = RegionAdapter(memory, True)
    with adapter.region("weights"):
        target, draft = Model(1.0), Model(10.0)
    manager = SglangWorker(target, memory, config, rank=0).manager
    manager.prepare_sleep(level, [Tag.WEIGHTS])
    manager.commit_sleep()
    manager.prepare_wake([Tag.WEIGHTS])
    manager.commit_wake()
    for model, value in ((target, 1.0), (draft, 10.0)):
        assert torch.equal(model.table, torch.full((ELEMENTS,), value + 1))
        assert torch.equal(model.scales, torch.full((ELEMENTS,), value + 2))
    assert torch.equal(draft.weight, torch.full((ELEMENTS,), 10.0))
    kept = bool(torch.equal(target.weight, torch.full((ELEMENTS,), 1.0)))
    assert kept == (level is Level.PRESERVE)


@pytest.mark.parametrize("takes_the_model", [True, False])
def test_what_sglang_refuses_to_update_is_refused_here(takes_the_model: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang asks before its own updates whether something derived from the weights would go on being used."""
    from sglang.srt.model_executor.model_runner_components import weight_updater

    why = "a derived cache would keep serving the old weights"
    ask = (lambda model=None: why) if takes_the_model else (lambda: why)
    monkeypatch.setattr(weight_updater, "_unsupported_derived_weight_cache_error", ask, raising=False)
    memory = Memory(RLMemoryConfig(), lambda: ("cpu", 0), types.SimpleNamespace(model_path="target", revision=None))
    with RegionAdapter(memory, True).region("weights"):
        model = Model(1.0)
    made = SglangWorker(model, memory, RLMemoryConfig(), rank=0)
    with pytest.raises(UnsupportedError, match=why):
        made._reload(model)


def test_weights_that_torch_splits_are_refused_at_the_start(tmp_path: Path) -> None:
    """The engine would start, and each sleep would end in an error of torch."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    memory = Memory(RLMemoryConfig(), lambda: ("cpu", 0), types.SimpleNamespace(model_path="target", revision=None))
    model = Model(1.0)
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model.weight = torch.nn.Parameter(distribute_tensor(model.weight, init_device_mesh("cpu", (1,))), False)
        with pytest.raises(UnsupportedError, match="splits over ranks"):
            SglangWorker(model, memory, RLMemoryConfig(), rank=0)
    finally:
        distributed.destroy_process_group()


def test_an_older_sglang_asks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.model_executor.model_runner_components import weight_updater

    monkeypatch.delattr(weight_updater, "_unsupported_derived_weight_cache_error", raising=False)
    assert worker.derived_weights_error(Model(1.0)) is None


@pytest.mark.parametrize("dummy", [True, False])
@pytest.mark.parametrize("torn", [0.0, 3.0, float("nan")])
def test_a_load_of_the_engine_without_scales_of_the_kv_cache_gives_torn_ones_their_defaults(
    dummy: bool, torn: float
) -> None:
    from sglang.srt.layers.quantization.fp8 import Fp8Config, Fp8KVCacheMethod

    config = RLMemoryConfig(poison=True)
    memory = Memory(config, lambda: ("cpu", 0), types.SimpleNamespace(model_path="target", revision=None))
    with RegionAdapter(memory, True).region("weights"):
        target = Model(1.0)
        target.attention = attention = torch.nn.Module()
        attention.quant_method = Fp8KVCacheMethod(Fp8Config())
        attention.quant_method.create_weights(attention)
        for scale in (attention.k_scale, attention.v_scale):  # on a GPU the region has small tensors too
            scale.data = torch.full((ELEMENTS,), scale.item())[ELEMENTS // 2]
    post_load.attach(target, templates=True, dummy=dummy)
    if dummy:
        for parameter in target.parameters():
            parameter.fill_(0.01)

    def load() -> None:
        target.load_weights(iter([("weight", torch.ones(ELEMENTS))]))
        attention.quant_method.process_weights_after_loading(attention)

    load()
    worker = SglangWorker(target, memory, config, rank=0)
    updates = EngineUpdates(worker.manager, target.named_parameters, reset=worker.reset_unfilled)
    worker.manager.learn_unfilled()  # as every update does before its first write
    worker.manager.begin_writing()
    for scale in (attention.k_scale, attention.v_scale):
        scale.fill_(torn)
    worker.manager.finish_writing(complete=False)
    with updates.watch():
        load()
    assert worker.manager.content is Content.VALID
    assert attention.k_scale == attention.v_scale == attention.k_scale_float == 1
