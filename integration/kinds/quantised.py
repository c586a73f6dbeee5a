"""Checkpoints as quantising tools write them: GPTQ, AWQ, and FP8 with a scale for each tensor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from integration.kinds.checkpoints import Write, change, configure
from integration.models import FP8_BLOCKS

GROUP = 128
FP8 = torch.float8_e4m3fn
#: The order in which AWQ packs eight columns into an integer.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def gptq(write: Write) -> Write:
    """Four bits, symmetric, packed along the input dimension."""

    def quantised(name: str, weight: torch.Tensor) -> Mapping[str, torch.Tensor]:
        integers, scales = _four_bits(weight)  # of the transposed weight: [in, out]
        zeros = torch.full_like(scales, 7, dtype=torch.int64)  # GPTQ stores the zero point less one
        return {
            f"{name}.qweight": _packed(integers.t()).t(),
            f"{name}.qzeros": _packed(zeros),
            f"{name}.scales": scales.to(weight.dtype),
            f"{name}.g_idx": (torch.arange(len(integers)) // GROUP).to(torch.int32),
        }

    return _with(
        write, quantised, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
    )


def awq(write: Write) -> Write:
    """Four bits, with zero points, packed along the output dimension."""

    def quantised(name: str, weight: torch.Tensor) -> Mapping[str, torch.Tensor]:
        integers, scales = _four_bits(weight)
        zeros = torch.full_like(scales, 8, dtype=torch.int64)
        return {
            f"{name}.qweight": _packed(_reordered(integers)),
            f"{name}.qzeros": _packed(_reordered(zeros)),
            f"{name}.scales": scales.to(weight.dtype),
        }

    return _with(
        write, quantised, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    )


def fp8(write: Write) -> Write:
    """FP8 with a scale for each tensor; activations are scaled when they are known."""

    def quantised(name: str, weight: torch.Tensor) -> Mapping[str, torch.Tensor]:
        scale = weight.float().abs().max() / torch.finfo(FP8).max
        return {f"{name}.weight": (weight.float() / scale).to(FP8), f"{name}.weight_scale": scale}

    return _with(write, quantised, {"quant_method": "fp8", "activation_scheme": "dynamic"})


def block_fp8(write: Write) -> Write:
    """FP8 with a scale for each block of 128 by 128, as DeepSeek and Qwen publish them."""

    def quantised(name: str, weight: torch.Tensor) -> Mapping[str, torch.Tensor]:
        blocks = weight.float().unflatten(1, (-1, GROUP)).unflatten(0, (-1, GROUP))  # [row, GROUP, column, GROUP]
        scale = blocks.abs().amax(dim=(1, 3), keepdim=True) / torch.finfo(FP8).max
        values = (blocks / scale).to(FP8).view(weight.shape)
        return {f"{name}.weight": values, f"{name}.weight_scale_inv": scale[:, 0, :, 0]}

    return _with(write, quantised, FP8_BLOCKS)


def _with(write: Write, quantised: Any, config: dict[str, Any]) -> Write:
    def written(folder: Path, seed: int, dtype: str) -> Path:
        write(folder, seed, dtype)

        routers: list[str] = []  # as published checkpoints name them

        def changed(tensors: dict[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
            found: dict[str, torch.Tensor] = {}
            for name, tensor in tensors.items():
                layer = name.removesuffix(".weight")
                routers.extend([layer] if layer.endswith(".gate") else [])
                found |= quantised(layer, tensor) if layer.endswith("_proj") else {name: tensor}
            return found

        change(folder, changed)
        configure(folder, quantization_config={**config, **({"modules_to_not_convert": routers} if routers else {})})
        return folder

    return written


def _four_bits(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers from 0 to 15 of the transposed weight, and a scale for each group of its rows."""
    transposed = weight.float().t()
    groups = transposed.reshape(-1, GROUP, transposed.shape[1])
    scales = groups.abs().amax(dim=1) / 7
    integers = (groups / scales[:, None]).round().to(torch.int64) + 8
    return integers.view(transposed.shape), scales


def _packed(integers: torch.Tensor) -> torch.Tensor:
    """Eight columns to an integer."""
    eights = integers.reshape(integers.shape[0], -1, 8)
    packed = (eights << torch.arange(0, 32, 4)).sum(dim=2)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)


def _reordered(integers: torch.Tensor) -> torch.Tensor:
    return integers.reshape(integers.shape[0], -1, 8)[:, :, list(AWQ_ORDER)].reshape(integers.shape)
