"""Parts of tensors that come from where they lie: from each process of a trainer what its shard has of a rank's slices.

A *layout* says which box of a tensor each process holds. It is told to the rank before the first bucket. Both ends then
compute alike, for each bucket of the rank, the *pieces* that each process sends and their places.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import zlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from rl_memory_plugins.errors import WeightUpdateError
from rl_memory_plugins.weights.manifest import ITEMSIZE, BucketEntry, TensorSpec
from rl_memory_plugins.weights.slices import Slice, count_within, cut_specs, within

if TYPE_CHECKING:
    import torch

ALIGNMENT = 16
"""Alignment of a piece within what a process sends, in bytes: suits every dtype."""

MOST_CELLS = 1 << 16
"""The most cells of the grid in which a layout is checked. A peer could choose boxes whose check takes forever."""

Box = tuple[tuple[int, int], ...]
"""For each dimension the first index and the number of indices."""


class Layout(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How a tensor lies over the processes of a trainer: disjoint boxes that make up the whole.

    Attributes:
        holders: The processes that hold a box, each once. Others hold nothing, or replicas.
        boxes: Their boxes, in the same order.
    """

    holders: tuple[int, ...]
    boxes: tuple[Box, ...]

    def box(self, process: int) -> Box | None:
        return self.boxes[self.holders.index(process)] if process in self.holders else None

    def require(self, spec: TensorSpec) -> None:
        """Check that the boxes make up a tensor.

        Raises:
            WeightUpdateError: they overlap, leave something out, reach beyond the tensor, or make up too fine a grid.
        """
        shape = spec.shape
        valid = bool(shape) and len(self.holders) == len(self.boxes) == len(set(self.holders))
        valid = valid and sum(math.prod(count for _, count in box) for box in self.boxes) == math.prod(shape)
        for box in self.boxes:
            valid = valid and len(box) == len(shape)
            valid = valid and all(
                first >= 0 and count >= 0 and first + count <= extent
                for (first, count), extent in zip(box, shape, strict=False)
            )
        if not valid or not _are_disjoint(self.boxes):
            problem = f"the trainer's processes do not hold {spec.name} in disjoint parts"
            raise WeightUpdateError(problem, name=spec.name)


def _are_disjoint(boxes: Sequence[Box]) -> bool:
    """Whether no two boxes of a tensor overlap. Their bounds cut it into the cells of a grid."""
    grid = []  # for each dimension the number of each bound
    for ranges in zip(*boxes, strict=True):
        bounds = sorted({bound for first, count in ranges for bound in (first, first + count)})
        grid.append({bound: number for number, bound in enumerate(bounds)})
    if math.prod(max(len(bounds) - 1, 1) for bounds in grid) > MOST_CELLS:
        return False
    seen: set[tuple[int, ...]] = set()
    for box in boxes:
        within_box = [
            range(bounds[first], bounds[first + count]) for bounds, (first, count) in zip(grid, box, strict=True)
        ]
        for cell in itertools.product(*within_box):
            if cell in seen:
                return False
            seen.add(cell)
    return True


class Layouts(msgspec.Struct, frozen=True, array_like=True):
    """The layouts of all tensors of a manifest. Many tensors share one.

    Attributes:
        different: The layouts.
        of: For each tensor the index of its layout; -1 if one process sends all of it.
    """

    different: list[Layout]
    of: list[int]

    @classmethod
    def made_of(cls, each: Iterable[Layout | None]) -> Layouts:
        """The layouts of tensors in their order; `None` for a tensor that is gathered."""
        known: dict[Layout, int] = {}
        of = [-1 if one is None else known.setdefault(one, len(known)) for one in each]
        return cls(list(known), of)

    def layout(self, index: int) -> Layout | None:
        return None if self.of[index] < 0 else self.different[self.of[index]]

    def holders(self) -> set[int]:
        return {process for layout in self.different for process in layout.holders}

    def require(self, specs: Sequence[TensorSpec]) -> None:
        """Check the layouts of a manifest's tensors.

        Raises:
            WeightUpdateError: one does not fit its tensor.
        """
        if len(self.of) != len(specs) or not all(-1 <= number < len(self.different) for number in self.of):
            raise WeightUpdateError("the trainer's layouts do not belong to its tensors")
        seen: set[tuple[int, tuple[int, ...]]] = set()
        for number, spec in zip(self.of, specs, strict=True):
            if number >= 0 and (number, spec.shape) not in seen:
                seen.add((number, spec.shape))
                self.different[number].require(spec)


class Piece(NamedTuple):
    """What one process sends of the rows of a tensor that a bucket has.

    Attributes:
        packed: Its place among all that the process sends for the bucket.
        entry: The rows, in the rank's bucket.
        region: Its place in these rows; `None` for all of them, from a process that has the whole tensor.
    """

    packed: BucketEntry
    entry: BucketEntry
    region: Box | None


class Pieces:
    """The pieces of one rank.

    Args:
        specs: The tensors of the manifest.
        slices: What the rank needs of each.
        layouts: How they lie over the processes.
    """

    def __init__(self, specs: Sequence[TensorSpec], slices: Sequence[Slice | None], layouts: Layouts) -> None:
        self._slices = slices
        self._layouts = layouts
        self.cut = cut_specs(specs, slices)

    def of_bucket(self, entries: Iterable[BucketEntry], process: int, *, rest: bool) -> list[Piece]:
        """What a process sends for a bucket.

        Args:
            entries: The bucket as the rank gets it, of the cut tensors.
            rest: Whether the process also sends the tensors that have no layout.
        """
        found: list[Piece] = []
        end = 0
        for entry in entries:
            layout, spec = self._layouts.layout(entry.index), self.cut[entry.index]
            region: Box | None = None
            nbytes = entry.nbytes if rest and layout is None else 0
            if layout is not None and entry.nbytes:
                region = self.region(entry, layout.box(process))
                nbytes = 0 if region is None else math.prod(count for _, count in region) * ITEMSIZE[spec.dtype]
            if nbytes:
                offset = -(-end // ALIGNMENT) * ALIGNMENT
                found.append(Piece(BucketEntry(entry.index, offset, nbytes), entry, region))
                end = offset + nbytes
        return found

    def region(self, entry: BucketEntry, box: Box | None) -> Box | None:
        """The place of a box of the whole tensor in the rows of an entry; `None` if it has none of them."""
        if box is None:
            return None
        row = self.cut[entry.index].row_nbytes
        (first, count), *others = self.cut_box(entry.index, box)
        start, rows = entry.start // row, entry.nbytes // row
        low, high = max(first, start), min(first + count, start + rows)
        region = ((low - start, max(high - low, 0)), *others)
        return region if all(length for _, length in region) else None

    def cut_box(self, index: int, box: Box) -> Box:
        """The place of a box of the whole tensor in the cut one."""
        part = self._slices[index]
        if part is None:
            return box
        first, count = box[part.dimension]
        own = count_within(part.ranges, 0, first), count_within(part.ranges, first, count)
        return (*box[: part.dimension], own, *box[part.dimension + 1 :])

    def cut_out(self, piece: Piece, box: Box, held: torch.Tensor) -> torch.Tensor:
        """A piece, of what a process holds.

        Args:
            box: The box of the whole tensor that `held` is.
        """
        import torch

        index, part = piece.entry.index, self._slices[piece.entry.index]
        if part is not None:
            first, count = box[part.dimension]
            ranges = [(low - first, length) for low, length in within(part.ranges, first, count)]
            found = [held.narrow(part.dimension, low, length) for low, length in ranges]
            held = found[0] if len(found) == 1 else torch.cat(found, part.dimension)
        assert piece.region is not None
        low, rows = piece.region[0]
        start = piece.entry.start // self.cut[index].row_nbytes
        return held.narrow(0, start + low - self.cut_box(index, box)[0][0], rows)


def checksum_of(data: torch.Tensor, pieces: Sequence[Piece]) -> int:
    """A hash of what a process sends for a bucket, and of the places where it belongs: 0 <= hash < 2^64.

    Args:
        data: Contiguous bytes, up to the end of the last piece.
    """
    if data.is_cuda:
        from rl_memory_plugins.memory.fingerprint import fingerprint  # imports torch

        of_bytes = fingerprint([data])
    else:
        of_bytes = zlib.crc32(data.numpy())  # on a CPU twice as fast
    places = [(piece.entry, piece.region) for piece in pieces]
    digest = hashlib.blake2b(msgspec.msgpack.encode((of_bytes, places)), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


def turn(process: int, number: int, ranks: int) -> int:
    """In which of its turns a process sends a bucket to a rank.

    Each process begins with another rank. A rank receives in the order of the turns, so no two wait for each other.
    """
    return (number - process) % ranks


def place(rows: torch.Tensor, region: Box | None) -> torch.Tensor:
    """The view of the rows of an entry that a piece fills."""
    for dimension, (first, count) in enumerate(region or ()):
        rows = rows.narrow(dimension, first, count)
    return rows
