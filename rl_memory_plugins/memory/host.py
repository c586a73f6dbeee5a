"""Pausable regions in ordinary host memory, for CPU engines. Physical pages are dropped and restored; addresses stay.

A region records the storages of tensors that operators create inside it. A block is the whole pages inside a storage,
so that neighbours on its first and last page survive. Storages with fewer than two whole pages are not released.
`release` drops the pages with madvise(MADV_DONTNEED): the resident size of the process falls, and the pages read as
zeros until the wake. If a tensor is freed while its pages are released, its block ends, and a wake does not restore it.

A region does not record outputs of compiled code and deserialised tensors, because no operator shows them: pass them to
`adopt`. Never released are memory that is not private and anonymous (shared memory, mapped files) and, unless adopted,
memory that torch did not allocate (numpy arrays, mapped safetensors).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rl_memory_plugins.memory.allocator import Allocator, Block, Device, out_of_device_memory, too_little_for_wake
from rl_memory_plugins.memory.fingerprint import fingerprint, memory_view
from rl_memory_plugins.memory.host_memory import MADV_POPULATE_WRITE, free_host_bytes, host_memory_info, libc
from rl_memory_plugins.memory.ranges import merge

PAGE = mmap.PAGESIZE
MIN_PAGES = 2


class HostDevice(Device):
    """The host's memory as a `Device`. All operations are synchronous."""

    def __init__(self, rank: int) -> None:
        self.name = f"cpu:{rank}"

    def memory_info(self) -> tuple[int, int]:
        return host_memory_info()

    def begin_copy_to_host(self, pairs: Sequence[tuple[Block, int]]) -> Callable[[], None]:
        for block, host in pairs:
            ctypes.memmove(host, block.address, block.nbytes)
        return lambda: None

    def begin_copy_from_host(self, pairs: Sequence[tuple[Block, int]]) -> Callable[[], None]:
        for block, host in pairs:
            ctypes.memmove(block.address, host, block.nbytes)
        return lambda: None

    def fill(self, blocks: Sequence[Block], byte: int) -> None:
        for block in blocks:
            ctypes.memset(block.address, byte, block.nbytes)

    def fingerprint(self, blocks: Sequence[Block]) -> int:
        return fingerprint(memory_view(*block) for block in blocks)


class _Entry:
    """One storage of a tag."""

    def __init__(self, storage: Any, tag: str) -> None:
        self.ref = StorageWeakRef(storage)
        self.tag = tag
        self.block: Block | None = None  # at the latest examination
        self.private = False  # whether that block is private anonymous memory
        self.released: Block | None = None

    def storage(self) -> Any:
        """A reference that keeps the storage alive; None if the storage has been freed."""
        return torch.UntypedStorage._new_with_weak_ptr(self.ref.cdata)


_open = threading.local()
"""`regions`: the open regions of the thread, each as allocator and tag. Those of several allocators may be nested."""


class HostAllocator(Allocator):
    """Pausable regions of CPU tensors. A block is a part of one tensor's storage, so no block has unused parts.

    Args:
        rank: This rank's number, for the name of the device.
        margin_bytes: Host memory that must stay free after a `reserve`.
    """

    name = "host"
    maps_zeroed = True  # the kernel hands out zeroed pages

    def __init__(self, rank: int = 0, margin_bytes: int = 0) -> None:
        self.device = HostDevice(rank)
        self._margin_bytes = margin_bytes
        self._entries: dict[int, _Entry] = {}  # by the storage's identity
        self._lock = threading.RLock()

    @contextmanager
    def region(self, tag: str) -> Iterator[None]:
        regions: list[tuple[HostAllocator, str]] = _open.__dict__.setdefault("regions", [])
        # One recorder for each thread: of nested recorders each would see every operator, the outer first.
        recorder = nullcontext() if regions else _Recorder()
        outer = len(regions)
        try:
            regions.append((self, tag))
            with recorder:
                yield
        finally:
            del regions[outer:]  # also if an interrupt came before or behind `append`

    def adopt(self, tag: str, tensors: Iterable[Any]) -> None:
        """Assign the storages of existing CPU tensors to `tag`."""
        for tensor in tensors:
            storage = _cpu_storage(tensor)
            if storage is not None:
                self._record(storage, tag, anew=True)

    def extents(self, tag: str) -> list[Block]:
        with self._lock:
            storages = [entry.storage() for entry in self._entries.values() if entry.tag == tag]
            return merge(Block(one.data_ptr(), one.nbytes()) for one in storages if one is not None and one.nbytes())

    def blocks(self, tag: str) -> list[Block]:
        with self._lock:
            return sorted(block for _, _, block in self._live(tag))

    @contextmanager
    def held(self, tag: str) -> Iterator[list[Block]]:
        with self._lock:
            live = self._live(tag)  # keeps the storages alive
        yield sorted(block for _, _, block in live)

    def release(self, tag: str) -> int:
        released = 0
        with self._lock:
            for _storage, entry, block in self._live(tag):
                if entry.released != block:
                    entry.released = block  # before: an interrupt comes when the pages have gone
                    _madvise(block, mmap.MADV_DONTNEED)
                    released += block.nbytes
        return released

    def reserve(self, tag: str) -> HostReservation:
        """Populate the released pages. Kernels before 5.14 cannot; there the method only checks the free memory."""
        with self._lock:
            reservation = HostReservation(self, [live for live in self._live(tag) if live[1].released == live[2]])
            needed, free, margin = reservation.nbytes, free_host_bytes(), self._margin_bytes
            if needed and needed + margin > free:
                raise too_little_for_wake(needed, free, margin, "host memory")
            try:
                for block in reservation.blocks:
                    _madvise(block, MADV_POPULATE_WRITE)
            except OSError as error:
                if error.errno != errno.EINVAL:  # else the kernel does not know the advice
                    reservation.drop()
                    message = f"{needed} bytes of host memory could not be populated for a wake: {error}"
                    raise out_of_device_memory(message, free, needed=needed, margin=margin) from error
            return reservation

    def _record(self, storage: Any, tag: str, *, anew: bool = False) -> None:
        """Assign a storage to a tag; with `anew` also one that has another tag."""
        with self._lock:
            entry = self._entries.get(storage._cdata)
            if entry is None:
                self._entries[storage._cdata] = _Entry(storage, tag)
            elif anew:
                entry.tag = tag

    def _live(self, tag: str) -> list[tuple[Any, _Entry, Block]]:
        """The tag's storages, which the list keeps alive, with their entries and blocks."""
        private: _PrivateMemory | None = None
        live = []
        for key, entry in list(self._entries.items()):
            storage = entry.storage()
            if storage is None:
                del self._entries[key]
                continue
            if entry.tag != tag:
                continue
            block = _whole_pages(storage)
            if block is not None and block != entry.block:
                private = private or _PrivateMemory()
                entry.block, entry.private = block, block in private
            if block is not None and entry.private:
                live.append((storage, entry, block))
        return live


class HostReservation:
    """Populated pages. A reservation keeps the tensors of its blocks alive until `commit` or `drop`."""

    def __init__(self, allocator: HostAllocator, held: list[tuple[Any, _Entry, Block]]) -> None:
        self._lock = allocator._lock
        self._held = held
        self.blocks = sorted(block for _, _, block in held)
        self.nbytes = sum(block.nbytes for block in self.blocks)

    def commit(self) -> None:
        with self._lock:
            for _, entry, _ in self._held:
                entry.released = None
            self._held = []

    def drop(self) -> None:
        with self._lock:
            for _, _, block in self._held:
                _madvise(block, mmap.MADV_DONTNEED)
            self._held = []


class _Recorder(TorchDispatchMode):  # type: ignore[misc]
    """Records the storages that operators create, in the innermost open region of the thread, and not the storages of
    their arguments."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        # lift_fresh is the only operator that sees the new tensor of torch.tensor(), as an argument.
        seen = set() if func is torch.ops.aten.lift_fresh.default else _storages((args, kwargs)).keys()
        allocator, tag = _open.regions[-1]
        for identity, storage in _storages(result).items():
            if identity not in seen and storage.resizable():  # torch does not own the memory of others
                allocator._record(storage, tag)
        return result


def _storages(tree: Any) -> dict[int, Any]:
    storages = map(_cpu_storage, tree_leaves(tree))
    return {storage._cdata: storage for storage in storages if storage is not None}


def _cpu_storage(value: Any) -> Any:
    """A tensor's storage if it is in host memory. Meta, fake and sparse tensors have no such storage."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    storage = value.untyped_storage()
    return storage if storage.device.type == "cpu" else None


def _whole_pages(storage: Any) -> Block | None:
    address = storage.data_ptr()
    start = -(-address // PAGE) * PAGE
    end = (address + storage.nbytes()) // PAGE * PAGE
    return Block(start, end - start) if end - start >= MIN_PAGES * PAGE else None


def _madvise(block: Block, advice: int) -> None:
    if libc.madvise(block.address, block.nbytes, advice) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"madvise({advice}) of {block.nbytes} bytes: {os.strerror(code)}")


class _PrivateMemory:
    """A snapshot of the private, anonymous, writable memory of this process."""

    def __init__(self) -> None:
        ranges = []
        for line in Path("/proc/self/maps").read_text().splitlines():
            addresses, permissions, _, _, inode, *path = line.split(maxsplit=5)
            name = path[0] if path else ""
            anonymous = inode == "0" and (name in ("", "[heap]") or name.startswith("[anon"))
            if anonymous and permissions.startswith("rw") and permissions.endswith("p"):
                start, end = (int(address, 16) for address in addresses.split("-"))
                ranges.append(Block(start, end - start))
        self._ranges = merge(ranges)  # one allocation may span several entries

    def __contains__(self, block: Block) -> bool:
        index = bisect_right(self._ranges, block.address, key=lambda candidate: candidate.address) - 1
        return index >= 0 and block.end <= self._ranges[index].end
