"""The two ends of the memory that weights travel in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from rl_memory_plugins.weights.manifest import BucketEntry, TensorSpec

TRANSPORTS = ("cuda_direct", "cuda_ipc", "shm_pinned", "shm")
"""From the fastest to the one that always works."""


class StagingBuffer(Protocol):
    """The trainer's end.

    Attributes:
        nbytes: Of the memory that it takes beside the tensors.
    """

    nbytes: int

    def put(self, slot: int, entry: BucketEntry, spec: TensorSpec, tensor: torch.Tensor) -> BucketEntry:
        """Place a tensor, or the rows of it that `entry` is; returns where the receivers find them."""

    def export(self) -> tuple[dict[str, Any], list[int]]:
        """What `attach` needs: a description for the message, and descriptors to send beside it."""

    def publish(self) -> None:
        """Wait until what was put can be read by the other processes."""

    def close(self) -> None: ...


class AttachedBuffer(Protocol):
    """A receiver's end. Tensors in its memory must not outlive `close`.

    Attributes:
        transport: One of `TRANSPORTS`.
        reused: Whether the trainer writes a slot again once it is acknowledged.
    """

    transport: str
    reused: bool

    def memory(self, slot: int, entry: BucketEntry) -> torch.Tensor:
        """The bytes that `entry.offset` counts in: uint8, of one dimension."""

    def close(self) -> None: ...


def typed(slot: torch.Tensor, offset: int, nbytes: int, dtype: str, shape: Sequence[int]) -> torch.Tensor:
    """The tensor that lies at `offset` of a slot, as a view."""
    return slot[offset : offset + nbytes].view(getattr(torch, dtype)).view(tuple(shape))
