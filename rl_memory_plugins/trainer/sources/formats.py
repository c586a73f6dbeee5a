"""The tensors by which checkpoints store a quantised weight, made of the weight by rounding to the nearest value.

Every function takes a weight of shape (outputs, inputs) and gives its tensors by the last part of their names. None of
them reads a value on the host.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from rl_memory_plugins.errors import InvalidRequestError
from rl_memory_plugins.trainer.sources import format_layouts as layouts
from rl_memory_plugins.trainer.sources.format_layouts import Layout, half

logger = logging.getLogger(__name__)

FP8 = torch.float8_e4m3fn

_kernel_errors: list[str] = []
"""Why the kernel does not work in this process, if it has failed. It is not tried again."""

Quantise = Callable[[torch.Tensor], dict[str, torch.Tensor]]

Target = tuple[torch.Tensor, torch.Tensor] | None
"""Memory for the values and the scales of a weight, contiguous and on its device; `None`: a function allocates it."""

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The columns of eight that one integer of AWQ holds, from its lowest bits."""


class Format(NamedTuple):
    """How a checkpoint stores quantised weights.

    Attributes:
        marker: The last part of a name that only quantised weights have.
        quantise: Makes the tensors of one weight.
        layout: Gives their dtypes and shapes, by the shape and the dtype of the weight.
        quantise_many: Makes those of several weights, faster than one by one; `None` if it would not be. Its second
            argument is where: see `many_fp8_by_block`.
    """

    marker: str
    quantise: Quantise
    layout: Callable[[tuple[int, ...], torch.dtype], Layout]
    quantise_many: Callable[[Sequence[torch.Tensor], Sequence[Target]], list[dict[str, torch.Tensor]]] | None = None


def format_of(config: Mapping[str, Any]) -> Format:
    """The format of a checkpoint, by the `quantization_config` of its `config.json`.

    Raises:
        InvalidRequestError: no trainer's weights alone give this format's tensors, or the format is not known.
    """
    method = str(config.get("quant_method", "")).lower()
    if method == "fp8":
        _require(config.get("activation_scheme", "dynamic") == "dynamic", config, "its scales of activations are fixed")
        block = config.get("weight_block_size")
        if block:
            power = config.get("scale_fmt") == "ue8m0"
            return _fp8_by_block(config, block, power, "weight_scale_inv")
        return _by_scale(FP8, ())
    if method in ("w8a8_int8", "w8a8_fp8"):
        return _by_row(FP8 if method.endswith("fp8") else torch.int8)
    if method == "compressed-tensors":
        return _compressed_tensors(config)
    if method in ("gptq", "gptq_marlin"):
        return _gptq(config)
    if method in ("awq", "awq_marlin"):
        _require(config.get("bits") == 4 and config.get("version", "gemm") == "gemm", config, "only 4 bits, gemm")
        _require(bool(config.get("zero_point", True)), config, "it has no zero points")
        group = int(config.get("group_size", 128))
        return _format("qweight", awq, layouts.awq, group=group)
    _require(False, config, "the format is not known")
    raise AssertionError


def _format(marker: str, quantise: Callable[..., Any], layout: Callable[..., Layout], **options: Any) -> Format:
    """A format of which the tensors and their layout have the same options."""
    return Format(marker, functools.partial(quantise, **options), functools.partial(layout, **options))


def _by_scale(dtype: torch.dtype, scale_shape: tuple[int, ...]) -> Format:
    return _format("weight_scale", by_scale, layouts.by_scale, dtype=dtype, scale_shape=scale_shape)


def _by_row(dtype: torch.dtype) -> Format:
    return _format("weight_scale", by_row, layouts.by_row, dtype=dtype)


def _gptq(config: Mapping[str, Any]) -> Format:
    _require(config.get("bits") in (4, 8), config, "only 4 and 8 bits")
    sizes: dict[str, Any] = {"bits": config["bits"], "group": int(config.get("group_size", -1))}
    stored_zero = 0 if config.get("checkpoint_format") == "gptq_v2" else -1
    quantise = functools.partial(gptq, **sizes, symmetric=bool(config.get("sym", True)), stored_zero=stored_zero)
    return Format("qweight", quantise, functools.partial(layouts.gptq, **sizes))


def _compressed_tensors(config: Mapping[str, Any]) -> Format:
    groups = list(config.get("config_groups", {}).values())
    _require(len(groups) == 1, config, "its layers have several formats")
    weights, activations = groups[0]["weights"], groups[0].get("input_activations") or {}
    layout = groups[0].get("format") or config.get("format")
    _require(activations.get("dynamic", True) is True, config, "its scales of activations are fixed")
    _require(not weights.get("actorder"), config, "it orders inputs by their activations")
    strategy, bits = weights.get("strategy"), weights.get("num_bits")
    if layout == "pack-quantized":
        group = -1 if strategy == "channel" else int(weights["group_size"])
        symmetric = bool(weights.get("symmetric", True))
        return _format("weight_packed", packed, layouts.packed, bits=bits, group=group, symmetric=symmetric)
    _require(bits == 8 and bool(weights.get("symmetric", True)), config, "only 8 bits without zero points, or packed")
    dtype = FP8 if weights.get("type") == "float" else torch.int8
    if strategy == "channel":
        return _by_row(dtype)
    if strategy == "tensor":
        return _by_scale(dtype, (1,))
    _require(strategy == "block" and dtype is FP8, config, f"strategy {strategy!r}")
    return _fp8_by_block(config, weights["block_structure"], False, "weight_scale")


def _fp8_by_block(config: Mapping[str, Any], block: Any, power_of_two: bool, scale: str) -> Format:
    _require(isinstance(block, list | tuple) and len(block) == 2, config, f"a block is rows and columns, not {block}")
    options: dict[str, Any] = {"block": tuple(block), "power_of_two": power_of_two, "scale": scale}
    many = functools.partial(many_fp8_by_block, **options)
    layout = functools.partial(layouts.fp8_by_block, block=tuple(block), scale=scale)
    return Format(scale, functools.partial(fp8_by_block, **options), layout, many)


def by_scale(weight: torch.Tensor, *, dtype: torch.dtype, scale_shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Eight bits with one scale."""
    scale = _scale(_largest(weight), _most(dtype))
    return {"weight": _rounded(weight, scale, dtype), "weight_scale": scale.reshape(scale_shape)}


def by_row(weight: torch.Tensor, *, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Eight bits with a scale for each output, of shape (outputs, 1)."""
    scale = _scale(_largest(weight, (1,), keepdim=True), _most(dtype))
    return {"weight": _rounded(weight, scale, dtype), "weight_scale": scale}


def fp8_by_block(
    weight: torch.Tensor, *, block: tuple[int, int], power_of_two: bool, scale: str
) -> dict[str, torch.Tensor]:
    """FP8 with a scale for each block, as DeepSeek publishes it. Blocks at the edges may be smaller.

    Args:
        power_of_two: Round each scale up to a power of two that is a normal float32.
        scale: The name of the scales, float32 of shape (blocks down, blocks across).
    """
    [made] = many_fp8_by_block([weight], [None], block=block, power_of_two=power_of_two, scale=scale)
    return made


def many_fp8_by_block(
    weights: Sequence[torch.Tensor],
    into: Sequence[Target],
    *,
    block: tuple[int, int],
    power_of_two: bool,
    scale: str,
) -> list[dict[str, torch.Tensor]]:
    """`fp8_by_block` of several weights of one dtype and device.

    Args:
        into: For each weight where its tensors are made. The result has these very tensors.
    """
    made = _by_kernel(weights, into, block, power_of_two) if weights[0].is_cuda else None
    if made is None:
        made = [
            _copied(_by_operators(weight, block, power_of_two), places)
            for weight, places in zip(weights, into, strict=True)
        ]
    return [{"weight": values, scale: scales} for values, scales in made]


def _copied(made: tuple[torch.Tensor, torch.Tensor], target: Target) -> tuple[torch.Tensor, torch.Tensor]:
    return made if target is None else (target[0].copy_(made[0]), target[1].copy_(made[1]))


def _by_operators(
    weight: torch.Tensor, block: tuple[int, int], power_of_two: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = weight.shape
    edges = (0, -columns % block[1], 0, -rows % block[0])
    padded = torch.nn.functional.pad(weight, edges) if any(edges) else weight  # padding by nothing copies too
    blocks = padded.unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0]))
    scales = _scale(_largest(blocks, (1, 3)), _most(FP8))
    if power_of_two:  # by the bits of the exponent, as a logarithm is not exact
        scales = ((scales.view(torch.int32) + 0x7FFFFF) & -0x800000).view(torch.float32)
    values = _rounded(blocks, scales[:, None, :, None], FP8).view(padded.shape)
    return values[:rows, :columns].contiguous(), scales


def _by_kernel(
    weights: Sequence[torch.Tensor], into: Sequence[Target], block: tuple[int, int], power_of_two: bool
) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
    """The same bytes as `_by_operators`, by a kernel that reads each weight once; None where the kernel cannot."""
    if _kernel_errors:
        return None
    try:
        from rl_memory_plugins.trainer.sources.fp8_kernel import round_blocks

        return round_blocks(weights, block, power_of_two=power_of_two, into=into)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # no Triton, no C compiler, no support for this GPU, …: torch's operators need neither
        _kernel_errors.append(str(error))
        logger.warning("weights are rounded to FP8 by torch's operators, which takes longer: %s", error)
        return None


def packed(weight: torch.Tensor, *, bits: int, group: int, symmetric: bool) -> dict[str, torch.Tensor]:
    """Integers of compressed-tensors, packed along the inputs, with scales of shape (outputs, groups)."""
    values, scales, zeros = _grouped(weight, bits, group, symmetric)
    tensors = {
        "weight_packed": _pack(values, bits, 1),
        "weight_scale": scales.to(weight.dtype),
        "weight_shape": torch.tensor(weight.shape, device="cpu"),
    }
    return tensors if symmetric else {**tensors, "weight_zero_point": _pack(zeros, bits, 0)}


def gptq(weight: torch.Tensor, *, bits: int, group: int, symmetric: bool, stored_zero: int) -> dict[str, torch.Tensor]:
    """Integers of GPTQ, packed along the inputs, with the inputs in their own order.

    Args:
        stored_zero: Added to the zero points that are stored; the first version of GPTQ's format stores them less one.
    """
    values, scales, zeros = _grouped(weight, bits, group, symmetric, least_zero=-stored_zero)
    inputs = weight.shape[1]
    return {
        "qweight": _pack(values.t(), bits, 0),
        "qzeros": _pack(zeros.t().to(torch.int32) + stored_zero, bits, 1),
        "scales": scales.t().contiguous().to(half(weight.dtype)),
        "g_idx": torch.arange(inputs, dtype=torch.int32, device=weight.device) // (inputs if group < 0 else group),
    }


def awq(weight: torch.Tensor, *, group: int) -> dict[str, torch.Tensor]:
    """Integers of AWQ, packed along the outputs."""
    values, scales, zeros = _grouped(weight, 4, group, symmetric=False)
    return {
        "qweight": _pack(values.t(), 4, 1, _AWQ_ORDER),
        "qzeros": _pack(zeros.t(), 4, 1, _AWQ_ORDER),
        "scales": scales.t().contiguous().to(half(weight.dtype)),
    }


def _grouped(
    weight: torch.Tensor, bits: int, group: int, symmetric: bool, least_zero: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The integers from 0 of a weight, as uint8; and of each group of inputs the scale and the zero point."""
    most = 2**bits - 1
    groups = weight.unflatten(1, (-1, weight.shape[1] if group < 0 else group)).float()
    if symmetric:
        scales = _scale(groups.abs().amax(dim=2), most / 2)
        zeros = torch.full_like(scales, 2 ** (bits - 1))
    else:
        low, high = groups.amin(dim=2).clamp(max=0), groups.amax(dim=2).clamp(min=0)
        scales = _scale(high - low, most)
        zeros = (-low / scales).round().clamp(least_zero, most)
    scales = scales.to(half(weight.dtype)).float()  # the engine multiplies by the rounded scale
    values = ((groups / scales.unsqueeze(2)).round() + zeros.unsqueeze(2)).clamp(0, most)
    return values.to(torch.uint8).flatten(1), scales, zeros.to(torch.uint8)


def _pack(values: torch.Tensor, bits: int, dimension: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Pack integers into int32 along a dimension, the first into the lowest bits or in the given order."""
    count = 32 // bits
    several = values.unflatten(dimension, (-1, count))
    result: torch.Tensor | None = None
    for position, index in enumerate(order or range(count)):
        part = several.select(dimension + 1, index).to(torch.int32) << (bits * position)
        result = part if result is None else result | part
    assert result is not None
    return result.contiguous()


def _scale(range_: torch.Tensor, most: float) -> torch.Tensor:
    """The scales that map `range_` to `most`; 1 where all values are 0."""
    quotient = range_ / torch.full_like(range_, most)  # CUDA multiplies by the inverse of a number, which is not exact
    return torch.where(range_ > 0, quotient, 1.0)


def _largest(weight: torch.Tensor, dims: tuple[int, ...] | None = None, *, keepdim: bool = False) -> torch.Tensor:
    """The largest magnitudes, in float32. Reads the weight once and makes no copy of it."""
    return torch.linalg.vector_norm(weight, float("inf"), dims, keepdim).float()


def _rounded(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weight in eight bits. With a scale as large as that of `_scale`, no value is beyond the dtype's range."""
    values = torch.div(weight, torch.atleast_1d(scale))  # in float32: a tensor without dimensions promotes nothing
    return (values if dtype.is_floating_point else values.round_()).to(dtype)


def _most(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).max) if dtype.is_floating_point else float(torch.iinfo(dtype).max)


def _require(condition: bool, config: Mapping[str, Any], why: str) -> None:
    if not condition:
        raise InvalidRequestError(
            f"the trainer's weights cannot be quantised as the engine's checkpoint is: {why}. Send the checkpoint's "
            "own tensors, or start the engine with a checkpoint that is not quantised and its own quantisation",
            field="quantization_config",
            got=dict(config),
        )
