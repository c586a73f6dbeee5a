"""What a trainer is going to send: the tensors, in order, and the buckets they travel in. Imports no torch."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from rl_memory_plugins.errors import ManifestError

ALIGNMENT = 256
"""Byte alignment of a tensor within a bucket: enough for every dtype and for vectorised copies."""

MIN_PART = 1 << 20
"""Fewer bytes of a tensor are not put into what is left of a bucket."""

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
"""The dtypes that can be sent, under torch's names, and the bytes of one element."""


class TensorSpec(msgspec.Struct, frozen=True, array_like=True, gc=False):  # thousands would set off collections
    name: str
    dtype: str  # torch's name without the prefix, e.g. "bfloat16"
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZE[self.dtype]

    @property
    def row_nbytes(self) -> int:
        """Bytes of one index of the first dimension; of the whole where there is none."""
        return self.nbytes // self.shape[0] if self.shape and self.shape[0] else self.nbytes


class BucketEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where a tensor or some rows of it lie: in a slot, or without staging in one of the trainer's allocations."""

    index: int  # into `Manifest.tensors`
    offset: int  # bytes from the start of the slot or allocation
    nbytes: int
    allocation: int = 0  # without staging, into the allocations of the offer
    start: int = 0  # bytes of the tensor that came in earlier buckets; whole rows of its first dimension


class Mismatch(msgspec.Struct, frozen=True, omit_defaults=True):
    """One reason why a manifest does not fit.

    `kind`: `duplicate`, `dtype`, `shape`, `unknown`, `missing` (then `name` is the engine's own), or `loader`
    for an error of the engine's loader that is none of these.
    """

    kind: str
    name: str
    message: str
    ranks: tuple[int, ...] = ()


class Manifest(msgspec.Struct, frozen=True):
    """All tensors of one update in the order in which they will be sent, each exactly once.

    A *partial* update changes some of the weights and needs the others to be valid; a complete one must cover
    every parameter.
    """

    tensors: list[TensorSpec]
    bucket_bytes: int = 256 << 20
    slots: int = 2
    partial: bool = False

    def digest(self) -> str:
        """Names what a load plan depends on: the tensors and `partial`, not how they are bucketed."""
        return hashlib.sha256(msgspec.msgpack.encode((self.tensors, self.partial))).hexdigest()

    def mismatches(self) -> list[Mismatch]:
        """What is wrong with the manifest whatever the model."""
        found = []
        seen: set[str] = set()
        for spec in self.tensors:
            if spec.name in seen:
                found.append(Mismatch("duplicate", spec.name, "the name appears more than once"))
            seen.add(spec.name)
            if spec.dtype not in ITEMSIZE:
                found.append(Mismatch("dtype", spec.name, f"dtype {spec.dtype!r} cannot be sent"))
            if min(spec.shape, default=0) < 0:
                found.append(Mismatch("shape", spec.name, f"shape {list(spec.shape)} has a negative extent"))
        return found

    def buckets(self, *, split: bool = True) -> list[list[BucketEntry]]:
        """Cut the tensors into buckets of at most `bucket_bytes`, in order.

        A tensor that does not fit into what is left of a bucket is continued in the next one, unless the part
        would be small. A single row, and without `split` a tensor, that is larger than a bucket gets a bucket
        of its own.
        """
        buckets: list[list[BucketEntry]] = []
        smallest = max(min(MIN_PART, self.bucket_bytes // 4), 1)
        end = 0
        for index, spec in enumerate(self.tensors):
            nbytes, offset = spec.nbytes, align(end)
            if buckets and offset + nbytes <= self.bucket_bytes:  # nearly all, where there are thousands
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
        """Bytes that hold any one bucket."""
        needed = max((bucket[-1].offset + bucket[-1].nbytes for bucket in self.buckets()), default=0)
        return align(max(needed, 1))


def align(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def manifest_error(mismatches: Sequence[Mismatch], unused: Iterable[str] = (), **details: Any) -> ManifestError:
    """One error that lists everything; `unused` are names that the model's loader ignored."""
    unused = list(unused)
    lines = [f"{m.name}: {m.kind}: {m.message}" for m in mismatches[:5]]
    if len(mismatches) > len(lines):
        lines.append(f"and {len(mismatches) - len(lines)} more")
    return ManifestError(
        f"the manifest does not fit the model in {len(mismatches)} places: " + "; ".join(lines),
        mismatches=msgspec.json.decode(msgspec.json.encode(mismatches)),  # as it will look to any client
        unused=unused,
        **details,
    )
