"""The shapes and dtypes of the tensors that `formats` makes of a weight.

To run the functions of `formats` on the meta device gives the same, and imports torch's compiler, which takes seconds:
in the first update an engine would be closed meanwhile.
"""

from __future__ import annotations

import torch

from rl_memory_plugins.errors import InvalidRequestError

Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""By the last part of a name: the dtype and the shape."""

Shape = tuple[int, ...]

_WORD = 32  # bits of the integers into which values are packed


def by_scale(shape: Shape, weight: torch.dtype, *, dtype: torch.dtype, scale_shape: Shape) -> Layout:
    """`weight` is the dtype of the weight, here and below."""
    return {"weight": (dtype, shape), "weight_scale": (torch.float32, scale_shape)}


def by_row(shape: Shape, weight: torch.dtype, *, dtype: torch.dtype) -> Layout:
    rows, _ = _matrix(shape)
    return {"weight": (dtype, shape), "weight_scale": (torch.float32, (rows, 1))}


def fp8_by_block(shape: Shape, weight: torch.dtype, *, block: tuple[int, int], scale: str) -> Layout:
    rows, columns = _matrix(shape)
    down, across = block
    return {"weight": (torch.float8_e4m3fn, shape), scale: (torch.float32, (-(-rows // down), -(-columns // across)))}


def packed(shape: Shape, weight: torch.dtype, *, bits: int, group: int, symmetric: bool) -> Layout:
    rows, columns = _matrix(shape)
    groups = _groups(columns, group, shape)
    count = _WORD // bits
    layout: Layout = {
        "weight_packed": (torch.int32, (rows, _divided(columns, count, "packed word", shape))),
        "weight_scale": (weight, (rows, groups)),
        "weight_shape": (torch.int64, (2,)),
    }
    if not symmetric:
        layout["weight_zero_point"] = (torch.int32, (_divided(rows, count, "packed word", shape), groups))
    return layout


def gptq(shape: Shape, weight: torch.dtype, *, bits: int, group: int) -> Layout:
    rows, columns = _matrix(shape)
    groups = _groups(columns, group, shape)
    count = _WORD // bits
    return {
        "qweight": (torch.int32, (_divided(columns, count, "packed word", shape), rows)),
        "qzeros": (torch.int32, (groups, _divided(rows, count, "packed word", shape))),
        "scales": (half(weight), (groups, rows)),
        "g_idx": (torch.int32, (columns,)),
    }


def awq(shape: Shape, weight: torch.dtype, *, group: int) -> Layout:
    rows, columns = _matrix(shape)
    words = _divided(rows, _WORD // 4, "packed word", shape)
    groups = _groups(columns, group, shape)
    return {
        "qweight": (torch.int32, (columns, words)),
        "qzeros": (torch.int32, (groups, words)),
        "scales": (half(weight), (groups, rows)),
    }


def half(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the scales of GPTQ and AWQ, which have 16 bits."""
    return dtype if dtype in (torch.float16, torch.bfloat16) else torch.float16


def _matrix(shape: Shape) -> tuple[int, int]:
    """The outputs and the inputs of a weight.

    Raises:
        InvalidRequestError: it has another number of dimensions.
    """
    if len(shape) != 2:
        raise InvalidRequestError(
            f"a quantised weight has outputs and inputs, but the trainer's has the shape {list(shape)}",
            field="tensors",
            shape=list(shape),
        )
    return shape[0], shape[1]


def _groups(columns: int, group: int, shape: Shape) -> int:
    """The groups of a row; one if `group` is no size."""
    return _divided(columns, group, "group", shape) if group > 0 else 1


def _divided(size: int, by: int, whole: str, shape: Shape) -> int:
    """How many groups or packed words a dimension has.

    Raises:
        InvalidRequestError: it is no multiple of them.
    """
    if size % by:
        raise InvalidRequestError(
            f"a {whole} has {by} values, which do not divide the {size} of a weight of the shape {list(shape)}",
            field="tensors",
            shape=list(shape),
        )
    return size // by
