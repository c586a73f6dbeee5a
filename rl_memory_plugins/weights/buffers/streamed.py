"""`tcp` and `gloo`: slots on both hosts. The two ends share no memory.

With `tcp` the bytes of a bucket follow its message over the connection.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from typing import Any

import torch

from rl_memory_plugins.errors import HostMemoryError, WeightUpdateError
from rl_memory_plugins.memory.host_memory import refusal_of
from rl_memory_plugins.weights.buffers.host import ShmStaging
from rl_memory_plugins.weights.manifest import ALIGNMENT, BucketEntry
from rl_memory_plugins.weights.wire import Bucket, Connection


class StreamedStaging(ShmStaging):
    """Slots on the trainer's host, page-locked if it sends from a GPU. The arguments are those of `ShmStaging`."""

    def __init__(self, slot_bytes: int, slots: int, *, stable: bool = False, kind: str = "tcp") -> None:
        super().__init__(slot_bytes + ALIGNMENT, slots, pinned=True, stable=stable)  # with room for a seal
        self._slot_bytes = slot_bytes
        self._kind = kind

    def export(self) -> tuple[dict[str, Any], list[int]]:
        return {"kind": self._kind, "slot_bytes": self._slot_bytes}, []

    def sent(self, slot: int, entries: Sequence[BucketEntry], seal: bytes = b"") -> torch.Tensor:
        """The bytes of a bucket, followed by `seal`."""
        return sealed(self._slots[slot], entries, seal_of(seal))


class StreamedAttached:
    """See `attach`. One slot serves for all, because a bucket is loaded before the next one is read."""

    transport = "tcp"
    reused = True
    keep = False

    def __init__(self, description: dict[str, Any]) -> None:
        self._slot = host_slot(int(description["slot_bytes"]))

    def receive(self, connection: Connection, bucket: Bucket, timeout_s: float) -> None:
        """Receive the bytes of a bucket, after its message.

        Raises:
            WeightUpdateError: the bucket is larger than the slot, or the trainer stalled or disconnected.
        """
        nbytes = extent(bucket.entries, len(self._slot))
        connection.receive_bytes(memory_of(self._slot[:nbytes]), timeout_s)

    def memory(self, slot: int, entry: BucketEntry) -> torch.Tensor:
        return self._slot

    def close(self) -> None:
        self._slot = torch.empty(0, dtype=torch.uint8, device="cpu")


def require_bytes(nbytes: int) -> None:
    """
    Raises:
        WeightUpdateError: a slot of this size has no bytes.
    """
    if nbytes < 1:
        raise WeightUpdateError("the trainer announced a slot without bytes")


def host_slot(nbytes: int) -> torch.Tensor:
    """A slot in host memory.

    Raises:
        HostMemoryError: there is no memory for it.
        WeightUpdateError: it has no bytes.
    """
    require_bytes(nbytes)
    try:  # the kernel gives a page when its bytes arrive, whatever size the trainer has announced
        mapping = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        why = refusal_of(error) if isinstance(error, OSError) else error
        raise HostMemoryError(f"cannot allocate a slot of {nbytes} bytes: {why}", needed_bytes=nbytes) from None
    return torch.frombuffer(mapping, dtype=torch.uint8)  # owns the mapping


def seal_of(seal: bytes) -> torch.Tensor:
    return torch.tensor(list(seal), dtype=torch.uint8, device="cpu")


def sealed(slot: torch.Tensor, entries: Sequence[BucketEntry], seal: torch.Tensor) -> torch.Tensor:
    """The bytes of a slot up to the end of its last tensor, gaps included, and `seal`. Both ends compute them alike."""
    nbytes = _extent(entries)
    slot[nbytes : nbytes + len(seal)].copy_(seal, non_blocking=True)
    return slot[: nbytes + len(seal)]


def extent(entries: Sequence[BucketEntry], slot_bytes: int) -> int:
    """The bytes of a bucket that the trainer has announced.

    Raises:
        WeightUpdateError: they are more than the slot has.
    """
    nbytes = max(_extent(entries), 0)
    if nbytes > slot_bytes:
        raise WeightUpdateError(f"the trainer announced a bucket of {nbytes} bytes; its slots have {slot_bytes} bytes")
    return nbytes


def _extent(entries: Sequence[BucketEntry]) -> int:
    return max((entry.offset + entry.nbytes for entry in entries), default=0)


def memory_of(data: torch.Tensor) -> memoryview:
    """The bytes of a tensor in host memory, which must outlive the view."""
    if not len(data):
        return memoryview(b"")
    return memoryview((ctypes.c_char * len(data)).from_address(data.data_ptr())).cast("B")
