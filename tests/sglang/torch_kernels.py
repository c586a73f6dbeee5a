"""An SGLang plugin: the kernels of quantised layers in torch, for machines without a GPU.

SGLang's own classes create these layers, load them and transform them after loading, as on a GPU. Only the kernels are
replaced: a kernel that packs weights permutes them, and a multiplication takes the dequantised weight.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

QUANTIZATION = "sglang.srt.layers.quantization"
FP8_MAX = torch.finfo(torch.float8_e4m3fn).max


def register() -> None:
    _fp8()
    _compressed_tensors()


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


def _marlin(module: Any) -> None:
    """Weights of four or eight bits: `gptq_marlin_repack` transposes, and the multiplication undoes it."""
    module.marlin_make_workspace = lambda device, *args: torch.zeros(8, dtype=torch.int32, device=device)
    module.gptq_marlin_repack = lambda packed, *, perm, size_k, size_n, num_bits: packed.t().contiguous()
    module.marlin_permute_scales = lambda scales, *, size_k, size_n, group_size: scales.flip(1).contiguous()

    def apply_weights(self: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        bits = 32 // self.pack_factor
        shifts = torch.arange(0, 32, bits, dtype=torch.int32)
        values = (layer.weight_packed.unsqueeze(2) >> shifts) & (2**bits - 1)  # rows of outputs
        values = values.reshape(values.shape[0], -1).float() - 2 ** (bits - 1)
        scales = layer.weight_scale.flip(1).t().float()
        weight = values * scales.repeat_interleave(values.shape[1] // scales.shape[1], 1)
        return torch.nn.functional.linear(x, weight.to(x.dtype), bias)

    module.CompressedTensorsWNA16.apply_weights = apply_weights
