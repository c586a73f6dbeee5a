"""Allocates storages of tensors anew, in groups: moves them into a region of GPU memory, or prepares their return."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from rl_memory_plugins.errors import DeviceMemoryError, UnsupportedError
from rl_memory_plugins.memory.emptied import HostCopy, host_copies, nbytes_left_by_move
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

RETURN_S = 5.0
"""How long a storage that cannot move waits for memory to return to, which other processes may have taken."""
POLL_S = 0.1

ROUNDING_BYTES = 512  # of torch's caching allocator


def move_storages(
    allocator: Allocator,
    tag: str,
    tensors: Iterable[Any],
    region: Callable[[str], AbstractContextManager[None]] | None = None,
) -> None:
    """Move the tensors' storages into the region of `tag`. Each tensor has a storage of its own.

    A storage is emptied and allocated again, so all tensors and views that share it stay valid. A storage that an
    earlier move has left empty gets its content back.

    Args:
        region: Opens the region of a tag, for each group of storages; `allocator.region` by default.

    Raises:
        UnsupportedError: torch cannot resize a storage, e.g. of memory that other code owns; nothing was moved.
        DeviceMemoryError: too little device memory. The tensors keep their content, on the device or, if other
            processes take the memory meanwhile, in `host_copies`: the error has `in_host_memory_bytes` then.
    """
    storages = [tensor.untyped_storage() for tensor in tensors]
    if not all(storage.resizable() for storage in storages):
        raise UnsupportedError("other code owns the memory of a tensor, so it cannot be moved: use Offloader for it")
    if storages:
        warn_of_nccl()
    for group in in_groups({storage: _nbytes(storage) for storage in storages}):
        allocator.device.trim(GROUP_BYTES)  # torch does not give its cache to a region that runs out of memory
        allocator.device.synchronize()  # another stream may still use the old memory
        _move(allocator, tag, group, region or allocator.region)
    allocator.device.synchronize()  # other streams may use the tensors from now on


def _move(
    allocator: Allocator, tag: str, group: list[Any], region: Callable[[str], AbstractContextManager[None]]
) -> None:
    sizes = [_nbytes(storage) for storage in group]
    needed = sum(sizes)
    # A storage of more than a group is alone in its group.
    by_host = (
        needed > GROUP_BYTES
        and allocator.device.memory_info()[0] < 2 * needed + GROUP_BYTES
        and needed + HOST_MARGIN_BYTES <= free_host_bytes()
    )
    copies: list[torch.Tensor] = []
    try:
        copies = [_copy_of(storage, by_host) for storage in group]
        if by_host:
            group[0].resize_(0)
            allocator.device.trim()  # the region takes this memory from the driver
        with region(tag):
            make_room(sizes, group[0].device)
            for storage, nbytes in zip(group, sizes, strict=True):
                storage.resize_(0)
                storage.resize_(nbytes)
    except torch.OutOfMemoryError as error:
        raise DeviceMemoryError(
            f"too little device memory to move {needed} bytes into the region {tag}: {error}", needed_bytes=needed
        ) from None
    finally:
        deadline = time.monotonic() + RETURN_S
        to_its_end(lambda: _restore(allocator, tag, group, copies, deadline))


def _nbytes(storage: Any) -> int:
    return storage.nbytes() or nbytes_left_by_move(storage)


def _copy_of(storage: Any, by_host: bool) -> torch.Tensor:
    if nbytes_left_by_move(storage):
        content: torch.Tensor = host_copies[storage].content
        return content
    return bytes_of(storage).to("cpu" if by_host else storage.device, copy=True)


def _restore(allocator: Allocator, tag: str, storages: list[Any], copies: list[torch.Tensor], deadline: float) -> None:
    """Copy the content back. An emptied storage is allocated again. Without copies the storages are as they were.

    Raises:
        DeviceMemoryError: a storage stays empty. Its content is in `host_copies`.
    """
    left = 0
    for number, storage in enumerate(storages[: len(copies)]):
        nbytes = copies[number].nbytes
        if storage.nbytes() != nbytes:  # torch allocates anew for an equal size too, and then outside the region
            try:
                storage.resize_(nbytes)
            except torch.OutOfMemoryError:
                host_copies[storage] = HostCopy(copies[number])  # outlives this call, however that ends
                with suppress(RuntimeError):  # too little host memory
                    copies[number] = copies[number].cpu()  # a copy on the device may hold the memory that lacks
                    host_copies[storage] = HostCopy(copies[number])
                if not _regain(allocator, storage, nbytes, deadline):
                    left += nbytes
                    continue
        bytes_of(storage).copy_(copies[number])
        host_copies.pop(storage, None)
    if left:
        raise DeviceMemoryError(
            f"too little device memory to move tensors into the region {tag}, and other code has taken the memory that "
            f"they had: {left} bytes of them are in host memory, and must not be used in computations. Free device "
            "memory, then adopt the tensors again, or call Offloader(tensors).load()",
            needed_bytes=left,
            in_host_memory_bytes=left,
        )


def _regain(allocator: Allocator, storage: Any, nbytes: int, deadline: float) -> bool:
    """Give an emptied storage its memory again, as soon as there is so much."""
    while True:
        allocator.device.trim()
        with suppress(torch.OutOfMemoryError):
            storage.resize_(nbytes)
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)


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
