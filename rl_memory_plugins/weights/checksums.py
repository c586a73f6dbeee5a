"""Checksums of weights that come out the same at the trainer and at the ranks that hold parts of them.

A tensor's checksum is the sum, modulo 2**64, over its elements of a 64-bit mix of the element's bits and its
row-major index. So it depends on every element's place, and the sums of disjoint regions add up to the whole:
a rank sums the region of the checkpoint's tensor that it holds, whatever its own layout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from rl_memory_plugins.errors import EngineFaultError
from rl_memory_plugins.memory.splitmix import GOLDEN, MIX_1, finalise, shifted, signed
from rl_memory_plugins.weights.coverage import canonical, row_major
from rl_memory_plugins.weights.plan import LoadPlan
from rl_memory_plugins.weights.trace import CopyStep

CHUNK_ELEMENTS = 1 << 22
"""Elements mixed at once; about five int64 temporaries of this size exist meanwhile."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MASK = (1 << 64) - 1


def tensor_checksum(tensor: torch.Tensor) -> str:
    """The checksum of a whole tensor: 16 hexadecimal digits, the same on any device and for any strides."""
    return _hex(region_checksum(tensor, tensor.shape, row_major(tensor.shape), 0))


def region_checksum(view: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> int:
    """The part of a tensor's checksum that belongs to the elements in `view`.

    `size`, `stride` and `offset` say which elements of the whole tensor they are, in elements of its row-major
    form; `view` has the shape `size`.
    """
    bits = view.detach().reshape(tuple(size)) if view.dim() == 0 else view.detach()
    if bits.numel() == 0:
        return 0
    return int(_sum(bits.view(_BITS[bits.element_size()]), tuple(stride), offset).item()) & _MASK


def _sum(bits: torch.Tensor, stride: tuple[int, ...], offset: int) -> torch.Tensor:
    if bits.numel() > CHUNK_ELEMENTS:
        dim = max(range(bits.dim()), key=lambda d: bits.shape[d])
        half = bits.shape[dim] // 2
        left = _sum(bits.narrow(dim, 0, half), stride, offset)
        rest = bits.narrow(dim, half, bits.shape[dim] - half)
        return left + _sum(rest, stride, offset + half * stride[dim])
    index = torch.full((), offset, dtype=torch.int64, device=bits.device)
    for extent, step in zip(bits.shape, stride, strict=True):
        index = index.unsqueeze(-1) + torch.arange(extent, dtype=torch.int64, device=bits.device) * step
    width = 8 * bits.element_size()
    values = bits.to(torch.int64)
    if width < 64:
        values = values & ((1 << width) - 1)
    return _mix(values, index).sum()


def _mix(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The finaliser of splitmix64 over both."""
    mixed = index * signed(GOLDEN) + signed(0xD1B54A32D192ED03)
    return finalise((mixed ^ shifted(mixed, 29)) + values * signed(MIX_1))


def _hex(value: int) -> str:
    return f"{value & _MASK:016x}"


def plan_checksums(plan: LoadPlan) -> dict[str, Any]:
    """This rank's share of the checkpoint's checksums, read from the memory that the plan writes.

    Per name, a list of `[offset, size, stride, partial sum]`; merge the ranks' with `merge_checksums`.
    Names that are opaque, cast, or written only in part from distinct elements have none: see `"opaque"`.
    """
    regions: dict[str, list[Any]] = {}
    opaque = sorted(plan.opaque)
    for name, steps in plan.steps.items():
        copies = [step for step in steps if isinstance(step, CopyStep)]
        dtype = getattr(torch, plan.specs[name].dtype)
        if any(copy.destination.dtype != dtype or _repeats(copy) for copy in copies):
            opaque.append(name)
            continue
        regions[name] = [
            [
                copy.offset,
                *map(list, canonical(copy.size, copy.stride)),
                _hex(region_checksum(copy.destination, copy.size, copy.stride, copy.offset)),
            ]
            for copy in copies
        ]
    return {
        "layout": "checkpoint",
        "digest": plan.digest,
        "regions": regions,
        "numel": {name: plan.specs[name].numel for name in plan.specs},
        "opaque": opaque,
    }


def _repeats(copy: CopyStep) -> bool:
    return any(extent > 1 and step == 0 for extent, step in zip(copy.size, copy.stride, strict=True))


class Checksums(msgspec.Struct, frozen=True):
    """The checksums of an engine, over all its ranks.

    `tensors` maps names to checksums: the checkpoint's names where `layout` is `"checkpoint"`, else the
    engine's own as `name@rank`. `partial` are names of which no rank, or not all of the tensor, was found.
    """

    layout: str
    tensors: dict[str, str]
    partial: list[str] = []
    opaque: list[str] = []


class ReplicaChecksums(Checksums, frozen=True):
    """The checksums of several data-parallel engines: what all of them say together, and each for itself.

    `tensors` holds what the engines agree on, so it equals the trainer's only where every replica does; names that
    engines hold with different bytes are in `differing`. Where experts are spread over the engines, each engine's
    `partial` names those it has not, and together they are whole.
    """

    differing: list[str] = []
    engines: list[Checksums] = []


def merge_engines(engines: Sequence[Sequence[dict[str, Any]]]) -> Checksums:
    """The checksums of all data-parallel engines, from each one's ranks' `checksums()`, in the order of engines.

    Returns: `ReplicaChecksums` if there are several engines.

    Raises:
        EngineFaultError: as `merge_checksums`, within one engine or between them.
    """
    each = [merge_checksums(ranks) for ranks in engines]
    if len(each) == 1:
        return each[0]
    if {one.layout for one in each} == {"engine"}:
        names = sorted({name for one in each for name in one.tensors})
        found = {name: {one.tensors[name] for one in each if name in one.tensors} for name in names}
        whole = Checksums("engine", {name: min(values) for name, values in found.items() if len(values) == 1})
        differing = [name for name, values in found.items() if len(values) > 1]
    else:
        whole, others = _merge([rank for ranks in engines for rank in ranks])
        differing = list(others)
    return ReplicaChecksums(whole.layout, whole.tensors, whole.partial, whole.opaque, differing, each)


def merge_checksums(ranks: Sequence[dict[str, Any]]) -> Checksums:
    """Add up what one engine's ranks' `checksums()` returned, in the order of ranks.

    Raises:
        EngineFaultError: ranks that hold the same region hold different bytes, or do not have one manifest.
    """
    if ranks and all(rank["layout"] == "engine" for rank in ranks):
        return Checksums(
            "engine",
            {f"{name}@{i}": value for i, rank in enumerate(ranks) for name, value in rank["parameters"].items()},
        )
    merged, differing = _merge(ranks)
    for name, number in differing.items():
        raise EngineFaultError(
            f"rank {number} holds other bytes of {name} than the ranks before it", name=name, rank=number
        )
    return merged


def _merge(ranks: Sequence[dict[str, Any]]) -> tuple[Checksums, dict[str, int]]:
    """The sums over all ranks' distinct regions; and by name, the first rank with other bytes than one before it."""
    if any(rank["layout"] != "checkpoint" for rank in ranks):
        raise EngineFaultError("some ranks have taken an update that others have not")
    if len({rank["digest"] for rank in ranks}) > 1:
        raise EngineFaultError("the ranks' latest updates had different manifests")
    opaque = sorted({name for rank in ranks for name in rank["opaque"]})
    numel: dict[str, int] = ranks[0]["numel"] if ranks else {}
    tensors: dict[str, str] = {}
    partial: list[str] = []
    differing: dict[str, int] = {}
    for name in numel:
        if name in opaque:
            continue
        regions, other = _distinct_regions(name, ranks)
        if other is not None:
            differing[name] = other
        elif sum(math.prod(size) for _, size, _ in regions) == numel[name]:
            tensors[name] = _hex(sum(regions.values()))
        else:
            partial.append(name)
    return Checksums("checkpoint", tensors, partial, opaque), differing


def _distinct_regions(name: str, ranks: Sequence[dict[str, Any]]) -> tuple[dict[tuple[Any, ...], int], int | None]:
    """The sum of each region of a tensor, and the first rank with other bytes of one than a rank before it."""
    regions: dict[tuple[Any, ...], int] = {}
    other: int | None = None
    for number, rank in enumerate(ranks):
        for offset, size, stride, value in rank["regions"].get(name, ()):
            region = (offset, tuple(size), tuple(stride))
            if regions.setdefault(region, int(value, 16)) != int(value, 16) and other is None:
                other = number
    return regions, other
