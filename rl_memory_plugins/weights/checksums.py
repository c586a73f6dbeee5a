"""Checksums of weights that are equal at the trainer and at the ranks that hold parts of the weights.

The checksum of a tensor is a sum over its elements, modulo 2**64. Each term is a 64-bit mix of the element's bits and
its row-major index, so the checksum depends on the position of every element. The checksums of disjoint regions add up
to that of the tensor: a rank sums the region that it holds, in any layout.
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
"""Elements mixed at a time, at most. About five int64 temporaries of this size exist meanwhile."""
CACHED_ELEMENTS = 1 << 15
"""So many at a time on a CPU with few threads: they stay in its cache, which is four times as fast."""
FEW_THREADS = 4

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MASK = (1 << 64) - 1


def tensor_checksum(tensor: torch.Tensor) -> str:
    """The checksum of a whole tensor: 16 hexadecimal digits. It does not depend on the device or the strides."""
    return _hex(region_checksum(tensor, tensor.shape, row_major(tensor.shape), 0))


def region_checksum(view: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> int:
    """The part of a tensor's checksum that the elements in `view` contribute.

    Args:
        view: The elements, of shape `size`.
        size, stride, offset: The position of the elements in the whole tensor, in elements of its row-major form.
    """
    bits = view.detach().resolve_neg()
    bits = bits.reshape(tuple(size)) if bits.dim() == 0 else bits
    if bits.numel() == 0:
        return 0
    return int(_sum(bits.view(_BITS[bits.element_size()]), tuple(stride), offset).item()) & _MASK


def _sum(bits: torch.Tensor, stride: tuple[int, ...], offset: int) -> torch.Tensor:
    if bits.numel() > _chunk(bits.device):
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


def _chunk(device: torch.device) -> int:
    cached = device.type == "cpu" and torch.get_num_threads() <= FEW_THREADS
    return min(CHUNK_ELEMENTS, CACHED_ELEMENTS) if cached else CHUNK_ELEMENTS


def _mix(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """A 64-bit hash of each value and its index, with the finaliser of splitmix64."""
    mixed = index * signed(GOLDEN) + signed(0xD1B54A32D192ED03)
    return finalise((mixed ^ shifted(mixed, 29)) + values * signed(MIX_1))


def _hex(value: int) -> str:
    return f"{value & _MASK:016x}"


def plan_checksums(plan: LoadPlan) -> dict[str, Any]:
    """This rank's share of the checkpoint's checksums, read from the memory that the plan writes.

    `"regions"` has, for each name, a list of `[offset, size, stride, partial sum]`; `merge_checksums` adds up those of
    all ranks. `"opaque"` lists the names without a checksum: the plan does not replay them, casts them, or copies one
    element to several places.
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
    """The checksums of one engine, merged over all its ranks.

    Attributes:
        layout: `"checkpoint"` after a complete update of which a plan replayed tensors, else `"engine"`.
        tensors: Checksums by name: the checkpoint's names, or in the layout `"engine"` the engine's own as `name@rank`.
        partial: Names of tensors of which the ranks hold only a part, or nothing.
        opaque: Names of tensors that the ranks do not hold as the checkpoint does.
    """

    layout: str
    tensors: dict[str, str]
    partial: list[str] = []
    opaque: list[str] = []


class ReplicaChecksums(Checksums, frozen=True):
    """The checksums of several data-parallel engines, merged and for each engine.

    `tensors` equals the trainer's checksums only if every replica does. If the engines share the experts, `tensors` has
    them too, and the `partial` of each engine names the experts that this engine lacks.

    Attributes:
        differing: Names of tensors whose bytes differ between engines. `tensors` does not have them.
        engines: The checksums of each engine, in the order of engines.
    """

    differing: list[str] = []
    engines: list[Checksums] = []


def merge_engines(engines: Sequence[Sequence[dict[str, Any]]]) -> Checksums:
    """Merge the checksums of all data-parallel engines.

    Args:
        engines: The results of `checksums()` on the ranks of each engine, in the order of engines and of ranks.

    Returns: `ReplicaChecksums` if there are several engines.

    Raises:
        EngineFaultError: ranks of one engine differ (see `merge_checksums`), or engines differ in layout or manifest.
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
    """Merge the results of `checksums()` on the ranks of one engine, in the order of ranks.

    Raises:
        EngineFaultError: the ranks differ in layout, in manifest, or in the bytes of a region that several hold.
    """
    if ranks and all(rank["layout"] == "engine" for rank in ranks):
        return Checksums(
            "engine",
            {f"{name}@{i}": value for i, rank in enumerate(ranks) for name, value in rank["parameters"].items()},
        )
    merged, differing = _merge(ranks)
    for name, number in differing.items():
        raise EngineFaultError(
            f"rank {number} and a rank before it hold different bytes of {name}", name=name, rank=number
        )
    return merged


def _merge(ranks: Sequence[dict[str, Any]]) -> tuple[Checksums, dict[str, int]]:
    """The checksums over all ranks' distinct regions; by name, the first rank that differs from an earlier one."""
    if any(rank["layout"] != "checkpoint" for rank in ranks):
        raise EngineFaultError("some ranks have received a complete update and others have not")
    if len({rank["digest"] for rank in ranks}) > 1:
        raise EngineFaultError("the latest complete updates of the ranks had different manifests")
    opaque = sorted({name for rank in ranks for name in rank["opaque"]})
    numel: dict[str, int] = ranks[0]["numel"] if ranks else {}
    tensors: dict[str, str] = {}
    partial: list[str] = []
    differing: dict[str, int] = {}
    for name in numel:
        if name in opaque:
            continue
        sums: dict[tuple[Any, ...], str] = {}  # by region
        for number, rank in enumerate(ranks):
            for offset, size, stride, value in rank["regions"].get(name, ()):
                if sums.setdefault((offset, tuple(size), tuple(stride)), value) != value:
                    differing.setdefault(name, number)
        if name in differing:
            continue
        if sum(math.prod(size) for _, size, _ in sums) == numel[name]:
            tensors[name] = _hex(sum(int(value, 16) for value in sums.values()))
        else:
            partial.append(name)
    return Checksums("checkpoint", tensors, partial, opaque), differing
