"""A Triton kernel that rounds a weight to FP8 in blocks. It reads each value once, and gives the same bytes as torch.

torch's operators read the weight twice and write a copy in float32. Import this module only if Triton is installed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LARGEST_TILE = 1 << 15
"""Values that one program holds in registers."""

# Values too large for FP8 become NaN in older versions of torch, and the largest FP8 in newer ones. Rounding the bits
# of 480.0 gives NaN's code, and rounding the bits of 464.0 gives that of 448.
_SATURATES = not torch.tensor(1e4, device="cpu").to(torch.float8_e4m3fn).float().isnan().item()
_MOST = tl.constexpr(0x43E80000 if _SATURATES else 0x43F00000)
_INFINITY = tl.constexpr(0x7F800000)
_LEAST_NORMAL = tl.constexpr(121 << 23)  # 2 ** -6, the smallest FP8 that is not subnormal
_UNIT = tl.constexpr(141 << 23)  # 2 ** 14: the last bit of a float32 of this size is worth FP8's smallest step


# Triton understands its own annotations only.
@triton.jit  # type: ignore[untyped-decorator]
def _round_blocks(  # type: ignore[no-untyped-def]  # noqa: ANN202
    weight,  # noqa: ANN001
    codes,  # noqa: ANN001
    scales,  # noqa: ANN001
    rows,  # noqa: ANN001
    columns,  # noqa: ANN001
    row_stride,  # noqa: ANN001
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):
    """One program for each block. Integers stand for the bits of float32, whose order is that of magnitudes."""
    program = tl.program_id(0)
    across = tl.cdiv(columns, BLOCK_COLUMNS)
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

    bits = tl.div_rn(values, tl.zeros_like(values) + scale).to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    subnormal = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - _UNIT
    most = tl.minimum(size, _MOST)
    normal = (most + ((most >> 20) & 1) + (((7 - 127) << 23) + 0x7FFFF)) >> 20  # to the nearest, halfway to even
    code = tl.where(size < _LEAST_NORMAL, subnormal, normal)
    code = tl.where(size > _INFINITY, 0x7F, code) | ((bits >> 24) & 0x80)
    tl.store(codes + row * columns + column, code.to(tl.uint8), mask=inside)


def round_blocks(
    weight: torch.Tensor, block: tuple[int, int], *, power_of_two: bool
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """FP8 values of the weight's shape, and float32 scales of shape (blocks down, blocks across).

    Returns: None for a weight or a block that the kernel does not take.
    """
    rows, columns = weight.shape
    tile = [triton.next_power_of_2(size) for size in block]
    size = tile[0] * tile[1]
    known = weight.dtype in (torch.bfloat16, torch.float16, torch.float32)
    if not known or weight.numel() == 0 or weight.stride(1) != 1 or size > LARGEST_TILE:
        return None
    codes = torch.empty((rows, columns), dtype=torch.uint8, device=weight.device)
    scales = torch.empty(
        (triton.cdiv(rows, block[0]), triton.cdiv(columns, block[1])), dtype=torch.float32, device=weight.device
    )
    warps = max(1, min(16, size >> 10))  # 32 values for each thread leave registers for a second program
    with torch.cuda.device_of(weight):  # Triton launches on the current device
        _round_blocks[(scales.numel(),)](
            weight, codes, scales, rows, columns, weight.stride(0), *block, *tile, power_of_two, num_warps=warps
        )
    return codes.view(torch.float8_e4m3fn), scales
