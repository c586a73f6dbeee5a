"""The manifest of an update: the tensors in order, and the buckets that carry them. Imports no torch."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from rl_memory_plugins.errors import ManifestError
from rl_memory_plugins.weights.recent import Recent

ALIGNMENT = 256
"""Alignment of a tensor within a bucket, in bytes: suits every dtype and vectorised copies."""

MIN_PART = 1 << 20
"""The smallest part of a tensor, in bytes, that fills the rest of a bucket."""

SLOTS = 2
"""The buckets that exist at a time: one is packed while the other is loaded. `routes.PEER_SLOTS` says where it is 3."""

MIN_STAGED_BUCKET_BYTES = 32 << 20
"""The smallest bucket on a GPU that lacks memory for larger ones. Below this size host memory is as fast."""

MOST_BYTES = 1 << 50
"""The largest tensor, in bytes. Buckets of a larger one could not be counted."""

ITEMSIZE: dict[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "uint16": 2,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "uint32": 4,
    "int32": 4,
    "float32": 4,
    "uint64": 8,
    "int64": 8,
    "float64": 8,
}
"""Bytes per element of each dtype that can be sent, by torch's name."""


# gc=False: thousands of tracked objects would trigger the garbage collector
class TensorSpec(msgspec.Struct, frozen=True, array_like=True, gc=False):
    name: str
    dtype: str  # torch's name without the prefix, e.g. "bfloat16"
    shape: tuple[int, ...]
    chosen: bool = False  # the trainer has chosen the dtype: the engine may round the values to its own

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZE[self.dtype]

    @property
    def row_nbytes(self) -> int:
        """Bytes of one row of the first dimension; of the whole tensor if it has no rows."""
        return self.nbytes // self.shape[0] if self.shape and self.shape[0] else self.nbytes


class BucketEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The place of a tensor, or of some of its rows: in a slot, or without staging in an allocation of the trainer."""

    index: int  # into `Manifest.tensors`
    offset: int  # bytes from the start of the slot or allocation
    nbytes: int
    allocation: int = 0  # without staging: index into the allocations of the offer
    start: int = 0  # bytes of the tensor in earlier buckets; whole rows of the first dimension


class Mismatch(msgspec.Struct, frozen=True, omit_defaults=True):
    """One reason why a manifest does not fit the model.

    Attributes:
        kind: `duplicate`, `dtype`, `shape`, `unknown`, `missing`, or `loader` for any other error of the loader.
        name: The name of the tensor; with `missing`, the engine's name of the parameter.
        message: The reason, as text for a person.
        ranks: The ranks that report it; empty if no rank was asked.
        expected: With `dtype`, the dtype of the engine's memory; empty if no rank was asked.
    """

    kind: str
    name: str
    message: str
    ranks: tuple[int, ...] = ()
    expected: str = ""


class _Known(NamedTuple):
    """What follows from a list of tensors."""

    tensors: list[TensorSpec]  # nothing changes this list
    sizes: list[int]
    buckets: dict[tuple[int, bool], list[list[BucketEntry]]]  # by their size and `split`


_recent = Recent[_Known]()


def remembered(tensors: list[TensorSpec]) -> list[TensorSpec]:
    """The same tensors, in a list of which an earlier update has found out what follows from it.

    It takes a sixth of the time to compare thousands of tensors with those of the last update.

    Raises:
        ManifestError: tensors cannot be sent to any model.
    """
    known = _recent.find(lambda one: one.tensors == tensors)
    if known is not None:
        return known.tensors
    tensors = list(tensors)
    mismatches = Manifest(tensors).mismatches()
    if mismatches:
        raise manifest_error(mismatches)
    _recent.add(_Known(tensors, [spec.nbytes for spec in tensors], {}))
    return tensors


def _known(tensors: list[TensorSpec]) -> _Known | None:
    return _recent.find(lambda one: one.tensors is tensors)


class Manifest(msgspec.Struct, frozen=True):
    """The tensors of one update in the order of transfer, each exactly once.

    A *partial* update changes some weights, and needs the others to be valid. A complete update must cover every
    parameter.
    """

    tensors: list[TensorSpec]
    bucket_bytes: int = 256 << 20
    slots: int = SLOTS
    partial: bool = False

    def digest(self) -> str:
        """A hash of the fields that a load plan depends on: `tensors` and `partial`."""
        return hashlib.sha256(msgspec.msgpack.encode((self.tensors, self.partial))).hexdigest()

    def mismatches(self) -> list[Mismatch]:
        """The mismatches that do not depend on the model."""
        found = []
        seen: set[str] = set()
        sound: set[tuple[str, tuple[int, ...]]] = set()  # dtypes and shapes: thousands of tensors have few
        for spec in self.tensors:
            if spec.name in seen:
                found.append(Mismatch("duplicate", spec.name, "the name appears more than once"))
            seen.add(spec.name)
            if (spec.dtype, spec.shape) in sound:
                continue
            before = len(found)
            if spec.dtype not in ITEMSIZE:
                found.append(Mismatch("dtype", spec.name, f"dtype {spec.dtype!r} cannot be sent"))
            if min(spec.shape, default=0) < 0:
                found.append(Mismatch("shape", spec.name, f"shape {list(spec.shape)} has a negative extent"))
            elif spec.dtype in ITEMSIZE and spec.nbytes > MOST_BYTES:
                found.append(Mismatch("shape", spec.name, f"shape {list(spec.shape)} is larger than any memory"))
            if len(found) == before:
                sound.add((spec.dtype, spec.shape))
        return found

    def sizes(self) -> list[int]:
        """The bytes of each tensor."""
        known = _known(self.tensors)
        return [spec.nbytes for spec in self.tensors] if known is None else known.sizes

    def buckets(self, *, split: bool = True) -> list[list[BucketEntry]]:
        """Cut the tensors into buckets of at most `bucket_bytes`, in order.

        A tensor that does not fit into the rest of a bucket continues in the next bucket. It starts in the next bucket
        if its first part would be small. A row that is larger than a bucket gets a bucket of its own. Without `split`,
        tensors are not cut into rows.
        """
        known = _known(self.tensors)
        if known is None:
            return self._cut(split=split)
        key = self.bucket_bytes, split
        if key not in known.buckets:
            known.buckets[key] = self._cut(split=split)
        return known.buckets[key]

    def _cut(self, *, split: bool) -> list[list[BucketEntry]]:
        buckets: list[list[BucketEntry]] = []
        smallest = max(min(MIN_PART, self.bucket_bytes // 4), 1)
        end = 0
        for index, spec in enumerate(self.tensors):
            nbytes, offset = spec.nbytes, align(end)
            if buckets and offset + nbytes <= self.bucket_bytes:  # the common case with thousands of tensors
                buckets[-1].append(BucketEntry(index, offset, nbytes))
                end = offset + nbytes
                continue
            row = max(spec.row_nbytes if split else nbytes, 1)
            start = 0
            while start == 0 or start < nbytes:
                left, offset = nbytes - start, align(end)
                room = self.bucket_bytes - offset if buckets else -1
                part = left if left <= room else room // row * row
                if part < min(smallest, left) or room < 0:
                    buckets.append([])
                    offset, part = 0, min(left, max(self.bucket_bytes // row, 1) * row)
                buckets[-1].append(BucketEntry(index, offset, part, start=start))
                end = offset + part
                start += part
                if part == 0:
                    break
        return buckets

    def slot_bytes(self) -> int:
        """The size of the largest bucket, in bytes, rounded up to `ALIGNMENT`."""
        return largest_bytes(self.buckets())


def largest_bytes(buckets: Sequence[Sequence[BucketEntry]]) -> int:
    """See `Manifest.slot_bytes`."""
    needed = max((bucket[-1].offset + bucket[-1].nbytes for bucket in buckets), default=0)
    return align(max(needed, 1))


def align(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def manifest_error(mismatches: Sequence[Mismatch], unused: Iterable[str] = ()) -> ManifestError:
    """One error for all mismatches. `unused` are names that the model's loader ignored."""
    lines = [f"{m.name}: {m.kind}: {m.message}" for m in mismatches[:5]]
    if len(mismatches) > len(lines):
        lines.append(f"and {len(mismatches) - len(lines)} more")
    return ManifestError(
        f"the manifest does not fit the model in {len(mismatches)} places: " + "; ".join(lines),
        mismatches=msgspec.json.decode(msgspec.json.encode(mismatches)),  # in the form that clients see
        unused=list(unused),
    )
