"""The memory that buckets travel in: slots that the trainer fills and the receivers read.

One kind so far, `shm`: anonymous shared memory (`memfd_create`) that is passed as a file descriptor over the
session's socket. It has no name, so nothing is left behind when a process is killed, and it works between
containers that share nothing but the socket.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from rl_memory_plugins.errors import HostMemoryError, UnsupportedError, WeightUpdateError

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class StagingBuffer(Protocol):
    """The trainer's end."""

    def slot(self, index: int) -> torch.Tensor:
        """The bytes of a slot: uint8, `[slot_bytes]`."""

    def export(self) -> tuple[dict[str, Any], list[int]]:
        """What `attach` needs: a description for the message, and descriptors to send beside it."""

    def publish(self) -> None:
        """Wait until what was written to the slots can be read by the other processes."""

    def close(self) -> None: ...


class AttachedBuffer(Protocol):
    """A receiver's end. Tensors of a slot must not outlive `close`."""

    def slot(self, index: int) -> torch.Tensor: ...

    def close(self) -> None: ...


class ShmStaging:
    """Shared memory for `slots` slots. Pages come into being when they are written first.

    Raises:
        HostMemoryError: the memory cannot be had.
    """

    def __init__(self, slot_bytes: int, slots: int) -> None:
        self._description = {"kind": "shm", "slot_bytes": slot_bytes, "slots": slots}
        self._fd = os.memfd_create("rl-memory-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, slot_bytes * slots)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
            self._slots = _map(self._fd, slot_bytes, slots)
        except OSError as error:
            os.close(self._fd)
            raise HostMemoryError(
                f"no shared memory for {slots} slots of {slot_bytes} bytes: {error}",
                needed_bytes=slot_bytes * slots,
            ) from None

    def slot(self, index: int) -> torch.Tensor:
        return self._slots[index]

    def export(self) -> tuple[dict[str, Any], list[int]]:
        return self._description, [self._fd]

    def publish(self) -> None:
        """Copies to host memory have been synchronous."""

    def close(self) -> None:
        self._slots = []
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class ShmAttached:
    def __init__(self, description: dict[str, Any], fds: Sequence[int]) -> None:
        slot_bytes, slots = int(description["slot_bytes"]), int(description["slots"])
        if len(fds) != 1 or os.fstat(fds[0]).st_size != slot_bytes * slots or slot_bytes < 1:
            raise WeightUpdateError("the trainer's shared memory is not what its description says")
        # Without the seals the other side could shrink the file, and reading it would end this process.
        if fcntl.fcntl(fds[0], fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise WeightUpdateError("the trainer's shared memory is not sealed against a change of its size")
        self._slots = _map(fds[0], slot_bytes, slots)

    def slot(self, index: int) -> torch.Tensor:
        return self._slots[index]

    def close(self) -> None:
        self._slots = []


def _map(fd: int, slot_bytes: int, slots: int) -> list[torch.Tensor]:
    # The tensors hold the mapping, which goes when the last of them goes; it is never unmapped under one.
    mapping = mmap.mmap(fd, slot_bytes * slots, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    return list(torch.frombuffer(mapping, dtype=torch.uint8).split(slot_bytes))


def attach(description: dict[str, Any], fds: Sequence[int]) -> AttachedBuffer:
    """Open the trainer's buffer. `fds` stay the caller's to close.

    Raises:
        UnsupportedError: a kind this version does not know.
    """
    if description.get("kind") != "shm":
        raise UnsupportedError(
            f"buffers of kind {description.get('kind')!r} are not supported", allowed=["shm"]
        )
    return ShmAttached(description, fds)


def typed(slot: torch.Tensor, offset: int, nbytes: int, dtype: str, shape: Sequence[int]) -> torch.Tensor:
    """The tensor that lies at `offset` of a slot, as a view."""
    return slot[offset : offset + nbytes].view(getattr(torch, dtype)).view(tuple(shape))
