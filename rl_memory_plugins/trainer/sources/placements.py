"""How a DTensor lies over the ranks of its mesh."""

from __future__ import annotations

import itertools
from typing import Any

from rl_memory_plugins.weights.shards import Layout


def is_sharded(tensor: Any) -> bool:
    """Whether a tensor with local parts is a DTensor whose processes hold different ones."""
    placements = getattr(tensor, "placements", ())
    return any(
        extent > 1 and not placement.is_replicate()
        for placement, extent in zip(placements, tensor.device_mesh.mesh.shape if placements else (), strict=True)
    )


def layout_of(tensor: Any, known: dict[Any, Layout | None]) -> Layout | None:
    """The layout of a DTensor over the ranks of `torch.distributed`.

    Along a mesh dimension that replicates it, the first ranks hold it.

    Args:
        known: The layouts of former calls. Many tensors have the same.

    Returns: `None` if the tensor is not sharded, sharded twice along one dimension, or in another way; or if this rank
    holds something else than its placements say.
    """
    key = (id(tensor.device_mesh), tuple(tensor.placements), tuple(tensor.shape), tuple(tensor._local_tensor.shape))
    if key not in known:
        known[key] = _layout_of(tensor)
    return known[key]


def _layout_of(tensor: Any) -> Layout | None:
    import torch.distributed as dist
    from torch.distributed.tensor import Shard

    shape, mesh = tuple(tensor.shape), tensor.device_mesh.mesh
    along: list[int | None] = []  # by dimension of the mesh
    for placement in tensor.placements:
        if not placement.is_replicate() and type(placement) is not Shard:
            return None
        along.append(None if placement.is_replicate() else placement.dim % len(shape))
    split = [dimension for dimension in along if dimension is not None]
    if not split or len(split) != len(set(split)):
        return None
    holders, boxes = [], []
    places = [range(1 if dimension is None else extent) for dimension, extent in zip(along, mesh.shape, strict=True)]
    for place in itertools.product(*places):
        box = [(0, extent) for extent in shape]
        for dimension, number, ranks in zip(along, place, mesh.shape, strict=True):
            if dimension is not None:
                chunk = -(-shape[dimension] // ranks)  # as torch.chunk
                first = min(number * chunk, shape[dimension])
                box[dimension] = first, min(chunk, shape[dimension] - first)
        holders.append(int(mesh[place]))
        boxes.append(tuple(box))
    layout = Layout(tuple(holders), tuple(boxes))
    own = layout.box(dist.get_rank())
    if own is not None and tuple(count for _, count in own) != tuple(tensor._local_tensor.shape):
        return None
    return layout
