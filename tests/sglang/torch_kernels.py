"""An SGLang plugin: the kernels of quantised layers in torch, for machines without a GPU.

SGLang's own classes create these layers, load them and transform them after loading, as on a GPU. Only the kernels are
replaced: a kernel that packs weights permutes them, and a multiplication takes the dequantised weight.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

QUANTIZATION = "sglang.srt.layers.quantization"
FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
#: Models ask for these when they are imported, and models that never call them import such models.
LOOKED_UP = (
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    "fused_sigmoid_mul_cpu",
)


def register() -> None:
    for name in LOOKED_UP:
        if not hasattr(torch.ops.sgl_kernel, name):
            setattr(torch.ops.sgl_kernel, name, None)
    _routing()
    _fp8()
    _compressed_tensors()
    if importlib.util.find_spec("sglang.srt.hardware_backend.gpu"):  # older releases keep these kernels elsewhere
        _gptq()


def _fp8() -> None:
    fp8 = importlib.import_module(f"{QUANTIZATION}.fp8")
    fp8._is_cpu = False  # SGLang's own path on the CPU needs AMX
    fp8_utils = importlib.import_module(f"{QUANTIZATION}.fp8_utils")
    kernel = importlib.import_module(fp8_utils.input_to_float8.__module__)
    for module in (importlib.import_module(f"{QUANTIZATION}.utils"), fp8, kernel):
        if hasattr(module, "scaled_fp8_quant"):
            module.scaled_fp8_quant = scaled_fp8_quant

    def apply(self: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if self.block_quant:
            rows, columns = self.weight_block_size
            scale = layer.weight_scale_inv.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
            weight = layer.weight.float() * scale[: layer.weight.shape[0], : layer.weight.shape[1]]
        else:
            weight = (layer.weight.float() * layer.weight_scale.reshape(1, -1)).t()
        return torch.nn.functional.linear(x, weight.to(x.dtype), bias)

    fp8.Fp8LinearMethod.apply = apply

    def apply_experts(self: Any, layer: Any, dispatch_output: Any) -> Any:
        def weights(expert: int) -> tuple[torch.Tensor, torch.Tensor]:
            return (
                layer.w13_weight[expert].float() * layer.w13_weight_scale[expert],
                layer.w2_weight[expert].float() * layer.w2_weight_scale[expert],
            )

        return experts(dispatch_output, weights)

    fp8.Fp8MoEMethod.apply = apply_experts


def _routing() -> None:
    topk = importlib.import_module("sglang.srt.layers.moe.topk")
    known = ("hidden_states", "gating_output", "topk", "renormalize", "correction_bias", "scoring_func")

    def fused_topk_cpu(*args: Any, **kwargs: Any) -> Any:
        return topk.fused_topk_torch_native(*args, **{name: kwargs[name] for name in known if name in kwargs})

    topk.fused_topk_cpu = fused_topk_cpu


def scaled_fp8_quant(input: torch.Tensor, scale: torch.Tensor | None = None, **_: Any) -> tuple[torch.Tensor, Any]:
    if scale is None:
        scale = (input.abs().max().float() / FP8_MAX).reshape(1)
    return (input.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale


def _compressed_tensors() -> None:
    package = f"{QUANTIZATION}.compressed_tensors"
    config = importlib.import_module(f"{package}.compressed_tensors").CompressedTensorsConfig
    config._check_scheme_supported = lambda *args, **kwargs: True

    def apply_weights(self: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        weight = (layer.weight.float() * layer.weight_scale.reshape(1, -1)).t()
        return torch.nn.functional.linear(x, weight.to(x.dtype), bias)

    for name in ("w8a8_int8.CompressedTensorsW8A8Int8", "w8a8_fp8.CompressedTensorsW8A8Fp8"):
        module, _, scheme = name.partition(".")
        found = getattr(importlib.import_module(f"{package}.schemes.compressed_tensors_{module}"), scheme)
        found.apply_weights = apply_weights
    _marlin(importlib.import_module(f"{package}.schemes.compressed_tensors_wNa16"))
    moe = importlib.import_module(f"{package}.schemes.compressed_tensors_wNa16_moe")
    _marlin_experts(moe)
    if hasattr(moe, "CompressedTensorsWNA16TritonMoE"):
        moe.CompressedTensorsWNA16TritonMoE.apply_weights = _triton_experts


def _marlin(module: Any) -> None:
    """Weights of four or eight bits."""
    _marlin_functions(module)

    def apply_weights(self: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        values = unpacked(layer.weight_packed, 32 // self.pack_factor) - 2 ** (32 // self.pack_factor - 1)
        return multiplied(x, values, layer.weight_scale.flip(1).t(), bias)

    module.CompressedTensorsWNA16.apply_weights = apply_weights


def _marlin_experts(module: Any) -> None:
    """Experts of four bits: the rows of packed weights are reversed and joined by two, scales are reversed."""
    module.marlin_make_workspace = lambda device, *args: torch.zeros(8, dtype=torch.int32, device=device)
    module.gptq_marlin_moe_repack = lambda packed, *args: packed.flip(1).reshape(len(packed), packed.shape[1] // 2, -1)
    module.marlin_moe_permute_scales = lambda scales, *args: scales.flip(2).contiguous()

    def dequantised(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        rows = packed.reshape(-1, scales.shape[1]).flip(0)
        values = unpacked(rows.t(), 4) - 8
        groups = scales.flip(1).t().float()
        return values.float() * groups.repeat_interleave(values.shape[1] // groups.shape[1], 1)

    def apply_weights(self: Any, layer: Any, dispatch_output: Any) -> Any:
        def weights(expert: int) -> tuple[torch.Tensor, torch.Tensor]:
            return (
                dequantised(layer.w13_weight_packed[expert], layer.w13_weight_scale[expert]),
                dequantised(layer.w2_weight_packed[expert], layer.w2_weight_scale[expert]),
            )

        return experts(dispatch_output, weights)

    module.CompressedTensorsWNA16MoE.apply_weights = apply_weights


def _triton_experts(self: Any, layer: Any, dispatch_output: Any) -> Any:
    """Experts of four bits: the columns of two neighbouring inputs share a byte."""

    def dequantised(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        values = unpacked(packed.view(torch.int32), 4) - 8
        return values.float() * scales.float().repeat_interleave(values.shape[1] // scales.shape[1], 1)

    def weights(expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        return (
            dequantised(layer.w13_weight_packed[expert], layer.w13_weight_scale[expert]),
            dequantised(layer.w2_weight_packed[expert], layer.w2_weight_scale[expert]),
        )

    return experts(dispatch_output, weights)


def experts(dispatch_output: Any, weights_of: Any) -> Any:
    """Gated experts; `weights_of` gives both matrices of an expert, of shape (outputs, inputs)."""
    combine = importlib.import_module("sglang.srt.layers.moe.token_dispatcher").StandardCombineInput
    x, (weights, chosen, *_) = dispatch_output.hidden_states, dispatch_output.topk_output
    out = torch.zeros(x.shape)
    for expert in chosen.unique().tolist():
        tokens, places = (chosen == expert).nonzero(as_tuple=True)
        w13, w2 = weights_of(expert)
        gate, up = (x[tokens].float() @ w13.t()).chunk(2, dim=1)
        made = (torch.nn.functional.silu(gate) * up) @ w2.t()
        out.index_add_(0, tokens, made * weights[tokens, places, None].float())
    return combine(hidden_states=out.to(x.dtype))


def _marlin_functions(module: Any) -> None:
    """`gptq_marlin_repack` transposes, scales are reversed, and the multiplication undoes both."""
    module.marlin_make_workspace = lambda device, *args: torch.zeros(8, dtype=torch.int32, device=device)
    module.gptq_marlin_repack = lambda packed, *, perm, size_k, size_n, num_bits: packed.t().contiguous()
    module.marlin_permute_scales = lambda scales, *, size_k, size_n, group_size: scales.flip(1).contiguous()


def unpacked(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """The integers of rows that are packed along the second dimension."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((packed.unsqueeze(2) >> shifts) & (2**bits - 1)).flatten(1)


def multiplied(x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply by integers of shape (outputs, inputs) with scales of shape (outputs, groups)."""
    weight = values.float() * scales.float().repeat_interleave(values.shape[1] // scales.shape[1], 1)
    return torch.nn.functional.linear(x, weight.to(x.dtype), bias)


def _gptq() -> None:
    kernels = importlib.import_module("sglang.srt.hardware_backend.gpu.quantization.gptq_kernels")
    _marlin_functions(kernels)
    for module in ("gptq", "schemes.gptq_marlin"):
        _supported(importlib.import_module(f"{QUANTIZATION}.gptq.{module}"))

    def apply(self: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return multiplied(x, unpacked(layer.qweight, 4) - 8, layer.scales.flip(1).t(), bias)

    kernels.GPTQMarlinLinearKernel.apply = apply


def _supported(module: Any) -> None:
    for name in ("check_marlin_supported", "verify_marlin_supported", "verify_marlin_supports_shape"):
        if hasattr(module, name):
            setattr(module, name, lambda *args, **kwargs: True)
