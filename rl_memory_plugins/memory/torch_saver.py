"""Pausable regions through torch_memory_saver, for those who run it already, and for ROCm.

It ends the process with `exit(1)` when asked to pause what is paused, to resume what is resident, or when a
resume finds no memory. Hence:
- our own state decides what is asked of it, and what is allocated in a tag while the tag is released goes under
  another of its tags, so that one of its tags is always wholly paused or wholly resident;
- a reservation checks the free memory, with a margin, and is only a promise. Another process that takes the
  memory between the check and the resume still ends this one; only `allocator=vmm` excludes that;
- a tensor freed while its tag is released gets its memory back with the others, as unused memory of the tag.
It is never asked to keep a copy (`enable_cpu_backup`): preserving is decided at each sleep, by the core.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch

from rl_memory_plugins.errors import DeviceMemoryError, UnsupportedError
from rl_memory_plugins.memory.allocator import Block
from rl_memory_plugins.memory.cuda_device import CudaDevice
from rl_memory_plugins.memory.regions import RegionStack, keep_forever
from rl_memory_plugins.memory.residual import ResidualMemory
from rl_memory_plugins.memory.segments import Segment, Segments, pool_key
from rl_memory_plugins.memory.torch_settings import torch_options
from rl_memory_plugins.tags import Tag

#: What is used of torch_memory_saver that it does not document: checked at start-up.
SAVER_SYMBOLS = ("_impl", "_impl._mem_pools", "_impl._hook_mode")

#: How it gets between torch and CUDA; "auto" is "preload" where its library is preloaded, else "torch".
HookMode = Literal["auto", "torch", "preload"]

#: Its tags belong to the process: each allocator has its own.
_numbers = itertools.count()


class TorchSaverAllocator:
    """Pausable regions of one GPU, held by the process's torch_memory_saver.

    CUDA graphs stay resident: what is captured does not go through its regions.

    If it is already in use in this process, it is taken as it is.

    Args:
        index: torch's ordinal of the GPU.
        margin_bytes: Device memory that must be free beyond what a reservation needs.
        hook_mode: Its mode, by its own names.

    Raises:
        UnsupportedError: it is not installed, lacks something that is needed, or refuses to start; says why.
    """

    name = "tms"
    maps_zeroed = False  # nothing promises it, and on ROCm mapping writes to the memory

    def __init__(self, index: int, margin_bytes: int = 0, hook_mode: HookMode = "auto") -> None:
        self.index = index
        self.device = CudaDevice(index)
        self._residual = ResidualMemory(index)
        self._margin_bytes = margin_bytes
        self._saver = _start_saver(index, hook_mode)
        self.hook_mode: str = self._saver._impl._hook_mode
        self._number = next(_numbers)
        self._segments = Segments(index)
        self._regions = RegionStack()
        self._locks = {tag: threading.RLock() for tag in Tag}  # its pools admit one thread at a time
        self._generation = dict.fromkeys(Tag, 0)
        self._paused: dict[Tag, set[str]] = {tag: set() for tag in Tag}
        self._promised_bytes = 0

    @contextmanager
    def region(self, tag: Tag) -> Iterator[None]:
        with self._locks[tag]:
            name = self._saver_tag(tag, self._generation[tag])

            def activate() -> Any:
                return self._saver.region(tag=name, enable_cpu_backup=False)

            with torch.cuda.device(self.index), self._regions.enter(activate):
                yield

    def _saver_tag(self, tag: Tag, generation: int) -> str:
        return f"rl_memory.{self._number}.{tag.value}.{generation}"

    def _saver_tags(self, tag: Tag) -> list[str]:
        return [self._saver_tag(tag, generation) for generation in range(self._generation[tag] + 1)]

    def blocks(self, tag: Tag) -> list[Block]:
        return self._blocks_of(self._saver_tags(tag))

    def unused(self, tag: Tag) -> list[Block]:
        return [block for segment in self._segments_of(self._saver_tags(tag)) for block in segment.unused]

    @contextmanager
    def held(self, tag: Tag) -> Iterator[list[Block]]:
        yield self.blocks(tag)  # its pools keep their segments when tensors go

    def residual_memory(self) -> dict[str, int]:
        pools = {pool_key(pool) for pool in list(self._saver._impl._mem_pools.values())}
        by_pool = self._segments.by_pool()
        held = sum(segment.nbytes for pool in pools for segment in by_pool.get(pool, ()))
        paused = sum(block.nbytes for tag in Tag for block in self.paused_blocks(tag))
        return self._residual(by_pool, pools, held - paused)

    def _blocks_of(self, names: list[str]) -> list[Block]:
        return sorted(Block(segment.address, segment.nbytes) for segment in self._segments_of(names))

    def _segments_of(self, names: list[str]) -> list[Segment]:
        pools = [
            pool
            for key, pool in list(self._saver._impl._mem_pools.items())
            if (key[0] if isinstance(key, tuple) else key) in names
        ]
        return self._segments.of(pools)

    def reclaim(self) -> None:
        return  # torch_memory_saver creates memory only where it maps it

    def release(self, tag: Tag) -> int:
        resident = [name for name in self._saver_tags(tag) if name not in self._paused[tag]]
        released = 0
        for name in resident:
            nbytes = sum(block.nbytes for block in self._blocks_of([name]))
            if nbytes:
                self._saver.pause(name)
                self._paused[tag].add(name)
                released += nbytes
        if self._saver_tag(tag, self._generation[tag]) in self._paused[tag]:
            self._generation[tag] += 1
        return released

    def reserve(self, tag: Tag) -> SaverReservation:
        return SaverReservation(self, tag)

    def resume(self, tag: Tag) -> None:
        """Resume all that is paused of the tag. Only a reservation calls this."""
        for name in sorted(self._paused[tag]):
            self._saver.resume(name)
            self._paused[tag].remove(name)

    def promise(self, nbytes: int) -> None:
        """Set free memory aside, on paper.

        Raises:
            DeviceMemoryError: not enough is free beyond the margin and what has been promised already.
        """
        free = max(self.device.memory_info()[0] - self._promised_bytes, 0)
        if nbytes and nbytes + self._margin_bytes > free:
            raise DeviceMemoryError(
                f"{nbytes} bytes of GPU memory are needed and {self._margin_bytes} to spare, {free} are free",
                needed_bytes=nbytes,
                free_bytes=free,
                margin_bytes=self._margin_bytes,
            )
        self._promised_bytes += nbytes

    def unpromise(self, nbytes: int) -> None:
        self._promised_bytes -= nbytes

    def paused_blocks(self, tag: Tag) -> list[Block]:
        return self._blocks_of(sorted(self._paused[tag]))


class SaverReservation:
    """A promise of memory, see the module's note on what it is worth."""

    def __init__(self, allocator: TorchSaverAllocator, tag: Tag) -> None:
        self._allocator = allocator
        self._tag = tag
        self.blocks = allocator.paused_blocks(tag)
        self.nbytes = sum(block.nbytes for block in self.blocks)
        allocator.promise(self.nbytes)

    def commit(self) -> None:
        self._allocator.unpromise(self.nbytes)
        self._allocator.promise(self.nbytes)  # looks once more: what happened since the reservation ends no process
        self._allocator.unpromise(self.nbytes)
        self._allocator.resume(self._tag)

    def drop(self) -> None:
        self._allocator.unpromise(self.nbytes)


def preload_libraries() -> list[str]:
    """What LD_PRELOAD must name for the preload mode: its library, and the CUDA runtime that torch brings along.

    The runtime, because the library needs it, and is loaded long before torch says where it lies.

    Raises:
        UnsupportedError: it is not installed, or not for this CUDA.
    """
    try:
        from torch_memory_saver.utils import get_binary_path_from_package

        library = get_binary_path_from_package("torch_memory_saver_hook_mode_preload")
    except (ImportError, RuntimeError) as error:
        raise _not_installed(error) from error
    files = (line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines())
    runtime = sorted({file for file in files if Path(file).name.startswith("libcudart.so.")})
    return [str(library), *runtime[:1]]


def with_preload(environment: Mapping[str, str], libraries: Sequence[str]) -> dict[str, str]:
    """The environment, with the libraries first among those that are preloaded."""
    others = [path for path in environment.get("LD_PRELOAD", "").split(":") if path and path not in libraries]
    return {**environment, "LD_PRELOAD": ":".join([*libraries, *others])}


def resolve_hook_mode(hook_mode: HookMode) -> str:
    """`torch` or `preload`, as this process was started for.

    Raises:
        UnsupportedError: the preload mode is asked for, and the library is not preloaded.
    """
    named = [Path(path) for path in os.environ.get("LD_PRELOAD", "").split(":") if "torch_memory_saver" in path]
    mapped = Path("/proc/self/maps").read_text() if named else ""
    preloaded = any(path.name in mapped for path in named)  # the loader skips, with a warning, what it cannot load
    if hook_mode == "preload" and not preloaded:
        raise UnsupportedError(
            "tms_hook_mode=preload needs torch_memory_saver's library to be preloaded, which this process was not"
            f" started with (LD_PRELOAD={os.environ.get('LD_PRELOAD', '')!r}): start by `rl-memory serve`, which"
            " arranges it, or set LD_PRELOAD to its torch_memory_saver_hook_mode_preload library",
        )
    if hook_mode == "auto":
        return "preload" if preloaded else "torch"
    return hook_mode


def _not_installed(error: Exception) -> UnsupportedError:
    return UnsupportedError(
        f"allocator=tms needs torch-memory-saver ({error}): pip install 'torch-memory-saver>=0.0.9.post1'"
    )


def _start_saver(index: int, hook_mode: HookMode) -> Any:
    try:
        from torch_memory_saver import torch_memory_saver as saver
    except ImportError as error:
        raise _not_installed(error) from error
    mode = resolve_hook_mode(hook_mode)
    if torch_options().get("expandable_segments"):
        raise UnsupportedError(
            "allocator=tms does not work with torch's expandable_segments, which go past it:"
            " unset PYTORCH_CUDA_ALLOC_CONF and PYTORCH_ALLOC_CONF, or take allocator=vmm"
        )
    try:
        if getattr(saver, "_impl", None) is None:
            saver.hook_mode = mode
        with torch.cuda.device(index), saver.region(tag="rl_memory.start"):
            pass
    except (RuntimeError, AssertionError, OSError) as error:
        raise UnsupportedError(f"torch_memory_saver does not start: {error}") from error
    for path in SAVER_SYMBOLS:
        found: Any = saver
        for part in path.split("."):
            found = getattr(found, part, None)
        if found is None:
            raise UnsupportedError(f"this torch_memory_saver lacks {path}, which allocator=tms needs", missing=[path])
    if hook_mode != "auto" and saver._impl._hook_mode != hook_mode:
        raise UnsupportedError(
            f"torch_memory_saver is already in use in this process, in mode {saver._impl._hook_mode}, not {hook_mode}"
        )
    keep_forever(saver._impl)  # it also exits when its pools are dropped, as the interpreter does at the end
    return saver
