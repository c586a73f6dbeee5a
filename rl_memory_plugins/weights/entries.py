"""The entries of a bucket as a receiver finds them: which tensor is next, and where its bytes lie."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rl_memory_plugins.errors import WeightUpdateError
from rl_memory_plugins.weights.buffers.protocols import typed
from rl_memory_plugins.weights.manifest import ITEMSIZE, BucketEntry, Manifest, TensorSpec

if TYPE_CHECKING:
    import torch


def next_spec(
    entry: BucketEntry, expected: tuple[int, int], manifest: Manifest, slot_bytes: int, **details: Any
) -> TensorSpec:
    """The tensor of an entry that has arrived.

    Args:
        expected: The index of the next tensor, and how many of its bytes have arrived.
        **details: For the error.

    Raises:
        WeightUpdateError: the entry is not the next tensor or its next whole rows, or not inside the slot.
    """
    if (entry.index, entry.start) != expected or entry.index >= len(manifest.tensors):
        raise WeightUpdateError(
            f"the trainer sent tensor {entry.index} out of order: tensor {expected[0]} was next", **details
        )
    spec = manifest.tensors[entry.index]
    nbytes = spec.nbytes
    if (
        not 0 <= entry.nbytes <= nbytes - entry.start
        or (entry.nbytes == 0 and nbytes > 0)
        or (entry.nbytes != nbytes and entry.nbytes % spec.row_nbytes)
        or not 0 <= entry.offset <= slot_bytes - entry.nbytes
        or entry.offset % ITEMSIZE[spec.dtype]
    ):
        raise WeightUpdateError(
            f"the trainer announced an invalid byte range for {spec.name}", name=spec.name, **details
        )
    return spec


def tensor_of(memory: torch.Tensor, entry: BucketEntry, spec: TensorSpec) -> torch.Tensor:
    """A view of the entry: the tensor, or some of its rows."""
    shape = spec.shape
    if entry.nbytes != spec.nbytes:
        shape = (entry.nbytes // spec.row_nbytes, *shape[1:])
    return typed(memory, entry.offset, entry.nbytes, spec.dtype, shape)
