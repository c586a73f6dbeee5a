"""Moves the storages of existing tensors into a region of GPU memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from rl_memory_plugins.errors import DeviceMemoryError, UnsupportedError

if TYPE_CHECKING:
    from rl_memory_plugins.memory.allocator import Allocator

GROUP_BYTES = 512 << 20
"""Bytes of storages that are moved together. They exist three times meanwhile. Opening a region takes milliseconds."""

ROUNDING_BYTES = 512  # of torch's caching allocator


def move_storages(allocator: Allocator, tag: str, tensors: Iterable[Any]) -> None:
    """Move the tensors' storages into the region of `tag`. Each tensor has a storage of its own.

    A storage is emptied and allocated again, so all tensors and views that share it stay valid.

    Raises:
        UnsupportedError: torch cannot resize a storage, e.g. of memory that other code owns; nothing was moved.
        DeviceMemoryError: too little device memory. The tensors keep their content.
    """
    storages = [tensor.untyped_storage() for tensor in tensors]
    if not all(storage.resizable() for storage in storages):
        raise UnsupportedError("other code owns the memory of a tensor, so it cannot be moved: use Offloader for it")
    for group in _groups(storages):
        sizes = [storage.nbytes() for storage in group]
        allocator.device.trim(GROUP_BYTES)  # torch does not give its cache to a region that runs out of memory
        try:
            copies = [bytes_of(storage).clone() for storage in group]
            allocator.device.synchronize()  # another stream may still use the old memory
            with allocator.region(tag):
                room = torch.empty(sum(map(_rounded, sizes)), dtype=torch.uint8, device=group[0].device)
                del room  # to the region's own cache: emptied storages find room there, in one segment
                for storage, nbytes in zip(group, sizes, strict=True):
                    storage.resize_(0)
                    storage.resize_(nbytes)
        except torch.OutOfMemoryError as error:
            raise DeviceMemoryError(
                f"too little device memory to move {sum(sizes)} bytes into the region {tag}: {error}",
                needed_bytes=sum(sizes),
            ) from None
        for storage, copy in zip(group, copies, strict=True):
            bytes_of(storage).copy_(copy)


def _rounded(nbytes: int) -> int:
    """The bytes that torch allocates for `nbytes`."""
    return -(-nbytes // ROUNDING_BYTES) * ROUNDING_BYTES


def _groups(storages: Iterable[Any]) -> Iterator[list[Any]]:
    group: list[Any] = []
    nbytes = 0
    for storage in storages:
        if group and nbytes + storage.nbytes() > GROUP_BYTES:
            yield group
            group, nbytes = [], 0
        group.append(storage)
        nbytes += storage.nbytes()
    if group:
        yield group


def bytes_of(storage: Any) -> torch.Tensor:
    """A view of a storage as a tensor: uint8, [bytes]."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
