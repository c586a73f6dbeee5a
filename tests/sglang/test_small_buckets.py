"""Loaders of SGLang that wait for a second tensor, and updates that bring the two in different buckets."""

from __future__ import annotations

import threading
import types
from collections.abc import Iterable, Iterator

import pytest
import torch
from sglang.srt.models.deepseek_common.deepseek_weight_loader import DeepseekV2WeightLoaderMixin

from rl_memory_plugins.config import RLMemoryConfig
from rl_memory_plugins.engines import post_load
from rl_memory_plugins.engines.sglang.worker import Memory, RegionAdapter, SglangWorker
from rl_memory_plugins.tags import Content
from rl_memory_plugins.trainer import ModelSource
from rl_memory_plugins.weights.engine_updates import EngineUpdates
from rl_memory_plugins.weights.sender import WeightSender

LAYERS, HIDDEN, QUERIES, KEYS = 3, 64, 48, 24
TIMEOUT_S = 20.0


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fused_qkv_a_proj_with_mqa = torch.nn.Linear(HIDDEN, QUERIES + KEYS, bias=False)
        self.o_proj = torch.nn.Linear(HIDDEN, HIDDEN, bias=False)


class Decoder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.start_layer, self.end_layer = 0, LAYERS
        self.layers = torch.nn.ModuleList(torch.nn.Module() for _ in range(LAYERS))
        for layer in self.layers:
            layer.self_attn = Attention()


class Deepseek(torch.nn.Module, DeepseekV2WeightLoaderMixin):
    """The latent projections of SGLang's DeepSeek, with SGLang's own loader."""

    def __init__(self) -> None:
        super().__init__()
        self.config = types.SimpleNamespace(n_routed_experts=2, q_lora_rank=QUERIES, num_hidden_layers=LAYERS)
        self.quant_config = None
        self.num_fused_shared_experts = 0
        self.pp_group = types.SimpleNamespace(is_last_rank=True)
        self.model = Decoder()
        for parameter in self.parameters():
            parameter.requires_grad = False
            parameter.fill_(7.0)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.do_load_weights(weights)


def checkpoint() -> dict[str, torch.Tensor]:
    """All first halves before all second halves, so that no bucket of a few tensors has a pair."""
    rows = {"q_a_proj": QUERIES, "o_proj": HIDDEN, "kv_a_proj_with_mqa": KEYS}
    return {
        f"model.layers.{layer}.self_attn.{name}.weight": torch.randn(count, HIDDEN)
        for name, count in rows.items()
        for layer in range(LAYERS)
    }


def loaded_at_once(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    model = Deepseek()
    model.load_weights(iter(tensors.items()))
    return dict(model.named_parameters())


@pytest.fixture
def made() -> Iterator[tuple[Deepseek, SglangWorker]]:
    config = RLMemoryConfig(poison=True)
    memory = Memory(config, lambda: ("cpu", 0), types.SimpleNamespace(model_path="target", revision=None))
    with RegionAdapter(memory, True).region("weights"):
        model = Deepseek()
    post_load.attach(model, templates=True)
    yield model, SglangWorker(model, memory, config, rank=0)


def test_two_tensors_that_become_one_parameter_may_come_in_different_buckets(
    made: tuple[Deepseek, SglangWorker],
) -> None:
    """SGLang#14178. Stock: a call of the loader forgets the half whose other half comes with the next call."""
    model, worker = made
    tensors = checkpoint()
    expected = loaded_at_once(tensors)
    with WeightSender(1, bucket_bytes=4096, timeout_s=TIMEOUT_S) as sender:  # less than one tensor
        arguments = (sender.endpoints, sender.token, TIMEOUT_S)
        receiving = threading.Thread(target=worker.agent.receive_weights, args=arguments, daemon=True)
        receiving.start()
        sender.send(ModelSource(tensors))
        receiving.join(TIMEOUT_S)
    worker.agent.finish_update(True)
    assert worker.manager.content is Content.VALID
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name]), name


@pytest.mark.parametrize("at_once", [True, False])
def test_sglangs_own_calls_with_small_buckets_leave_discarded_weights_stale(
    made: tuple[Deepseek, SglangWorker], at_once: bool
) -> None:
    """Each call of SGLang's update is a call of the loader, also with this package."""
    model, worker = made
    tensors = checkpoint()
    worker.manager.begin_writing()
    worker.manager.finish_writing(complete=False)
    updates = EngineUpdates(worker.manager, model.named_parameters, reset=worker.reset_unfilled)
    for bucket in [tensors] if at_once else [{name: one} for name, one in tensors.items()]:
        with updates.watch():
            model.load_weights(iter(bucket.items()))
    assert worker.manager.content is (Content.VALID if at_once else Content.FAILED)
    written = torch.equal(
        model.model.layers[0].self_attn.fused_qkv_a_proj_with_mqa.weight,
        loaded_at_once(tensors)["model.layers.0.self_attn.fused_qkv_a_proj_with_mqa.weight"],
    )
    assert written == at_once
