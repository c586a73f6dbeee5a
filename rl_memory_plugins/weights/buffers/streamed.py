"""`tcp`: the bytes of a bucket follow its message over the connection. The two ends share no memory."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from typing import Any

import torch

from rl_memory_plugins.errors import HostMemoryError, WeightUpdateError
from rl_memory_plugins.weights.buffers.host import ShmStaging
from rl_memory_plugins.weights.manifest import BucketEntry
from rl_memory_plugins.weights.wire import Connection


class StreamedStaging(ShmStaging):
    """Slots on the trainer's host, page-locked if it sends from a GPU. The arguments are those of `ShmStaging`."""

    def __init__(self, slot_bytes: int, slots: int, *, stable: bool = False) -> None:
        super().__init__(slot_bytes, slots, pinned=True, stable=stable)
        self._slot_bytes = slot_bytes

    def export(self) -> tuple[dict[str, Any], list[int]]:
        return {"kind": "tcp", "slot_bytes": self._slot_bytes}, []

    def send(self, connection: Connection, slot: int, entries: Sequence[BucketEntry], timeout_s: float) -> None:
        """Send the bytes of a bucket, after its message. Raises as `Connection.send_bytes` does."""
        connection.send_bytes(_bytes(self._slots[slot], _extent(entries)), timeout_s)


class StreamedAttached:
    """See `attach`. One slot serves for all, because a bucket is loaded before the next one is read."""

    transport = "tcp"
    reused = True
    keep = False

    def __init__(self, description: dict[str, Any]) -> None:
        nbytes = int(description["slot_bytes"])
        if nbytes < 1:
            raise WeightUpdateError("the trainer announced a slot without bytes")
        try:  # the kernel gives a page when its bytes arrive, whatever size the trainer has announced
            mapping = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise HostMemoryError(f"cannot allocate a slot of {nbytes} bytes: {error}", needed_bytes=nbytes) from None
        self._slot = torch.frombuffer(mapping, dtype=torch.uint8)  # owns the mapping

    def receive(self, connection: Connection, entries: Sequence[BucketEntry], timeout_s: float) -> None:
        """Receive the bytes of a bucket, after its message.

        Raises:
            WeightUpdateError: the bucket is larger than the slot, or the trainer stalled or disconnected.
        """
        nbytes = _extent(entries)
        if nbytes > len(self._slot):
            raise WeightUpdateError(
                f"the trainer announced a bucket of {nbytes} bytes; its slots have {len(self._slot)} bytes"
            )
        connection.receive_bytes(_bytes(self._slot, nbytes), timeout_s)

    def memory(self, slot: int, entry: BucketEntry) -> torch.Tensor:
        return self._slot

    def close(self) -> None:
        self._slot = torch.empty(0, dtype=torch.uint8)


def _extent(entries: Sequence[BucketEntry]) -> int:
    """The bytes of a slot up to the end of its last tensor, gaps included. Both ends compute them alike."""
    return max((entry.offset + entry.nbytes for entry in entries), default=0)


def _bytes(slot: torch.Tensor, nbytes: int) -> memoryview:
    """The first bytes of a slot, which must outlive the view."""
    if nbytes <= 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * nbytes).from_address(slot.data_ptr())).cast("B")
