"""Host copies of device memory: the arena they lie in, and the backups themselves."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple, Protocol

from rl_memory_plugins.errors import DeviceMemoryError, HostMemoryError
from rl_memory_plugins.memory.allocator import Block, Device
from rl_memory_plugins.memory.ranges import subtract

ALIGNMENT = 4096
#: How many times larger than needed an idle buffer may be: one for all weights must not go to the scraps of a cache,
#: or else the weights need another.
WASTE = 2
#: Bytes that are copied between two looks at whether to go on; a few milliseconds' worth.
STEP_BYTES = 256 << 20
#: Unused parts that are smaller are copied like what lies around them: that takes less time than to copy in pieces.
MIN_LEFT_OUT = 1 << 20


class HostArena(Protocol):
    """Host memory for backups, kept across cycles so that no sleep but the first pays for making it.

    Attributes:
        notes: What it cannot do, for `memory_status`.
    """

    notes: list[str]

    @property
    def held_bytes(self) -> int:
        """Bytes the arena occupies now, used or not."""

    def acquire(self, nbytes: int) -> int:
        """The address of `nbytes` of host memory.

        Raises:
            HostMemoryError: the arena's bound or the free host memory does not allow it; nothing was changed.
        """

    def prepare(self, sizes: Sequence[int]) -> object:
        """Make buffers of these sizes in the background, where making them takes long."""

    def release(self, address: int) -> None:
        """Hand a buffer back to the arena, which may keep it for the next `acquire`."""


def free_host_bytes() -> int:
    """Host memory this process can still get: the machine's, or its cgroup's where that is less."""
    return host_memory_info()[0]


def host_memory_info() -> tuple[int, int]:
    """Free and total bytes of host memory, each the least of the machine's and its cgroups'."""
    free, total = _machine_memory()
    for directory, files in _memory_cgroups():
        try:
            usage = int((directory / files.usage).read_text())
            statistics = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # no such file
            continue
        # Pages of files that were read, such as a checkpoint, count as usage; the kernel drops them at need.
        cached = sum(int(statistics.get(key, 0)) for key in files.cached)
        for name in files.limits:
            try:
                limit = int((directory / name).read_text())
            except (OSError, ValueError):  # no such file, or "max": no limit
                continue
            free = min(free, limit - usage + cached)
            total = min(total, limit)
    return max(free, 0), total


def _machine_memory() -> tuple[int, int]:
    """Free and total bytes of the machine's memory, as the kernel counts them."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available, total = (int(lines[name].split()[0]) << 10 for name in ("MemAvailable", "MemTotal"))
    return available, total


class _Files(NamedTuple):
    """Of a memory cgroup: what its limits and its usage stand in, and what its statistics call cached files."""

    limits: tuple[str, ...]
    usage: str
    cached: tuple[str, ...]


#: Beyond `memory.high` a process goes on, so slowly that it seems to hang.
_CGROUP_V2 = _Files(("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file"))
_CGROUP_V1 = _Files(("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))


def _memory_cgroups() -> Iterator[tuple[Path, _Files]]:
    """The directories of this process's memory cgroup and all its parents, with the names of their files.

    In a container `/proc/self/cgroup` may show the host's path, which does not exist inside: then only the
    root of the mount, which is the container's own cgroup, is left of it.
    """
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = Path("/sys/fs/cgroup"), _CGROUP_V2
        elif "memory" in controllers.split(","):
            root, names = Path("/sys/fs/cgroup/memory"), _CGROUP_V1
        else:
            continue
        own = Path(path.lstrip("/"))
        for part in (own, *own.parents):
            yield root / part, names


class PagedArena:
    """An arena of anonymous mappings; freed buffers are kept and reused by best fit.

    Args:
        max_bytes: bound on what the arena holds; 0 means only free host memory bounds it.
        margin_bytes: host memory that must stay free after an `acquire`.
    """

    def __init__(self, max_bytes: int = 0, margin_bytes: int = 0) -> None:
        self.notes: list[str] = []
        self._max_bytes = max_bytes
        self._margin_bytes = margin_bytes
        self._mappings: dict[int, mmap.mmap] = {}
        self._idle: set[int] = set()
        self._lock = threading.Lock()

    @property
    def held_bytes(self) -> int:
        return sum(len(mapping) for mapping in list(self._mappings.values()))  # another thread may be adding one

    def acquire(self, nbytes: int) -> int:
        nbytes = max(-(-nbytes // ALIGNMENT) * ALIGNMENT, ALIGNMENT)
        with self._lock:
            fitting = self._smallest_idle(nbytes)
            if fitting is not None and len(self._mappings[fitting]) <= WASTE * nbytes:
                self._idle.remove(fitting)
                return fitting
            # Idle buffers that are too small only stand in the way of a larger one.
            self._trim([address for address in self._idle if len(self._mappings[address]) < nbytes])
            try:
                with self._taking_turns():
                    return self._make(nbytes)
            except HostMemoryError:
                if fitting is None:
                    raise
                self._idle.remove(fitting)
                return fitting

    def _make(self, nbytes: int) -> int:
        self._check(nbytes)
        try:
            mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise self._error(nbytes, free_host_bytes()) from error
        self._prepare(mapping)
        address = address_of(mapping)
        self._mappings[address] = mapping
        return address

    def _smallest_idle(self, nbytes: int) -> int | None:
        fitting = [address for address in self._idle if len(self._mappings[address]) >= nbytes]
        return min(fitting, key=lambda address: len(self._mappings[address]), default=None)

    def prepare(self, sizes: Sequence[int]) -> object:
        return None  # pageable memory is made as it is touched

    def release(self, address: int) -> None:
        with self._lock:
            if address in self._mappings:
                self._idle.add(address)

    def close(self) -> None:
        """Give everything back; buffers still in use become invalid."""
        with self._lock:
            self._idle = set(self._mappings)
            self._trim(list(self._idle))

    def _trim(self, addresses: Sequence[int]) -> None:
        for address in addresses:
            self._idle.remove(address)
            self._discard(address, self._mappings.pop(address))

    def _check(self, nbytes: int) -> None:
        free = free_host_bytes()
        allowed = self._max_bytes - self.held_bytes + self._margin_bytes if self._max_bytes else free
        if nbytes + self._margin_bytes > min(free, allowed):
            what = "allowed by host_arena_max_bytes" if allowed < free else "free"
            raise self._error(nbytes, min(free, allowed), what)

    def _error(self, needed: int, free: int, what: str = "free") -> HostMemoryError:
        usable = max(free - self._margin_bytes, 0)
        return HostMemoryError(
            f"{needed} bytes of host memory are needed for the backup, {usable} are {what}",
            needed_bytes=needed,
            free_bytes=max(free, 0),
            margin_bytes=self._margin_bytes,
        )

    def _taking_turns(self) -> AbstractContextManager[None]:
        """For arenas that fill their pages: the ranks of a host must see what the others have taken."""
        return nullcontext()

    def _prepare(self, mapping: mmap.mmap) -> None:
        """For arenas that pin their pages."""

    def _discard(self, address: int, mapping: mmap.mmap) -> None:
        mapping.close()


def address_of(mapping: mmap.mmap) -> int:
    """The address of a writable mapping, without keeping its buffer exported."""
    anchor = ctypes.c_char.from_buffer(mapping)
    try:
        return ctypes.addressof(anchor)
    finally:
        del anchor


class Backup:
    """The bytes of some device blocks in host memory.

    A backup remembers the content epoch and the fingerprint of what it copied. It is clean, and need not be
    copied again, only while both still hold: the epoch tells of changes through this package, the fingerprint
    of those made behind its back, by an engine's or a trainer's own code.

    Args:
        identified: The part of the blocks that is fingerprinted. The rest, of which an engine may change something
            with every request, is copied again by `refresh` before a clean backup is used.
    """

    def __init__(self, arena: HostArena, blocks: Sequence[Block], identified: Sequence[Block] = ()) -> None:
        self.identified = list(identified)
        self._arena = arena
        self.blocks = list(blocks)
        self.nbytes = sum(block.nbytes for block in blocks)
        self.epoch = -1
        self._fingerprint: int | None = None
        self._left_out: list[Block] = []
        self._wait: Callable[[], None] | None = None  # for a copy that is under way
        self._address = arena.acquire(self.nbytes) if self.nbytes else 0

    def _leave_out(self, unused: Sequence[Block]) -> None:
        large = [block for block in unused if block.nbytes >= MIN_LEFT_OUT]
        self._left_out = subtract(large, self.identified)

    def _pairs(self, gone: Sequence[Block] = ()) -> list[tuple[Block, int]]:
        """Each block that lies in none of `gone`, with the address of its copy."""
        pairs: list[tuple[Block, int]] = []
        offset = self._address
        pieces = iter([*subtract(self.blocks, gone), None])  # in the order of the blocks, each inside of one
        piece = next(pieces)
        for block in self.blocks:
            while piece is not None and block.address <= piece.address < block.end:
                pairs.append((piece, offset + piece.address - block.address))
                piece = next(pieces)
            offset += block.nbytes
        return pairs

    def begin_save(self, device: Device, epoch: int, gone: Sequence[Block] = (), unused: Sequence[Block] = ()) -> int:
        """Begin to copy the blocks out; until `finish` or `free` they must stay as they are.

        Args:
            gone: Parts of them that have been freed since the backup was made.
            unused: Parts whose content is worth nothing; `restore` leaves them out too.

        Returns: the bytes.
        """
        self._leave_out(unused)
        pairs = self._pairs([*gone, *self._left_out])
        self._fingerprint = None
        self._wait = device.begin_copy_to_host(pairs)
        if self.identified and not gone:
            self._fingerprint = self._identity(device)
        self.epoch = epoch
        return sum(block.nbytes for block, _ in pairs)

    def finish(self) -> None:
        """Wait for the copy that has begun, if any."""
        wait, self._wait = self._wait, None
        if wait is not None:
            wait()

    def save_in_steps(self, device: Device, epoch: int, go_on: Callable[[], bool]) -> bool:
        """Copy the blocks out while somebody may be writing to them.

        Args:
            go_on: Asked between steps; if it says no, the copy is given up.

        Returns: whether this is a copy of one state of the blocks. If not, the backup is never clean.
        """
        self._fingerprint, self._left_out = None, []
        before = self._identity(device)
        for block, address in self._pairs():
            for start in range(0, block.nbytes, STEP_BYTES):
                if not go_on():
                    return False
                step = Block(block.address + start, min(STEP_BYTES, block.nbytes - start))
                device.begin_copy_to_host([(step, address + start)])()
        if not go_on() or before is None or self._identity(device) != before:
            return False
        self._fingerprint, self.epoch = before, epoch
        return True

    def begin_refresh(self, device: Device, gone: Sequence[Block] = (), unused: Sequence[Block] = ()) -> int:
        """Begin to copy out again what is not identified; see `begin_save`."""
        self._leave_out(unused)
        pairs = self._pairs([*self.identified, *gone, *self._left_out])
        if pairs:
            self._wait = device.begin_copy_to_host(pairs)
        return sum(block.nbytes for block, _ in pairs)

    def restore(self, device: Device, blocks: Sequence[Block] | None = None) -> int:
        """Copy the bytes back, all or those that lie in `blocks`; returns how many, when all have arrived."""
        elsewhere = subtract(self.blocks, blocks) if blocks is not None else []
        pairs = self._pairs([*elsewhere, *self._left_out])
        device.copy_from_host(pairs)
        return sum(block.nbytes for block, _ in pairs)

    def is_clean(self, device: Device, blocks: Sequence[Block], epoch: int) -> bool:
        """Whether it holds, of these resident blocks, what they hold now: all that is identified."""
        return (
            bool(self.identified)
            and self.epoch == epoch
            and self.blocks == list(blocks)
            and self._fingerprint is not None
            and self._fingerprint == self._identity(device)
        )

    def _identity(self, device: Device) -> int | None:
        """The fingerprint; none where the device has no memory left to make one, and then nothing is clean."""
        try:
            return device.fingerprint(self.identified)
        except DeviceMemoryError:
            return None

    def free(self) -> None:
        try:
            self.finish()  # nobody else may have the memory while it is being written to
        finally:
            if self.nbytes:
                self._arena.release(self._address)
            self.nbytes = 0
