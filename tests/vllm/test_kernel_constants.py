"""What vLLM's kernel objects of experts hold, over a reload that makes the objects anew."""

from __future__ import annotations

import types
from typing import Any

import torch

from rl_memory_plugins.engines.post_load import PostLoad
from rl_memory_plugins.engines.saved_layers import SavedLayers

EXPERTS, HIDDEN, INTERMEDIATE = 4, 32, 16


class Config(types.SimpleNamespace):
    """vLLM's configuration of experts. What is not given is `None`."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class Method:
    """As vLLM's methods of FP8 experts: its step makes vLLM's own kernel object, with vLLM's own constants."""

    def process_weights_after_loading(self, layer: Any) -> None:
        from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config
        from vllm.model_executor.layers.fused_moe.experts.cutlass_moe import CutlassExpertsFp8

        self.moe_quant_config = fp8_w8a8_moe_quant_config(
            w1_scale=layer.w13_weight_scale, w2_scale=layer.w2_weight_scale, per_act_token_quant=True
        )
        config = Config(
            num_local_experts=EXPERTS,
            intermediate_size_per_partition=INTERMEDIATE,
            hidden_dim=HIDDEN,
            device="cpu",
            in_dtype=torch.bfloat16,
        )
        experts = CutlassExpertsFp8(config, self.moe_quant_config)
        self.moe_kernel = types.SimpleNamespace(impl=types.SimpleNamespace(fused_experts=experts))


class Experts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.set_scales(1.0)
        self.quant_method = Method()

    def set_scales(self, value: float) -> None:
        for name in ("w13_weight_scale", "w2_weight_scale"):
            setattr(self, name, torch.nn.Parameter(torch.full((EXPERTS, 1), value), requires_grad=False))


def constants(layer: Any) -> dict[str, torch.Tensor]:
    experts = layer.quant_method.moe_kernel.impl.fused_experts
    quantised = experts.quant_config
    return {
        **{name: getattr(experts, name) for name in ("ab_strides1", "ab_strides2", "c_strides1", "c_strides2")},
        "w1_scale": quantised.w1_scale,
        "w2_scale": quantised.w2_scale,
    }


def test_constants_of_a_kernel_keep_their_addresses_and_get_the_new_values() -> None:
    """CUDA graphs read them: vLLM's reload frees those of the former object."""
    layer = Experts()
    model = torch.nn.Sequential(layer)
    watch = PostLoad(model)
    watch.watch()
    layer.quant_method.process_weights_after_loading(layer)
    before, kernel = constants(layer), layer.quant_method.moe_kernel
    for value in (2.0, 3.0):
        saved = SavedLayers(dict(model.named_modules()))
        layer.set_scales(value)
        layer.quant_method.process_weights_after_loading(layer)
        assert layer.quant_method.moe_kernel is not kernel
        assert constants(layer)["ab_strides1"] is not before["ab_strides1"]
        saved.keep_addresses(watch.graphs)
        after = constants(layer)
        assert {name: one.data_ptr() for name, one in after.items()} == {n: t.data_ptr() for n, t in before.items()}
        assert torch.equal(before["w1_scale"], torch.full((EXPERTS, 1), value))
        assert before["ab_strides1"].tolist() == [HIDDEN] * EXPERTS
    assert not watch.graphs.tensors


def test_a_kernel_that_a_failed_reload_has_made_is_forgotten() -> None:
    layer = Experts()
    layer.quant_method.process_weights_after_loading(layer)
    kernel = layer.quant_method.moe_kernel
    saved = SavedLayers({"experts": layer})
    layer.quant_method.process_weights_after_loading(layer)
    saved.restore()
    assert layer.quant_method.moe_kernel is kernel
