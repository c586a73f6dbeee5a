"""What attention layers derive from weights, and the scales of an FP8 KV cache, without an engine.

vLLM's backends that keep such numbers need GPUs; the stand-ins derive what these do.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention.attention import set_default_quant_scales
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from rl_memory_plugins.engines import post_load
from rl_memory_plugins.engines.vllm import attention as attention_module
from rl_memory_plugins.engines.vllm import first_load, reload
from rl_memory_plugins.engines.vllm.attention import AttentionSteps
from rl_memory_plugins.errors import WeightUpdateError
from rl_memory_plugins.weights.manifest import Manifest
from rl_memory_plugins.weights.plan import LoadPlan, trace
from rl_memory_plugins.weights.source import spec_of

HEADS = 4


class Backend:
    """As FlashInfer's: a copy of the sinks from the step, and products of scales from the first forward pass."""

    def __init__(self, sinks: torch.Tensor) -> None:
        self._sinks_source = sinks
        self.sinks: torch.Tensor | None = None
        self.bmm1_scale: float | None = None
        self.bmm2_scale: float | None = None
        self.largest = 0.0
        self.steps = 0

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        self.steps += 1
        self.sinks = self._sinks_source.float()  # unlike FlashInfer, new memory each time

    def forward(self, layer: Any) -> float:
        if self.bmm1_scale is None:
            self.bmm1_scale = 0.125 * layer._k_scale_float
        return self.bmm1_scale

    def forward_to_fp8(self, layer: Any, output_scale: torch.Tensor) -> float:
        """As FlashInfer, where the output is quantised in the kernel. The layer keeps one of the two numbers."""
        if self.bmm2_scale is None:
            self.bmm2_scale = layer._v_scale_float
        if layer._o_scale_float is None:
            layer._o_scale_float = output_scale.item()
            self.bmm2_scale /= layer._o_scale_float
        return self.bmm2_scale


class Attention(torch.nn.Module, AttentionLayerBase):  # type: ignore[misc]
    def __init__(self, sinks: torch.Tensor) -> None:
        super().__init__()
        self.impl = Backend(sinks)
        self.kv_cache_dtype = "fp8"
        self.num_kv_heads = 2
        set_default_quant_scales(self, register_buffer=True)
        self._o_scale_float: float | None = None

    def get_attn_backend(self) -> Any: ...

    def get_kv_cache_spec(self, vllm_config: Any) -> Any: ...

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        self.impl.process_weights_after_loading(act_dtype)


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sinks = torch.nn.Parameter(torch.ones(HEADS, dtype=torch.bfloat16), requires_grad=False)
        self.weight = torch.nn.Parameter(torch.ones(HEADS, HEADS), requires_grad=False)
        self.attn = Attention(self.sinks)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer(), Layer()])

    def load_weights(self, weights: Any) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            parameters[name].data.copy_(tensor)

    @property
    def backends(self) -> list[Backend]:
        return [layer.attn.impl for layer in self.layers]


def config(*, eager: bool) -> Any:
    made = VllmConfig()
    made.model_config = SimpleNamespace(dtype=torch.bfloat16, enforce_eager=eager)
    return made


def started(*, eager: bool = False) -> tuple[Model, AttentionSteps]:
    model = Model()
    post_load.attach(model, templates=True)
    for layer in model.layers:
        layer.attn.process_weights_after_loading(torch.bfloat16)
    return model, AttentionSteps(model, config(eager=eager))


def plan_of(model: Model, *names: str) -> LoadPlan:
    tensors = dict(model.named_parameters())
    manifest = Manifest([spec_of(name, tensors[name]) for name in names or tensors], partial=bool(names))
    return trace(model.load_weights, manifest, expected=tensors, owned=tensors.values())


def write(model: Model, plan: LoadPlan, value: float) -> None:
    for name, spec in plan.specs.items():
        plan.apply(name, torch.full(spec.shape, value, dtype=getattr(torch, spec.dtype)))


def test_a_copy_follows_the_weights_at_its_address() -> None:
    model, steps = started()
    before = [backend.sinks.data_ptr() for backend in model.backends]
    plan = plan_of(model)
    write(model, plan, 3.0)
    steps.repeat(plan)
    assert [backend.sinks.tolist() for backend in model.backends] == [[3.0] * HEADS] * 2
    assert [backend.sinks.data_ptr() for backend in model.backends] == before


def test_only_the_steps_that_read_what_was_written_run_again() -> None:
    model, steps = started()
    for names, expected in (["layers.0.weight"], [1, 1]), (["layers.1.sinks"], [1, 2]):
        plan = plan_of(model, *names)
        write(model, plan, 3.0)
        steps.repeat(plan)
        assert [backend.steps for backend in model.backends] == expected
    plan.opaque = {"layers.1.weight": "only the engine's loader knows where it goes"}
    assert [name for name, _ in steps._readers(plan)] == ["layers.0.attn", "layers.1.attn"]


def test_a_number_of_a_forward_pass_is_derived_again() -> None:
    """Eager: FlashInfer would go on with the product of the former scales."""
    model, steps = started(eager=True)
    attention = model.layers[0].attn
    assert attention.impl.forward(attention) == 0.125
    attention._k_scale_float = 4.0
    steps.repeat(plan_of(model, "layers.0.weight"))
    assert attention.impl.forward(attention) == 0.5


def test_a_number_that_the_layer_keeps_is_derived_again_too() -> None:
    """The backend would divide its new product by no scale of outputs, because the layer has the former one."""
    model, steps = started()
    attention = model.layers[0].attn
    for scale in (0.5, 0.25):
        assert attention.impl.forward_to_fp8(attention, torch.tensor(scale)) == 1 / scale
        steps.repeat(plan_of(model, "layers.0.weight"))


@pytest.mark.parametrize("eager", [True, False])
def test_a_number_that_graphs_may_have_must_not_change(monkeypatch: pytest.MonkeyPatch, eager: bool) -> None:
    model, steps = started(eager=eager)
    first = model.backends[0].sinks

    def step(self: Any, act_dtype: torch.dtype) -> None:
        self.impl.process_weights_after_loading(act_dtype)
        self._k_scale_float = float(self.impl.sinks.max())

    monkeypatch.setattr(Attention, "process_weights_after_loading", step)
    for layer in model.layers:
        vars(layer.attn).pop("process_weights_after_loading", None)  # the watched former step
    plan = plan_of(model, "layers.0.sinks")
    write(model, plan, 3.0)
    if eager:
        steps.repeat(plan)
        assert model.layers[0].attn._k_scale_float == 3.0
        return
    with pytest.raises(WeightUpdateError, match=r"changed layers\.0\.attn\._k_scale_float"):
        steps.repeat(plan)
    assert model.backends[0].sinks is first
    write(model, plan, 1.0)
    steps.repeat(plan)  # the number that the graphs have


def test_what_a_forward_pass_has_cast_in_another_shape_is_an_error() -> None:
    model, steps = started()
    source = model.backends[0]._sinks_source
    model.backends[0]._sinks_source = source.float()
    steps.repeat(plan_of(model, "layers.0.weight"))
    model.backends[0]._sinks_source = source[:1].clone()
    with pytest.raises(WeightUpdateError, match=r"layers\.0\.attn\._sinks_source"):
        steps.repeat(plan_of(model, "layers.0.weight"))


class LinearAttention(torch.nn.Module):
    """As vLLM's GLM-5.3: the first forward pass concatenates three weights, and no later one does."""

    def __init__(self) -> None:
        super().__init__()
        for name in attention_module.CONCATENATED["_merged_conv_weight"]:
            setattr(self, name, torch.nn.Conv1d(HEADS, HEADS, 3, groups=HEADS, bias=False).requires_grad_(False))
        self._merged_conv_weight: torch.Tensor | None = None

    def forward(self) -> torch.Tensor:
        if self._merged_conv_weight is None:
            parts = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
            self._merged_conv_weight = torch.cat([one.weight.view(HEADS, 3) for one in parts], dim=0).contiguous()
        return self._merged_conv_weight


def runner_of_experts() -> Any:
    """vLLM's own, with its own first forward pass, and without experts."""
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    made = object.__new__(MoERunner)
    torch.nn.Module.__init__(made)
    made.gate, made.shared_expert_gate = (torch.nn.Linear(HEADS, rows, bias=False) for rows in (6, 1))
    made._combined_gate_weight = None
    return made.requires_grad_(False)


@pytest.mark.parametrize("key", ["_merged_conv_weight", "_combined_gate_weight"])
def test_weights_that_a_forward_pass_has_concatenated_follow_an_update(key: str) -> None:
    """vLLM#55087. Stock: the layer goes on with the former weights, without an error."""
    merged = key == "_merged_conv_weight"
    layer = LinearAttention() if merged else runner_of_experts()
    first_pass = layer.forward if merged else layer._maybe_fuse_gate_weights
    model, _ = started()
    model.extra = layer
    steps = AttentionSteps(model, config(eager=False))
    plan = plan_of(model)
    write(model, plan, 2.0)
    steps.repeat(plan)  # nothing is concatenated yet
    assert getattr(layer, key) is None
    with torch.inference_mode():
        first_pass()
    now = getattr(layer, key)
    address = now.data_ptr()
    for _ in range(2):
        for name, spec in plan.specs.items():
            plan.apply(name, torch.randn(spec.shape, dtype=getattr(torch, spec.dtype)))
        steps.repeat(plan)
        assert getattr(layer, key) is now and now.data_ptr() == address
        setattr(layer, key, None)
        with torch.inference_mode():
            first_pass()
        assert torch.equal(getattr(layer, key), now)
        setattr(layer, key, now)
    with torch.inference_mode():
        setattr(layer, key, now[:1].clone())
    with pytest.raises(WeightUpdateError, match=f"extra.{key}"):
        steps.repeat(plan)


def test_vllm_concatenates_the_weights_of_these_children() -> None:
    """GLM-5.3's linear attention can be imported on GPUs only."""
    file = Path(vllm.__file__).parent / "models/glm5next/common/kda.py"
    if not file.exists():
        pytest.skip("this version of vLLM has no such model")
    parts = ", ".join(f"_w(self.{child})" for child in attention_module.CONCATENATED["_merged_conv_weight"])
    assert f"self._merged_conv_weight = torch.cat( [{parts}], dim=0, )" in " ".join(file.read_text().split())


# -- a start with dummy weights ---------------------------------------------------------------------------------


def kv_methods() -> dict[str, Any]:
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
        CompressedTensorsKVCacheMethod,
    )
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config, Fp8KVCacheMethod

    packed: Any = object.__new__(CompressedTensorsKVCacheMethod)
    packed.quant_config = SimpleNamespace(kv_cache_scheme=None)
    return {"fp8": Fp8KVCacheMethod(Fp8Config()), "compressed-tensors": packed}


def started_with_dummy_weights(method: Any) -> Model:
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    model = Model()
    for layer in model.layers:
        layer.attn.quant_method = method
        method.create_weights(layer.attn)
    post_load.attach(model, templates=True)
    original = getattr(DummyModelLoader.load_weights, "__wrapped__", DummyModelLoader.load_weights)
    with torch.no_grad():
        first_load._with_default_scales(original)(None, model, None)
        assert model.layers[0].weight.max() < 0.01
        for layer in model.layers:
            layer.attn.quant_method.process_weights_after_loading(layer.attn)
    return model


@pytest.mark.parametrize("name", ["fp8", "compressed-tensors"])
def test_dummy_weights_leave_the_scales_of_the_kv_cache_at_their_defaults(name: str) -> None:
    """Natively compressed-tensors multiplies keys and values by random numbers, also after an update."""
    for layer in started_with_dummy_weights(kv_methods()[name]).layers:
        assert float(layer.attn._k_scale) == layer.attn._k_scale_float == 1.0
        assert float(layer.attn._v_scale) == layer.attn._v_scale_float == 1.0
        assert float(layer.attn._prob_scale) == 1.0  # a buffer, which the step of compressed-tensors leaves as it is


def test_graphs_with_default_scales_take_no_others() -> None:
    model = started_with_dummy_weights(kv_methods()["fp8"])
    watch: Any = post_load.of(model)
    plan = plan_of(model, "layers.0.weight")
    reload._require_default_scales(watch, plan)
    plan.opaque = {"layers.1.attn.k_scale": "whole layers"}
    with pytest.raises(WeightUpdateError, match="a start with dummy weights") as error:
        reload._require_default_scales(watch, plan)
    assert error.value.details["layer"] == "layers.0.attn"
