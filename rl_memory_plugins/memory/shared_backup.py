"""A backup of weights whose copy is shared with other processes that hold equal weights."""

from __future__ import annotations

import hashlib
import logging
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence

from rl_memory_plugins.errors import DeviceMemoryError
from rl_memory_plugins.memory.allocator import Allocator, Block, Device
from rl_memory_plugins.memory.arena import STEP_BYTES, PagedArena
from rl_memory_plugins.memory.backup import Backup
from rl_memory_plugins.memory.copies import copies_of
from rl_memory_plugins.memory.preparation import SLEEP, AllocationCancelled, Asked, Caller
from rl_memory_plugins.memory.ranges import intersect, merge, subtract
from rl_memory_plugins.memory.shared_buffer import KEY_BYTES

logger = logging.getLogger(__name__)


class SharedBackup(Backup):
    """A complete backup from the start. `sources` are in the shared buffer, the rest of the blocks in the arena.

    The copy holds whole parameters in the model's order, so it does not depend on their addresses. Memory that is no
    parameter may change with every request and differs between processes, so each process copies it by itself.

    Args:
        sources: The memory of parameters, without overlaps. Parts of them may lie outside the blocks.
        caller: For whom the copy is made.

    Raises:
        HostMemoryError, AllocationCancelled, OSError: see `SharedBuffers.lease`.
        NotShareable: the sources have no fingerprint, or changed while they were copied.
    """

    is_shared = True

    def __init__(
        self,
        arena: PagedArena,
        device: Device,
        blocks: Sequence[Block],
        sources: Sequence[Block],
        epoch: int,
        caller: Caller = SLEEP,
    ) -> None:
        assert arena.shared is not None
        self._shared = arena.shared
        self._sources = list(sources)
        fingerprint = self._identity(device)
        if fingerprint is None:
            raise NotShareable
        super().__init__(arena, subtract(blocks, sources), (), caller)
        self._written = 0
        try:
            address = self._shared.lease(
                key(sources, fingerprint),
                _nbytes(sources),
                lambda to: self._write(device, to, fingerprint, caller.go_on),
                caller,
            )
            if address is None:
                raise NotShareable
        except BaseException:
            super().free()
            raise
        self.blocks = list(blocks)
        self.identified = intersect(blocks, sources)
        self.nbytes = _nbytes(blocks)
        self.epoch, self._fingerprint = epoch, fingerprint
        self._copies = sorted([*self._copies, *_parts(self.identified, copies_of(sources, address))])

    def _write(self, device: Device, address: int, fingerprint: int, go_on: Asked) -> bool:
        """Copy the sources to the host in steps. Returns whether they did not change meanwhile."""
        for step in _steps(copies_of(self._sources, address)):
            if not go_on():
                raise AllocationCancelled
            device.begin_copy_to_host(step)()
        self._written = _nbytes(self._sources)
        return self._identity(device) == fingerprint

    @property
    def fingerprint(self) -> int | None:
        """Not known: that of the sources may cover bytes outside `identified`."""
        return None

    def begin_save(
        self, device: Device, epoch: int, gone: Sequence[Block] = (), unused: Sequence[Block] = (), clean: bool = True
    ) -> int:
        """Start to copy the rest; see `Backup`. The first call reports what the constructor copied as well."""
        assert clean, "the sources of a shared backup have changed"
        written, self._written = self._written, 0
        return written + super().begin_save(device, epoch, gone, unused, clean=True)

    def arrived(self, device: Device, blocks: Sequence[Block]) -> bool:
        if subtract(self.identified, blocks):  # freed since
            return True
        return self._identity(device) in (None, self._fingerprint)

    def _identity(self, device: Device) -> int | None:
        return fingerprint_of(device, self._sources)

    def _release(self) -> None:
        try:
            super()._release()
        finally:
            self._shared.end_lease()


class NotShareable(Exception):
    """The bytes get a copy of their own."""


def share(
    arena: PagedArena,
    device: Device,
    blocks: Sequence[Block],
    sources: Sequence[Block],
    epoch: int,
    caller: Caller = SLEEP,
) -> SharedBackup | None:
    """A shared backup of these blocks; `None` if they need a copy of their own.

    Raises:
        HostMemoryError, AllocationCancelled: see `SharedBuffers.lease`.
    """
    if arena.shared is None or not sources:
        return None
    try:
        return SharedBackup(arena, device, blocks, sources, epoch, caller)
    except NotShareable:
        return None
    except OSError as error:  # a kernel or a container that forbids memfd, or a foreign private directory
        note = f"copies in host memory are not shared with other processes: {error}"
        logger.warning(note)
        arena.notes.append(note)
        arena.shared.free_idle()
        arena.shared = None
        return None


def sources(allocator: Allocator, tag: str, parameters: Iterable[Block]) -> list[Block]:
    """The parameters in the tag's memory, in the model's order, which is the same in every replica."""
    extents = allocator.extents(tag)
    starts = [extent.address for extent in extents]

    def is_inside(block: Block) -> bool:
        at = bisect_right(starts, block.address) - 1
        return at >= 0 and block.end <= extents[at].end

    found = [block for block in dict.fromkeys(parameters) if block.nbytes and is_inside(block)]
    merged = merge(found)
    return found if _nbytes(found) == _nbytes(merged) else merged  # parameters that overlap


def prepare_share(arena: PagedArena, device: Device, sources: Sequence[Block]) -> None:
    """Obtain host memory for a shared copy in the background, if that takes long."""
    fingerprint = fingerprint_of(device, sources) if sources else None
    if arena.shared is not None and fingerprint is not None:
        arena.shared.prepare(key(sources, fingerprint), _nbytes(sources))


def key(sources: Sequence[Block], fingerprint: int) -> bytes:
    """Names the bytes of the sources, whatever their addresses."""
    lengths = array("Q", [fingerprint, *(source.nbytes for source in sources)])
    return hashlib.blake2b(lengths, digest_size=KEY_BYTES).digest()


def fingerprint_of(device: Device, sources: Sequence[Block]) -> int | None:
    try:
        return device.fingerprint(sources)
    except DeviceMemoryError:
        return None


def _parts(parts: Iterable[Block], copies: Sequence[tuple[Block, int]]) -> Iterator[tuple[Block, int]]:
    """The parts, each with the address of its copy. A part ends where its copy does not go on with the next source.

    Args:
        parts: Parts of the sources. A part may span sources that touch.
        copies: The sources, each with the address of its copy.
    """
    copies = sorted(copies)
    starts = [source.address for source, _ in copies]
    for part in parts:
        at = bisect_right(starts, part.address) - 1
        while part.nbytes:
            source, copy = copies[at]
            copy += part.address - source.address
            end = source.end
            while end < part.end and copies[at + 1][1] - copy == end - part.address:
                at, end = at + 1, copies[at + 1][0].end
            piece = Block(part.address, min(part.end, end) - part.address)
            yield piece, copy
            part, at = Block(piece.end, part.end - piece.end), at + 1


def _steps(copies: Iterable[tuple[Block, int]]) -> Iterator[list[tuple[Block, int]]]:
    """The copies in groups of at most `STEP_BYTES`."""
    step: list[tuple[Block, int]] = []
    room = STEP_BYTES
    for block, copy in copies:
        start = 0
        while start < block.nbytes:
            nbytes = min(room, block.nbytes - start)
            step.append((Block(block.address + start, nbytes), copy + start))
            start, room = start + nbytes, room - nbytes
            if not room:
                yield step
                step, room = [], STEP_BYTES
    if step:
        yield step


def _nbytes(blocks: Iterable[Block]) -> int:
    return sum(block.nbytes for block in blocks)
