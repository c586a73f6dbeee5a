"""A Triton kernel that rounds weights to FP8 in blocks. It reads each value once, and gives the same bytes as torch.

torch's operators read a weight twice and write a copy in float32. One launch serves many weights, because a launch for
each takes longer than the kernel. Import this module only if Triton is installed.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

LARGEST_TILE = 1 << 15
"""Values that one program holds in registers."""

MOST_WEIGHTS = 65535
"""Weights in one launch: CUDA's limit of a grid's second dimension."""

ALIGNMENT = 16
"""Bytes, and elements, by which memory is accessed if all addresses and sizes are multiples of it."""

_POINTERS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}

# Values too large for FP8 become NaN in older versions of torch, and the largest FP8 in newer ones. Rounding the bits
# of 480.0 gives NaN's code, and rounding the bits of 464.0 gives that of 448.
_SATURATES = not torch.tensor(1e4, device="cpu").to(torch.float8_e4m3fn).float().isnan().item()
_MOST = tl.constexpr(0x43E80000 if _SATURATES else 0x43F00000)
_INFINITY = tl.constexpr(0x7F800000)
_LEAST_NORMAL = tl.constexpr(121 << 23)  # 2 ** -6, the smallest FP8 that is not subnormal
_UNIT = tl.constexpr(141 << 23)  # 2 ** 14: the last bit of a float32 of this size is worth FP8's smallest step
# If a block's largest value lies between these, no step of a quotient leaves the normal float32 by which it is exact.
_FAST_FROM = tl.constexpr(67 << 23)  # 2 ** -60
_FAST_TO = tl.constexpr(187 << 23)  # 2 ** 60


# Triton understands its own annotations only.
@triton.jit
def _rounded(values, scale):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """FP8's codes of any values, by operations on integers."""
    bits = tl.div_rn(values, tl.zeros_like(values) + scale).to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    subnormal = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - _UNIT
    most = tl.minimum(size, _MOST)
    normal = (most + ((most >> 20) & 1) + (((7 - 127) << 23) + 0x7FFFF)) >> 20  # to the nearest, halfway to even
    code = tl.where(size < _LEAST_NORMAL, subnormal, normal)
    return (tl.where(size > _INFINITY, 0x7F, code) | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _converted(values, scale):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """The same codes by the GPU's own instruction, of values whose largest lies between `_FAST_FROM` and `_FAST_TO`."""
    # A product, corrected by its own error, is the quotient that division gives (Markstein), in half the instructions.
    # The signs are such that zeros keep theirs: Triton negates by a subtraction, which makes each zero positive.
    inverse = tl.div_rn(1.0, scale)
    near = values * inverse
    error = tl.fma(near, tl.zeros_like(values) + scale, -values)
    quotient = tl.fma(error, tl.zeros_like(values) - inverse, near)
    return quotient.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _round_blocks(  # type: ignore[no-untyped-def]  # noqa: ANN202
    table,  # noqa: ANN001
    DTYPE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ALIGNED: tl.constexpr,
    CONVERTS: tl.constexpr,
):
    """One program for each block of each weight. Integers stand for the bits of float32, whose order is by magnitude.

    The second number of a program is that of its weight, a row of `table`, int64, [weights, 6]: the addresses of the
    weight, its codes and its scales; rows, columns, row stride. Programs beyond the last block of a weight end at once.
    """
    program = tl.program_id(0)
    entry = table + tl.program_id(1) * 6
    weight = tl.load(entry).to(tl.pointer_type(DTYPE))
    codes = tl.load(entry + 1).to(tl.pointer_type(tl.uint8))
    scales = tl.load(entry + 2).to(tl.pointer_type(tl.float32))
    rows = tl.load(entry + 3)
    columns = tl.load(entry + 4)
    row_stride = tl.load(entry + 5)
    across = tl.cdiv(columns, BLOCK_COLUMNS)
    if program >= tl.cdiv(rows, BLOCK_ROWS) * across:
        return
    if ALIGNED:
        weight, codes = tl.multiple_of(weight, 16), tl.multiple_of(codes, 16)
        columns, row_stride = tl.multiple_of(columns, 16), tl.multiple_of(row_stride, 16)
    i, j = tl.arange(0, TILE_ROWS)[:, None], tl.arange(0, TILE_COLUMNS)[None, :]
    row = (program // across).to(tl.int64) * BLOCK_ROWS + i
    column = (program % across) * BLOCK_COLUMNS + j
    inside = (i < BLOCK_ROWS) & (j < BLOCK_COLUMNS) & (row < rows) & (column < columns)
    values = tl.load(weight + row * row_stride + column, mask=inside, other=0).to(tl.float32)

    sizes = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.max(tl.max(sizes, 1), 0)  # NaN is larger than infinity
    scale = tl.div_rn(largest.to(tl.float32, bitcast=True), 448.0)
    scale = tl.where((largest > 0) & (largest <= _INFINITY), scale, 1.0)
    if POWER_OF_TWO:
        scale = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & -0x800000).to(tl.float32, bitcast=True)
    tl.store(scales + program, scale)

    if CONVERTS:
        if (largest >= _FAST_FROM) & (largest <= _FAST_TO):
            code = _converted(values, scale)
        else:
            code = _rounded(values, scale)
    else:
        code = _rounded(values, scale)
    tl.store(codes + row * columns + column, code, mask=inside)


@functools.cache
def _converts(gpu: int | None) -> bool:
    """Whether this GPU has an instruction that rounds to FP8: Ada, Hopper and later. Triton's interpreter has none."""
    return gpu is not None and torch.cuda.get_device_capability(gpu) >= (8, 9)


def round_blocks(
    weights: Sequence[torch.Tensor],
    block: tuple[int, int],
    *,
    power_of_two: bool,
    into: Sequence[tuple[torch.Tensor, torch.Tensor] | None] | None = None,
) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
    """FP8 values of each weight's shape, and float32 scales of shape (blocks down, blocks across).

    Args:
        weights: All of one dtype and on one device.
        into: For each weight contiguous tensors there for its values and scales, or None to allocate them.

    Returns: None for a weight or a block that the kernel does not take. What is allocated shares two allocations.
    """
    tile = [triton.next_power_of_2(size) for size in block]
    size = tile[0] * tile[1]
    dtype, device = weights[0].dtype, weights[0].device
    if dtype not in _POINTERS or size > LARGEST_TILE:
        return None
    if any(weight.numel() == 0 or weight.stride(1) != 1 for weight in weights):
        return None
    down, across = block
    grids = [(-(-weight.shape[0] // down), -(-weight.shape[1] // across)) for weight in weights]
    counts = [rows * columns for rows, columns in grids]
    made = _results(weights, grids, into or [None] * len(weights))
    table = [
        [weight.data_ptr(), codes.data_ptr(), scales.data_ptr(), *weight.shape, weight.stride(0)]
        for weight, (codes, scales) in zip(weights, made, strict=True)
    ]
    aligned = all(entry[place] % ALIGNMENT == 0 for entry in table for place in (0, 1, 4, 5))
    # A copy from pageable memory would wait for all work that the device has.
    there = torch.tensor(table, device="cpu", pin_memory=device.type == "cuda").to(device, non_blocking=True)
    converts = _converts(device.index)
    # 128 values for each thread keep the memory busiest; where rounding takes more registers, a quarter of them.
    warps = max(1, min(4, size >> 12) if converts else min(16, size >> 10))
    with torch.cuda.device_of(weights[0]):  # Triton launches on the current device
        for start in range(0, len(counts), MOST_WEIGHTS):
            some = counts[start : start + MOST_WEIGHTS]
            _round_blocks[(max(some), len(some))](
                there[start:],
                _POINTERS[dtype],
                *block,
                *tile,
                power_of_two,
                aligned,
                converts,
                num_warps=warps,
            )
    return made


def _results(
    weights: Sequence[torch.Tensor],
    grids: Sequence[Sequence[int]],
    into: Sequence[tuple[torch.Tensor, torch.Tensor] | None],
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    given = [place for place in into if place is not None]
    if len(given) == len(weights):
        return given
    new = [
        (0, 0) if place is not None else (-weight.numel() // ALIGNMENT * -ALIGNMENT, down * across)
        for weight, (down, across), place in zip(weights, grids, into, strict=True)
    ]
    sizes, counts = zip(*new, strict=True)
    device = weights[0].device
    all_codes = torch.empty(sum(sizes), dtype=torch.uint8, device=device).split(sizes)
    all_scales = torch.empty(sum(counts), dtype=torch.float32, device=device).split(counts)
    return [
        place or (codes[: weight.numel()].view(torch.float8_e4m3fn).view(weight.shape), scales.view(grid))
        for weight, codes, scales, grid, place in zip(weights, all_codes, all_scales, grids, into, strict=True)
    ]
