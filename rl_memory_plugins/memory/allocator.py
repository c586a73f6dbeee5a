"""The two protocols of a memory backend: an allocator of pausable regions, and its device.

Four allocators pass one test suite (`tests/unit/memory/test_allocators.py`): `cuda_vmm`, `torch_saver`, `host` and
`fake`. An allocator knows tags and blocks; levels, backups and content belong to `memory/manager.py`. A
tag is any name: engines use those of `tags.Tag`, trainers their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Protocol, runtime_checkable

from rl_memory_plugins.errors import DeviceMemoryError, UnsupportedError


class Block(NamedTuple):
    """A range of virtual addresses. Its address stays while its physical memory is released and mapped again."""

    address: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.address + self.nbytes


def out_of_device_memory(
    message: str, free: int, *, needed: int = 0, margin: int = 0, **details: Any
) -> DeviceMemoryError:
    """The error of an allocation. `needed`, `free` and `margin` are in bytes."""
    return DeviceMemoryError(message, needed_bytes=needed, free_bytes=free, margin_bytes=margin, **details)


def too_little_for_wake(needed: int, free: int, margin: int, memory: str = "GPU memory") -> DeviceMemoryError:
    """The error of a reservation. `needed`, `free` and `margin` are in bytes."""
    message = f"a wake needs {needed} bytes of {memory} and a margin of {margin}, but only {free} are free"
    return out_of_device_memory(message, free, needed=needed, margin=margin)


class Reservation(Protocol):
    """Physical memory for all released blocks of one tag, obtained and not yet mapped.

    The caller calls either `commit` or `drop`, once.
    """

    nbytes: int

    blocks: list[Block]
    """The blocks that were released when the reservation was made. `commit` leaves their content undefined. Blocks that
    were allocated in the tag after its release are not included and keep their content."""

    def commit(self) -> None:
        """Map the memory at the tag's addresses. The content is undefined. On an error the memory is freed, as by
        `drop`.
        """

    def drop(self) -> None:
        """Free the memory. The tag stays released."""


@runtime_checkable
class Device(Protocol):
    """The device that holds an allocator's blocks. A subclass inherits the methods with a body."""

    name: str
    """`"cpu:<rank>"`, or the GPU's UUID as `nvidia-smi -L` prints it (`"GPU-…"`)."""

    def synchronize(self) -> None:
        """Wait for all work that was submitted to the device."""
        return

    def memory_info(self) -> tuple[int, int]:
        """Free and total bytes of the device."""

    def trim(self, min_bytes: int = 0) -> None:
        """Free this process's cached device memory outside the regions, if at least `min_bytes` may be freed."""
        return

    def allocations(self) -> int:
        """A counter that grows with each allocation of this process on the device."""
        return 0

    def begin_copy_to_host(self, pairs: Sequence[tuple[Block, int]]) -> Callable[[], None]:
        """Start to copy each device block to the host address in its pair.

        Returns: a function that waits for the copies. Call it before either side is freed or written to.
        """

    def begin_copy_from_host(self, pairs: Sequence[tuple[Block, int]]) -> Callable[[], None]:
        """Start to copy to each device block from the host address in its pair.

        Returns: a function that waits for the last byte. Call it before either side is used or freed.
        """

    def fill(self, blocks: Sequence[Block], byte: int) -> None:
        """Set every byte of the blocks to `byte`."""

    def fingerprint(self, blocks: Sequence[Block]) -> int:
        """A 64-bit hash of the blocks' bytes. Reads the memory once."""


class Allocator(Protocol):
    """Pausable regions of memory, by tag. A subclass inherits the methods with a body.

    Attributes:
        device: The device that holds the blocks.
        maps_zeroed: Whether newly mapped memory reads as zeros.
        keeps_freed: Whether the memory of a tensor that has ended stays until `free_unused` or a later region.
    """

    name: str
    device: Device
    maps_zeroed: bool
    keeps_freed: bool = False

    def region(self, tag: str) -> AbstractContextManager[None]:
        """Allocations of this thread inside the context belong to `tag`. Regions nest; the inner region wins."""

    def blocks(self, tag: str) -> list[Block]:
        """The tag's live blocks, resident or released, by ascending address."""

    def extents(self, tag: str) -> list[Block]:
        """The memory of the tag's tensors, by ascending address: its blocks, and parts that no `release` frees."""
        return self.blocks(tag)

    def adopt(self, tag: str, tensors: Iterable[Any]) -> None:
        """Assign the storages of existing tensors to `tag`. Each tensor has a storage of its own.

        On a GPU the storages move into the tag's memory: their addresses change, and tensor objects and views stay.

        Raises:
            DeviceMemoryError: too little device memory to move a storage. Earlier storages were moved; all keep their
                content.
        """
        raise UnsupportedError(f"the {self.name} allocator adopts no tensors", allocator=self.name)

    def unused(self, tag: str) -> list[Block]:
        """The known parts of the tag's blocks that hold no tensor, and need no copy. No region of the tag is open."""
        return []

    def is_used(self, tag: str) -> bool:
        """Whether a tensor is in the tag's blocks, resident or released."""
        return bool(self.blocks(tag))

    def free_unused(self, tag: str) -> None:
        """Free the memory of a resident tag that holds no tensor, and keep none of it for later regions."""
        return

    @contextmanager
    def held(self, tag: str) -> Iterator[list[Block]]:
        """The tag's blocks, for a reader in another thread. While the context is open, the end of a tensor does not
        unmap its block; `release` still does."""
        yield self.blocks(tag)

    def residual_memory(self) -> dict[str, int]:
        """Bytes that this process holds on the device outside the regions, by cause. Unknown causes are absent.

        Works while regions are released, takes milliseconds, and never raises.
        """
        return {}

    def release(self, tag: str) -> int:
        """Free the physical memory of all blocks and keep their addresses. The content is lost.

        The caller has synchronised the device. Releasing a released tag does nothing.

        Returns: the bytes released. After an error, any part of the blocks may have been released; `reserve` then
        covers exactly that part.
        """

    def reclaim(self) -> None:
        """Finish the work of `release` that would slow the next `reserve`. Called some time after a `release`, in any
        thread."""
        return

    def reserve(self, tag: str) -> Reservation:
        """Obtain physical memory for the tag's released blocks, and do not map it yet.

        Raises:
            DeviceMemoryError: the device has too little free memory; nothing was changed.
        """
