"""Allocates storages of tensors anew, in groups: moves them into a region of GPU memory, or prepares their return."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from rl_memory_plugins.errors import DeviceMemoryError, UnsupportedError
from rl_memory_plugins.memory.host_memory import free_host_bytes
from rl_memory_plugins.memory.interrupts import to_its_end

if TYPE_CHECKING:
    from rl_memory_plugins.memory.allocator import Allocator

logger = logging.getLogger(__name__)

GROUP_BYTES = 512 << 20
"""Bytes of storages that are allocated together. While they move, they exist three times on the device.

A larger storage does so too if the device has the memory. If not, it moves through host memory, if that suffices.
"""

HOST_MARGIN_BYTES = 256 << 20
"""Bytes of host memory that a move leaves free."""

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
    if storages:
        warn_of_nccl()
    for group in in_groups({storage: storage.nbytes() for storage in storages}):
        allocator.device.trim(GROUP_BYTES)  # torch does not give its cache to a region that runs out of memory
        allocator.device.synchronize()  # another stream may still use the old memory
        _move(allocator, tag, group)
    allocator.device.synchronize()  # other streams may use the tensors from now on


def _move(allocator: Allocator, tag: str, group: list[Any]) -> None:
    sizes = [storage.nbytes() for storage in group]
    needed = sum(sizes)
    # A storage of more than a group is alone in its group.
    by_host = (
        needed > GROUP_BYTES
        and allocator.device.memory_info()[0] < 2 * needed + GROUP_BYTES
        and needed + HOST_MARGIN_BYTES <= free_host_bytes()
    )
    copies: list[torch.Tensor] = []
    try:
        copies = [bytes_of(storage).to("cpu" if by_host else storage.device, copy=True) for storage in group]
        if by_host:
            group[0].resize_(0)
            allocator.device.trim()  # the region takes this memory from the driver
        with allocator.region(tag):
            make_room(sizes, group[0].device)
            for storage, nbytes in zip(group, sizes, strict=True):
                storage.resize_(0)
                storage.resize_(nbytes)
    except torch.OutOfMemoryError as error:
        raise DeviceMemoryError(
            f"too little device memory to move {needed} bytes into the region {tag}: {error}", needed_bytes=needed
        ) from None
    finally:
        to_its_end(lambda: _restore(group, copies))


def _restore(storages: Iterable[Any], copies: Iterable[torch.Tensor]) -> None:
    """Copy the content back. An emptied storage is allocated again. Without copies the storages are as they were."""
    for storage, copy in zip(storages, copies, strict=False):
        if storage.nbytes() != copy.nbytes:  # torch allocates anew for an equal size too, and then outside the region
            storage.resize_(copy.nbytes)
        bytes_of(storage).copy_(copy)


@cache
def _warn_of_nccl() -> None:
    logger.warning(
        "NCCL may register memory of CUDA graphs, and a sleep makes such registrations invalid: set "
        "NCCL_GRAPH_REGISTER=0 before torch.distributed starts"
    )


def warn_of_nccl() -> None:
    """Warn once if NCCL runs in this process and may register memory of CUDA graphs."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    registers = distributed and os.environ.get("NCCL_GRAPH_REGISTER") != "0"
    if registers and "nccl" in torch.distributed.get_backend_config():
        _warn_of_nccl()


def in_groups(sizes: Mapping[Any, int]) -> Iterator[list[Any]]:
    """Split storages, given with their sizes in bytes, into groups of one device and about `GROUP_BYTES`."""
    group: list[Any] = []
    total = 0
    for storage, nbytes in sizes.items():
        if group and (total + nbytes > GROUP_BYTES or storage.device != group[0].device):
            yield group
            group, total = [], 0
        group.append(storage)
        total += nbytes
    if group:
        yield group


def make_room(sizes: Iterable[int], device: torch.device) -> None:
    """Allocate memory for storages of these sizes as one segment, and leave it in torch's cache of GPU memory.

    One segment is allocated, freed and mapped faster than one for each storage.

    Raises:
        torch.OutOfMemoryError: too little device memory.
    """
    if device.type != "cpu":
        nbytes = sum(-(-nbytes // ROUNDING_BYTES) * ROUNDING_BYTES for nbytes in sizes)
        torch.empty(nbytes, dtype=torch.uint8, device=device)


def bytes_of(storage: Any) -> torch.Tensor:
    """A view of a storage as a tensor: uint8, [bytes]."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
