"""The two protocols that memory backends implement: an allocator of pausable regions, and its device.

Four allocators pass one test suite (`tests/unit/memory/test_allocators.py`): `cuda_vmm`, `torch_saver`,
`host` and `fake`. They know tags and blocks; levels, backups and content belong to `memory/manager.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol, runtime_checkable

from rl_memory_plugins.tags import Tag


class Block(NamedTuple):
    """A range of virtual addresses that keeps its address while its memory comes and goes."""

    address: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.address + self.nbytes


class Reservation(Protocol):
    """Physical memory for all released blocks of one tag, obtained but not in use yet.

    Exactly one of `commit` and `drop` is called, once.
    """

    nbytes: int

    blocks: list[Block]
    """The blocks that were released when it was made: those whose content `commit` leaves undefined. Blocks
    that were allocated in the tag since its release are not among them and keep their content."""

    def commit(self) -> None:
        """Put the memory behind the tag's addresses. The content is undefined.

        If it raises, the memory has been given back, as by `drop`.
        """

    def drop(self) -> None:
        """Give the memory back; the tag stays released."""


@runtime_checkable
class Device(Protocol):
    """The device on which an allocator's blocks lie."""

    name: str
    """`"cpu:<rank>"`, or the GPU's UUID as `nvidia-smi -L` prints it (`"GPU-…"`)."""

    def synchronize(self) -> None:
        """Wait until no work that was submitted to the device can touch memory any more."""

    def memory_info(self) -> tuple[int, int]:
        """Free and total bytes of the device."""

    def trim(self, min_bytes: int = 0) -> None:
        """Give back what this process has cached on the device outside of the regions, if that is `worth` bytes."""

    def allocations(self) -> int:
        """Grows whenever anybody in this process allocates on the device."""

    def begin_copy_to_host(self, pairs: Sequence[tuple[Block, int]]) -> Callable[[], None]:
        """Begin to copy each device block to the host address beside it.

        Returns: what waits until all bytes have arrived; called before either side is freed or written to.
        """

    def copy_from_host(self, pairs: Sequence[tuple[Block, int]]) -> None:
        """Copy to each device block from the host address beside it; returns when all bytes have arrived."""

    def fill(self, blocks: Sequence[Block], byte: int) -> None:
        """Set every byte of the blocks."""

    def fingerprint(self, blocks: Sequence[Block]) -> int:
        """A 64-bit hash of the blocks' bytes; it reads the memory once, at the memory's speed."""


class Allocator(Protocol):
    """Pausable regions of memory, by tag."""

    name: str
    maps_zeroed: bool
    """Whether memory reads as zeros when it has just been mapped."""

    @property
    def device(self) -> Device:
        """Where the blocks lie."""

    def region(self, tag: Tag) -> AbstractContextManager[None]:
        """Allocations that this thread makes inside belong to `tag`. Regions nest; the inner one wins."""

    def blocks(self, tag: Tag) -> list[Block]:
        """The tag's live blocks by ascending address, whether resident or released."""

    def unused(self, tag: Tag) -> list[Block]:
        """Parts of the tag's blocks that no tensor lies in, as far as can be known: their content is worth nothing.

        No region of the tag is open.
        """

    def held(self, tag: Tag) -> AbstractContextManager[list[Block]]:
        """The tag's blocks, for reading by another thread: while it is open none of them loses its memory by
        the end of its tensors. `release` still takes it."""

    def residual_memory(self) -> dict[str, int]:
        """What this process holds on the device beside the regions: bytes by cause; what is not known is absent.

        Works while regions are released, takes milliseconds, and never raises.
        """

    def release(self, tag: Tag) -> int:
        """Give the physical memory of all blocks back, keep the addresses. The content is lost.

        The caller has synchronised the device. Releasing a released tag does nothing.

        Returns: the bytes released. If it raises, any part of the blocks may have been released; `reserve`
        then covers exactly that part.
        """

    def reclaim(self) -> None:
        """Do what the next `reserve` would else pay for. Called some time after a `release`, in any thread."""

    def reserve(self, tag: Tag) -> Reservation:
        """Obtain the physical memory that `release` gave back, without using it yet.

        Raises:
            DeviceMemoryError: not enough; nothing was changed.
        """
