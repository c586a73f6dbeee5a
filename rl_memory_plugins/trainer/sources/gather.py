"""DTensors made whole, many to one collective: with one each, most of the time is not spent on bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from rl_memory_plugins.trainer.offloading import host_view
from rl_memory_plugins.trainer.sources.outgoing import Outgoing, copy_into

BATCH_BYTES = 64 << 20
"""Of all ranks' parts in one collective, unless one tensor alone has more."""

ALIGNMENT = 16  # every dtype's, for views of bytes


def gather_all(named: Iterable[tuple[str, Any]], outgoing: Outgoing) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors in their order, cast, the DTensors among them gathered. On all ranks of the meshes, in step.

    Offloaded tensors are read where they are. At any time there exist one batch, and one tensor of it.
    """
    batch: _Batch | None = None
    for name, tensor in named:
        group = _group(tensor)
        if batch is not None and (group is None or not batch.has_room(tensor, group, outgoing)):
            yield from batch.gather()
            batch = None
        if group is not None:
            batch = batch or _Batch(group, tensor.device_mesh.device_type)
            batch.add(name, tensor, outgoing)
        elif hasattr(tensor, "full_tensor"):
            yield name, _redistributed(tensor, outgoing)
        else:
            yield name, outgoing.cast(host_view(tensor.detach()))
    if batch is not None:
        yield from batch.gather()


def _group(tensor: Any) -> Any:
    """The process group over which a DTensor is cut along its first dimension; None if it is not just that."""
    placements = getattr(tensor, "placements", None)
    if placements is None:
        return None
    from torch.distributed.tensor import Shard

    cuts = [at for at, placement in enumerate(placements) if not placement.is_replicate()]
    if len(cuts) != 1 or type(placements[cuts[0]]) is not Shard or placements[cuts[0]].dim != 0:
        return None
    return tensor.device_mesh.get_group(cuts[0])


class _Member(NamedTuple):
    name: str
    tensor: Any
    dtype: torch.dtype  # that it is sent in
    start: int  # bytes from the start of a rank's part of the batch
    share: int  # bytes of a rank that has as many rows as any


class _Batch:
    """Tensors whose parts are gathered over one group, as bytes of any dtypes.

    torch cuts a dimension into chunks of the same size and then a smaller one and empty ones, so what pads the
    ranks' parts to one size lies behind all rows of the whole.
    """

    def __init__(self, group: Any, device: str) -> None:
        self._group = group
        self._device = device
        self._ranks = torch.distributed.get_world_size(group)
        self._members: list[_Member] = []
        self._end = 0  # of a rank's part

    def has_room(self, tensor: Any, group: Any, outgoing: Outgoing) -> bool:
        same = group is self._group and tensor.device_mesh.device_type == self._device
        return same and self._ranks * (self._end + _share(tensor, outgoing, self._ranks)) <= BATCH_BYTES

    def add(self, name: str, tensor: Any, outgoing: Outgoing) -> None:
        dtype, share = outgoing.sent_as(tensor.dtype), _share(tensor, outgoing, self._ranks)
        self._members.append(_Member(name, tensor, dtype, self._end, share))
        self._end += -(-share // ALIGNMENT) * ALIGNMENT

    def gather(self) -> Iterator[tuple[str, torch.Tensor]]:
        parts = self._parts()
        for member in self._members:
            part = parts[:, member.start : member.start + member.share].reshape(-1).view(member.dtype)
            yield member.name, part[: member.tensor.numel()].view(member.tensor.shape)

    def _parts(self) -> torch.Tensor:
        """All ranks' parts of the batch: uint8, [ranks, bytes]."""
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


def _share(tensor: Any, outgoing: Outgoing, ranks: int) -> int:
    """Bytes of a rank that has as many rows as any."""
    row: int = math.prod(tensor.shape[1:]) * outgoing.sent_as(tensor.dtype).itemsize
    rows: int = -(-tensor.shape[0] // ranks)
    return rows * row


def all_gather(parts: torch.Tensor, own: torch.Tensor, group: Any) -> None:
    renamed = getattr(torch.distributed, "all_gather_single", None)  # in torch 2.13
    (renamed or torch.distributed.all_gather_into_tensor)(parts, own, group=group)


def _redistributed(tensor: Any, outgoing: Outgoing) -> torch.Tensor:
    """A DTensor that is cut in another way, by itself."""
    from torch.distributed.tensor import DTensor

    part = outgoing.cast(host_view(tensor._local_tensor)).to(tensor.device_mesh.device_type)
    sharded = DTensor.from_local(
        part, tensor.device_mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride(), run_check=False
    )
    made: torch.Tensor = sharded.full_tensor()
    return made
