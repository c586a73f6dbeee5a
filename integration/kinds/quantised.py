"""Checkpoints as quantising tools write them: GPTQ, AWQ, FP8 of three sorts, and scales of an FP8 KV cache."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from integration.kinds.checkpoints import Write, change, configure, tensors_of
from integration.models import FP8_BLOCKS, FP8_CACHE
from rl_memory_plugins.trainer import QuantisedSource
from tests import weight_kinds

GROUP = 128
FP8 = torch.float8_e4m3fn
#: The order in which AWQ packs eight columns into an integer.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
#: In a quantised checkpoint's folder, the folder of the same weights before they were quantised.
TRAINED = "trained"


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


def channel_fp8(write: Write) -> Write:
    """FP8 with a scale for each output, as compressed-tensors stores it; activations are scaled token by token."""
    eight_bits = {"num_bits": 8, "type": "float", "symmetric": True}
    weights = {**eight_bits, "strategy": "channel", "dynamic": False}
    activations = {**eight_bits, "strategy": "token", "dynamic": True}

    def quantised(name: str, weight: torch.Tensor) -> Mapping[str, torch.Tensor]:
        scale = (weight.float().abs().amax(dim=1, keepdim=True) / torch.finfo(FP8).max).to(weight.dtype)
        return {f"{name}.weight": (weight.float() / scale.float()).to(FP8), f"{name}.weight_scale": scale}

    config = weight_kinds.compressed_tensors("float-quantized", {"weights": weights, "input_activations": activations})
    return _with(write, quantised, config)


def fp8_cache(write: Write) -> Write:
    """Scales of an FP8 KV cache, which differ in each layer and with each seed. Weights stay as `write` writes them.

    If they are not quantised, the configuration is that of compressed-tensors for a KV cache alone.
    """

    def written(folder: Path, seed: int, dtype: str) -> Path:
        write(folder, seed, dtype)
        generator = torch.Generator().manual_seed(seed)

        def scaled(tensors: dict[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
            ends = {".k_proj.weight": ".k_scale", ".v_proj.weight": ".v_scale"}
            names = sorted(n.removesuffix(end) + ends[end] for n in tensors for end in ends if n.endswith(end))
            # Keys and values are near 1. FP8 reaches from 0.002 to 448: no scale is so small that they overflow.
            scales = torch.empty(len(names), 1).uniform_(0.02, 0.08, generator=generator).to(getattr(torch, dtype))
            return tensors | {name: scale.clone() for name, scale in zip(names, scales, strict=True)}

        change(folder, scaled)
        if "quantization_config" not in json.loads((folder / "config.json").read_text()):
            configure(folder, quantization_config=FP8_CACHE)
        return folder

    return written


def as_sent(quantise: Callable[[Write], Write], write: Write) -> Write:
    """The checkpoint that `QuantisedSource` makes of a trainer's weights, which stay in the folder `TRAINED`.

    Names and configuration are those that `quantise` writes. The engine starts from the very tensors that are sent
    later: this shows that they arrive, and the formats have tests of their own.
    """

    def written(folder: Path, seed: int, dtype: str) -> Path:
        quantise(write)(folder, seed, dtype)
        plain = tensors_of(write(folder / TRAINED, seed, dtype))
        change(folder, lambda _: dict(QuantisedSource.for_checkpoint(plain, folder).tensors()))
        return folder

    return written


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
