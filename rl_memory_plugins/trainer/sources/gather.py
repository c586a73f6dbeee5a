"""Gathers DTensors in batches: with one collective for each tensor, latency takes most of the time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from rl_memory_plugins.trainer.offloading import host_view
from rl_memory_plugins.trainer.sources.outgoing import PLAIN, Outgoing, copy_into

BATCH_BYTES = 64 << 20
"""The most bytes of all ranks in one collective, unless one tensor alone is larger."""

ALIGNMENT = 16  # bytes; suffices for a view as any dtype


def gather_all(named: Iterable[tuple[str, Any]], outgoing: Outgoing) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all tensors in their order, in the dtype in which they are sent. DTensors are gathered.

    All ranks of the meshes must iterate in step. Offloaded tensors are read in host memory. The function holds one
    batch at a time, and one tensor of the batch.
    """
    batch: _Batch | None = None
    for name, tensor in named:
        is_plain = type(tensor) in PLAIN  # the common case with thousands of tensors
        group = None if is_plain else _group(tensor)
        if batch is not None and (group is None or not batch.has_room(name, tensor, group)):
            yield from batch.gather()
            batch = None
        if group is not None:
            batch = batch or _Batch(group, tensor.device_mesh.device_type, outgoing)
            batch.add(name, tensor)
        elif not is_plain and hasattr(tensor, "full_tensor"):
            yield name, _redistributed(name, tensor, outgoing)
        else:
            yield name, outgoing.cast(name, host_view(tensor))
    if batch is not None:
        yield from batch.gather()


def _group(tensor: Any) -> Any:
    """The process group of a DTensor that only one mesh dimension shards, and along dimension 0; else `None`."""
    placements = getattr(tensor, "placements", None)
    if placements is None:
        return None
    from torch.distributed.tensor import Shard

    split = [index for index, placement in enumerate(placements) if not placement.is_replicate()]
    if len(split) != 1 or type(placements[split[0]]) is not Shard or placements[split[0]].dim != 0:
        return None
    return tensor.device_mesh.get_group(split[0])


class _Member(NamedTuple):
    name: str
    tensor: Any
    dtype: torch.dtype  # in which the tensor is sent
    start: int  # the offset in a rank's part of the batch, in bytes
    shard_bytes: int  # of the largest shard


class _Batch:
    """Tensors of any dtypes that are gathered over one group as bytes.

    Shards are padded to the size of the largest. torch shards a dimension into chunks of equal size, then at most one
    smaller chunk, then empty chunks. The padding therefore lies behind all rows of the whole tensor.
    """

    def __init__(self, group: Any, device: str, outgoing: Outgoing) -> None:
        self._group = group
        self._device = device
        self._outgoing = outgoing
        self._ranks = torch.distributed.get_world_size(group)
        self._members: list[_Member] = []
        self._end = 0  # bytes of a rank's part

    def has_room(self, name: str, tensor: Any, group: Any) -> bool:
        same = group is self._group and tensor.device_mesh.device_type == self._device
        return same and self._ranks * (self._end + self._shard_bytes(name, tensor)) <= BATCH_BYTES

    def add(self, name: str, tensor: Any) -> None:
        nbytes = self._shard_bytes(name, tensor)
        self._members.append(_Member(name, tensor, self._outgoing.sent_as(name, tensor.dtype), self._end, nbytes))
        self._end += -(-nbytes // ALIGNMENT) * ALIGNMENT

    def gather(self) -> Iterator[tuple[str, torch.Tensor]]:
        parts = self._parts()
        for member in self._members:
            whole = parts[:, member.start : member.start + member.shard_bytes].reshape(-1).view(member.dtype)
            yield member.name, whole[: member.tensor.numel()].view(member.tensor.shape)

    def _shard_bytes(self, name: str, tensor: Any) -> int:
        """Bytes of the largest shard of a tensor, in the dtype in which the tensor is sent."""
        shape = (-(-tensor.shape[0] // self._ranks), *tensor.shape[1:])
        return int(math.prod(shape) * self._outgoing.sent_as(name, tensor.dtype).itemsize)

    def _parts(self) -> torch.Tensor:
        """The parts of all ranks: uint8, [ranks, bytes]."""
        own = torch.empty(self._end, dtype=torch.uint8, device=self._device)
        for member in self._members:
            part = host_view(member.tensor._local_tensor.detach())
            room = own[member.start : member.start + part.numel() * member.dtype.itemsize]
            copy_into(room.view(member.dtype).view(part.shape), part)
        if self._ranks == 1 or not self._end:
            return own.expand(self._ranks, -1)
        parts = torch.empty(self._ranks * self._end, dtype=torch.uint8, device=self._device)
        all_gather(parts, own, self._group)
        return parts.view(self._ranks, self._end)


def all_gather(parts: torch.Tensor, own: torch.Tensor, group: Any) -> None:
    """Gather the parts of all ranks: `own` has shape [n], `parts` has shape [ranks * n]."""
    renamed = getattr(torch.distributed, "all_gather_single", None)  # in torch 2.13
    (renamed or torch.distributed.all_gather_into_tensor)(parts, own, group=group)


def _redistributed(name: str, tensor: Any, outgoing: Outgoing) -> torch.Tensor:
    """Gather a DTensor with other placements, in a collective of its own."""
    from torch.distributed.tensor import DTensor

    part = outgoing.cast(name, host_view(tensor._local_tensor)).to(tensor.device_mesh.device_type)
    sharded = DTensor.from_local(
        part, tensor.device_mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride(), run_check=False
    )
    whole: torch.Tensor = sharded.full_tensor()
    return whole
