"""What vLLM's kernel objects and schemes hold, over a reload that makes it anew."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rl_memory_plugins.engines.layer_tensors import held_by_methods
from rl_memory_plugins.engines.post_load import PostLoad
from rl_memory_plugins.engines.saved_layers import SavedLayers

EXPERTS, HIDDEN, INTERMEDIATE = 4, 32, 16


class Config(types.SimpleNamespace):
    """vLLM's configuration of experts. What is not given is `None`."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


CUTLASS = Config(
    num_local_experts=EXPERTS,
    intermediate_size_per_partition=INTERMEDIATE,
    hidden_dim=HIDDEN,
    device="cpu",
    in_dtype=torch.bfloat16,
)


class Method:
    """As vLLM's methods of FP8 experts: its step makes vLLM's own kernel object, with vLLM's own constants."""

    def process_weights_after_loading(self, layer: Any) -> None:
        from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config
        from vllm.model_executor.layers.fused_moe.experts.cutlass_moe import CutlassExpertsFp8

        self.moe_quant_config = fp8_w8a8_moe_quant_config(
            w1_scale=layer.w13_weight_scale, w2_scale=layer.w2_weight_scale, per_act_token_quant=True
        )
        experts = CutlassExpertsFp8(CUTLASS, self.moe_quant_config)
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


class W4A8Method:
    """As vLLM's method of experts in int4 with activations in FP8 (CUTLASS, Hopper)."""

    module = "fused_moe.experts.cutlass_moe"

    def process_weights_after_loading(self, layer: Any) -> None:
        from vllm.model_executor.layers.fused_moe.config import int4_w4afp8_moe_quant_config
        from vllm.model_executor.layers.fused_moe.experts.cutlass_moe import CutlassExpertsW4A8Fp8

        self.b_strides1, self.b_strides2 = (torch.full((EXPERTS, 3), size) for size in (HIDDEN, INTERMEDIATE))
        scales = (layer.w13_weight_scale, layer.w2_weight_scale)
        self.moe_quant_config = int4_w4afp8_moe_quant_config(*scales, *(one.float() * 2 for one in scales))
        experts = CutlassExpertsW4A8Fp8(CUTLASS, self.moe_quant_config, self.b_strides1, self.b_strides2, 128)
        self.moe_kernel = types.SimpleNamespace(impl=types.SimpleNamespace(fused_experts=experts))


class TrtLlmMethod:
    """As vLLM's method of experts in MXFP4 (TRT-LLM, Blackwell), with the indices by which it shuffles each load."""

    module = "fused_moe.experts.trtllm_mxfp4_moe"

    def __init__(self) -> None:
        self._cache_permute_indices: dict[torch.Size, torch.Tensor] = {}

    def process_weights_after_loading(self, layer: Any) -> None:
        from vllm.model_executor.layers.fused_moe.config import mxfp4_w4a16_moe_quant_config
        from vllm.model_executor.layers.fused_moe.experts.trtllm_mxfp4_moe import TrtLlmMxfp4ExpertsBase

        shape = layer.w13_weight_scale.shape
        if shape not in self._cache_permute_indices:
            self._cache_permute_indices[shape] = torch.arange(EXPERTS).flip(0)
        layer.w13_weight_scale.data = layer.w13_weight_scale.data[self._cache_permute_indices[shape]]
        self.moe_quant_config = mxfp4_w4a16_moe_quant_config(
            w1_scale=layer.w13_weight_scale, w2_scale=layer.w2_weight_scale, gemm1_alpha=1.7, gemm1_clamp_limit=7.0
        )
        config = Config(
            num_local_experts=EXPERTS,
            experts_per_token=2,
            intermediate_size_per_partition=INTERMEDIATE,
            hidden_dim=HIDDEN,
            moe_parallel_config=types.SimpleNamespace(ep_rank=0),
        )
        experts = TrtLlmMxfp4ExpertsBase(config, self.moe_quant_config)
        self.moe_kernel = types.SimpleNamespace(impl=types.SimpleNamespace(fused_experts=experts))


class StaticActivations:
    """vLLM's own scheme of weights with static scales of activations (WNA8O8): it takes the scales off the layer."""

    module = "quantization.compressed_tensors.schemes.compressed_tensors_wNa8o8"

    def __init__(self) -> None:
        from vllm.model_executor.layers.quantization.compressed_tensors.schemes import compressed_tensors_wNa8o8

        made = compressed_tensors_wNa8o8.CompressedTensorsWNA8O8Int(4, "channel", None, True, True)
        made.kernel = types.SimpleNamespace(process_weights_after_loading=lambda layer: None)
        self.scheme = made

    def process_weights_after_loading(self, layer: Any) -> None:
        for name, weight in (("input_scale", layer.w13_weight_scale), ("output_scale", layer.w2_weight_scale)):
            setattr(layer, name, torch.nn.Parameter(weight.data[0].clone(), requires_grad=False))  # as they are loaded
        self.scheme.process_weights_after_loading(layer)


def loaded(method: Callable[[], Any], scale: float) -> tuple[Experts, PostLoad]:
    layer = Experts()
    layer.set_scales(scale)
    layer.quant_method = method()
    layer.scheme = getattr(layer.quant_method, "scheme", None)
    watch = PostLoad(torch.nn.Sequential(layer))
    watch.watch()
    layer.quant_method.process_weights_after_loading(layer)
    return layer, watch


def held(layer: Any) -> dict[tuple[Any, ...], torch.Tensor]:
    return {path: one.tensor for path, one in held_by_methods(layer).items()}


@pytest.mark.parametrize("method", [W4A8Method, TrtLlmMethod, StaticActivations])
def test_what_a_method_holds_is_where_graphs_read_it_and_has_the_new_values(
    method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The candidates of vLLM#48312 that no CPU runs, and vLLM#49695."""
    pytest.importorskip(f"vllm.model_executor.layers.{method.module}", reason="new in later versions of vLLM")
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: "cpu")
    layer, watch = loaded(method, 1.0)
    assert watch.transformed() and not watch.hidden()
    before = held(layer)
    addresses = {path: one.data_ptr() for path, one in before.items()}
    for scale in (2.0, 3.0):
        saved = SavedLayers(dict(watch.model.named_modules()))
        layer.set_scales(scale)
        layer.quant_method.process_weights_after_loading(layer)
        saved.keep_addresses(watch.graphs)
        fresh = held(loaded(method, scale)[0])
        assert fresh.keys() == before.keys() and any("scale" in str(path[-1]) for path in fresh)
        for path, one in fresh.items():
            assert torch.equal(before[path], one), path
        assert {path: one.data_ptr() for path, one in held(layer).items()} == addresses
    assert not watch.graphs.tensors
