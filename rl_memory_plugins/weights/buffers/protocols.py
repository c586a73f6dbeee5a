"""The interfaces of the two ends of a buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from rl_memory_plugins.weights.manifest import BucketEntry, TensorSpec

TRANSPORTS = ("cuda_direct", "cuda_ipc", "nccl", "shm_pinned", "shm", "gloo", "tcp")
"""All transports, the fastest first. `shm` always works over a Unix socket, and `tcp` over a TCP socket."""

SENT = ("nccl", "gloo", "tcp")
"""The transports whose ends share no memory: the trainer sends each bucket after its message."""


class StagingBuffer(Protocol):
    """The trainer's end of a buffer.

    Attributes:
        nbytes: The memory that the buffer takes beside the tensors, in bytes.
    """

    nbytes: int

    def put(self, slot: int, entry: BucketEntry, spec: TensorSpec, tensor: torch.Tensor) -> BucketEntry:
        """Put a tensor, or the rows that `entry` describes, into a slot. Returns their place for the receivers."""

    def export(self) -> tuple[dict[str, Any], list[int]]:
        """The arguments of `attach`: a description to send in a message, and file descriptors to send with it."""

    def publish(self) -> Sequence[Any]:
        """Let other processes read all tensors that were put.

        Returns: CUDA events that must be waited for before; none if nothing is left to wait for.
        """

    def close(self) -> None: ...


class AttachedBuffer(Protocol):
    """A receiver's end of a buffer. Tensors in its memory must not outlive `close`.

    Attributes:
        transport: One of `TRANSPORTS`.
        reused: Whether the trainer writes a slot again after its acknowledgement.
        keep: Whether something of it outlives a complete update: open memory of the trainer, or a communicator.
    """

    transport: str
    reused: bool
    keep: bool

    def memory(self, slot: int, entry: BucketEntry) -> torch.Tensor:
        """The memory that `entry.offset` refers to: uint8, one dimension."""

    def close(self) -> None: ...


def typed(slot: torch.Tensor, offset: int, nbytes: int, dtype: str, shape: Sequence[int]) -> torch.Tensor:
    """A view of the tensor at byte `offset` of a slot."""
    return slot[offset : offset + nbytes].view(getattr(torch, dtype)).view(tuple(shape))
