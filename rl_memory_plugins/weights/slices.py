"""Only what a rank needs travels: the part of each tensor that its load plan reads, and both ends' view of it.

A rank names its slices in its answer to an offer. From then on both ends work with the *cut* manifest: its tensors have
the slices' shapes, and its buckets have what is left of the buckets of whole tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from rl_memory_plugins.errors import WeightUpdateError
from rl_memory_plugins.weights.manifest import BucketEntry, Manifest, TensorSpec, align

if TYPE_CHECKING:
    import torch

    from rl_memory_plugins.weights.trace import CopyStep


# gc=False: thousands of tracked objects would trigger the garbage collector
class Slice(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Ranges of one dimension of a tensor, in ascending order, that do not touch. Other dimensions are whole."""

    dimension: int
    ranges: tuple[tuple[int, int], ...]  # first index and number of indices

    @property
    def length(self) -> int:
        return sum(count for _, count in self.ranges)

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        return (*whole[: self.dimension], self.length, *whole[self.dimension + 1 :])


def slice_of(shape: Sequence[int], copies: Sequence[CopyStep]) -> Slice | None:
    """The smallest slice that holds all that some copies read of a contiguous tensor. `None`: most or all of it."""
    if not shape or not math.prod(shape):
        return None
    found = [
        Slice(dimension, ranges) for dimension in range(len(shape)) if (ranges := _ranges(shape, dimension, copies))
    ]
    if not copies:
        return Slice(0, ())
    best = min(found, key=lambda one: one.length / shape[one.dimension], default=None)
    return best if best is not None and best.length < shape[best.dimension] else None


def cut_step(step: CopyStep, shape: Sequence[int], part: Slice) -> CopyStep:
    """The copy from the slice instead of the whole tensor."""
    inner, block = _strides(shape, part.dimension)
    cut_block = part.length * inner
    outer, rest = divmod(step.offset, block)
    index = rest // inner
    before = 0  # indices of earlier ranges
    for first, count in part.ranges:
        if first <= index < first + count:
            break
        before += count
    offset = outer * cut_block + rest - (first - before) * inner
    stride = tuple(one // block * cut_block if one % block == 0 else one for one in step.stride)
    return step._replace(stride=stride, offset=offset)


def _strides(shape: Sequence[int], dimension: int) -> tuple[int, int]:
    """The elements from one index of a dimension to the next, and those of the whole dimension."""
    inner = math.prod(shape[dimension + 1 :])
    return inner, inner * shape[dimension]


def _ranges(shape: Sequence[int], dimension: int, copies: Iterable[CopyStep]) -> tuple[tuple[int, int], ...]:
    """The indices of a dimension that the copies read; empty if a copy runs on from one dimension to the next."""
    inner, block = _strides(shape, dimension)
    found = []
    for step in copies:
        first = step.offset % block
        last = first + sum(
            (extent - 1) * stride for extent, stride in zip(step.size, step.stride, strict=True) if stride % block
        )
        if last >= block:
            return ()
        found.append((first // inner, last // inner + 1))
    merged: list[tuple[int, int]] = []
    for first, end in sorted(found):
        if merged and first <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((first, end))
    return tuple((first, end - first) for first, end in merged)


class Cut:
    """The slices of one rank, for the trainer.

    Args:
        slices: For each tensor of the manifest its slice, or `None` for a whole tensor.

    Raises:
        WeightUpdateError: the slices do not fit the manifest.
    """

    def __init__(self, manifest: Manifest, slices: Sequence[Slice | None]) -> None:
        if len(slices) != len(manifest.tensors):
            raise WeightUpdateError(f"the rank named slices of {len(slices)} tensors, of {len(manifest.tensors)}")
        for spec, part in zip(manifest.tensors, slices, strict=True):
            if part is not None:
                _check(spec, part)
        self._slices = slices
        self._whole = manifest.tensors
        self.specs = cut_specs(manifest.tensors, slices)

    def left_of(self, entries: Sequence[BucketEntry]) -> dict[int, BucketEntry]:
        """What is left of the entries of a bucket, by the index of their tensors. Some may have nothing left."""
        left: dict[int, BucketEntry] = {}
        end = 0
        for entry in entries:
            start, nbytes = self._bytes(entry)
            if nbytes or (entry.start == 0 and not self.specs[entry.index].nbytes):
                offset = align(end)
                left[entry.index] = BucketEntry(entry.index, offset, nbytes, start=start)
                end = offset + nbytes
        return left

    def part(self, entry: BucketEntry, rows: torch.Tensor) -> torch.Tensor:
        """The slice of a tensor, or of those of its rows that an entry of the whole manifest describes."""
        import torch

        part = self._slices[entry.index]
        if part is None:
            return rows
        ranges: Iterable[tuple[int, int]] = part.ranges
        if part.dimension == 0:
            first = entry.start // self._whole[entry.index].row_nbytes if entry.start else 0
            ranges = ((low - first, count) for low, count in within(part.ranges, first, len(rows)))
        pieces = [rows.narrow(part.dimension, low, count) for low, count in ranges]
        if len(pieces) == 1:
            return pieces[0]
        return torch.cat(pieces, part.dimension) if pieces else rows.narrow(part.dimension, 0, 0)

    def _bytes(self, entry: BucketEntry) -> tuple[int, int]:
        """The first byte of the cut tensor that an entry of the whole tensor holds, and the number of bytes."""
        part, cut = self._slices[entry.index], self.specs[entry.index]
        if part is None:
            return entry.start, entry.nbytes
        if not cut.nbytes:
            return 0, 0
        row = self._whole[entry.index].row_nbytes
        first, rows = entry.start // row, entry.nbytes // row
        if part.dimension == 0:
            first, rows = count_within(part.ranges, 0, first), count_within(part.ranges, first, rows)
        return first * cut.row_nbytes, rows * cut.row_nbytes


def cut_specs(specs: Sequence[TensorSpec], slices: Sequence[Slice | None]) -> list[TensorSpec]:
    """The tensors that travel."""
    return [
        spec if part is None else msgspec.structs.replace(spec, shape=part.shape(spec.shape))
        for spec, part in zip(specs, slices, strict=True)
    ]


def within(ranges: Iterable[tuple[int, int]], first: int, count: int) -> list[tuple[int, int]]:
    """The parts of ranges that lie among `count` indices from `first` on."""
    cut = [(max(low, first), min(low + length, first + count)) for low, length in ranges]
    return [(low, high - low) for low, high in cut if low < high]


def count_within(ranges: Iterable[tuple[int, int]], first: int, count: int) -> int:
    return sum(length for _, length in within(ranges, first, count))


def _check(spec: TensorSpec, part: Slice) -> None:
    valid = 0 <= part.dimension < len(spec.shape)
    end = -1
    for first, count in part.ranges:
        valid = valid and end < first and count > 0
        end = first + count
    if not valid or end > spec.shape[part.dimension]:
        raise WeightUpdateError(f"the rank named an invalid slice of {spec.name}", name=spec.name)
