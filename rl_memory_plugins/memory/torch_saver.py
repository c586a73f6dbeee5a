"""Pausable regions through torch_memory_saver ("the saver"), for its existing users and for ROCm.

The saver ends the process with `exit(1)` if a call pauses a paused tag or resumes a resident tag, or if a resume finds
too little memory. Therefore:

- This module tracks the state of each tag of the saver. Allocations in a released tag go to a new tag of the saver, so
  that each of the saver's tags is either paused or resident as a whole.
- A reservation only checks the free memory, with a margin. If another process takes the memory between the check and
  the resume, the saver still ends this process. Only `allocator=vmm` excludes that.
- If a tensor is freed while its tag is released, a wake restores its memory too, as unused memory of the tag.

The saver keeps no copies (`enable_cpu_backup` is off): the memory manager decides at each sleep which content to
preserve.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch

from rl_memory_plugins.errors import UnsupportedError
from rl_memory_plugins.memory.adoption import move_storages
from rl_memory_plugins.memory.allocator import Allocator, Block, too_little_for_wake
from rl_memory_plugins.memory.cuda_device import CudaDevice
from rl_memory_plugins.memory.regions import RegionStack, keep_forever
from rl_memory_plugins.memory.residual import ResidualMemory
from rl_memory_plugins.memory.segments import Segment, Segments, pool_key
from rl_memory_plugins.memory.torch_settings import missing_symbols, torch_options

#: Undocumented symbols of the saver. The start checks them.
SAVER_SYMBOLS = ("_impl", "_impl._mem_pools", "_impl._hook_mode")

#: How the saver intercepts allocations. "auto" means "preload" if its library is preloaded, else "torch".
HookMode = Literal["auto", "torch", "preload"]

_numbers = itertools.count()


class TorchSaverAllocator(Allocator):
    """Pausable regions of one GPU in the saver of this process, which may already be in use.

    CUDA graphs stay resident, because captures bypass the saver's regions. Blocks need no `held`, because the saver's
    pools keep the segments of freed tensors, and no `reclaim`, because the saver allocates memory only when it maps.

    Args:
        index: torch's ordinal of the GPU.
        margin_bytes: Device memory that a reservation leaves free.
        hook_mode: The saver's mode.

    Raises:
        UnsupportedError: the saver is not installed, lacks a symbol, or does not start.
    """

    name = "tms"
    maps_zeroed = False  # undocumented, and on ROCm a map writes to the memory

    def __init__(self, index: int, margin_bytes: int = 0, hook_mode: HookMode = "auto") -> None:
        self.index = index
        self.device = CudaDevice(index)
        self._residual = ResidualMemory(index)
        self._margin_bytes = margin_bytes
        self._saver = _start_saver(index, hook_mode)
        self.hook_mode: str = self._saver._impl._hook_mode
        self._segments = Segments(index)
        self._regions = RegionStack()
        self._locks: dict[str, Any] = defaultdict(threading.RLock)  # a pool of the saver admits one thread at a time
        self._names: dict[str, list[str]] = {}  # the saver's tags; regions use the last
        self._paused: dict[str, set[str]] = defaultdict(set)
        self.reserved_bytes = 0  # of all open reservations

    @contextmanager
    def region(self, tag: str) -> Iterator[None]:
        with self._locks[tag]:
            name = self._names_of(tag)[-1]

            def activate() -> Any:
                return self._saver.region(tag=name, enable_cpu_backup=False)

            with torch.cuda.device(self.index), self._regions.enter(activate):
                yield

    def blocks(self, tag: str) -> list[Block]:
        return self._blocks_of(self._names_of(tag))

    def unused(self, tag: str) -> list[Block]:
        return [block for segment in self._segments_of(self._names_of(tag)) for block in segment.unused]

    def is_used(self, tag: str) -> bool:
        return any(segment.active_bytes for segment in self._segments_of(self._names_of(tag)))

    def residual_memory(self) -> dict[str, int]:
        pools = {pool_key(pool) for pool in list(self._saver._impl._mem_pools.values())}
        by_pool = self._segments.by_pool()
        held = sum(segment.nbytes for pool in pools for segment in by_pool.get(pool, ()))
        paused = sum(block.nbytes for tag in list(self._paused) for block in self.paused_blocks(tag))
        return self._residual(by_pool, pools, held - paused)

    def adopt(self, tag: str, tensors: Iterable[Any]) -> None:
        move_storages(self, tag, tensors)

    def _names_of(self, tag: str) -> list[str]:
        return self._names.get(tag) or self._names.setdefault(tag, [_new_name(tag)])

    def _blocks_of(self, names: Collection[str]) -> list[Block]:
        return sorted(Block(segment.address, segment.nbytes) for segment in self._segments_of(names))

    def _segments_of(self, names: Collection[str]) -> list[Segment]:
        pools = list(self._saver._impl._mem_pools.items())
        return self._segments.of(pool for key, pool in pools if (key[0] if isinstance(key, tuple) else key) in names)

    def release(self, tag: str) -> int:
        released = 0
        for name in self._names_of(tag):
            nbytes = 0 if name in self._paused[tag] else sum(block.nbytes for block in self._blocks_of([name]))
            if nbytes:
                self._paused[tag].add(name)  # before: an interrupt comes when the saver has paused it
                try:
                    self._saver.pause(name)
                except Exception:
                    self._paused[tag].discard(name)
                    raise
                released += nbytes
        if self._names_of(tag)[-1] in self._paused[tag]:
            self._names_of(tag).append(_new_name(tag))
        return released

    def reserve(self, tag: str) -> SaverReservation:
        return SaverReservation(self, tag)

    def require_free(self, nbytes: int) -> None:
        """Check that a resume of `nbytes` does not run out of memory.

        Raises:
            DeviceMemoryError: the free memory, less the margin and earlier reservations, does not suffice.
        """
        free = max(self.device.memory_info()[0] - self.reserved_bytes, 0)
        if nbytes and nbytes + self._margin_bytes > free:
            raise too_little_for_wake(nbytes, free, self._margin_bytes)

    def paused_blocks(self, tag: str) -> list[Block]:
        return self._blocks_of(self._paused[tag])


def _new_name(tag: str) -> str:
    """A new tag of the saver. The saver's tags are global in the process, and several allocators may use the saver."""
    return f"rl_memory.{tag}.{next(_numbers)}"


class SaverReservation:
    """A claim to free memory. The module's docstring explains its limits."""

    def __init__(self, allocator: TorchSaverAllocator, tag: str) -> None:
        self._allocator = allocator
        self._tag = tag
        self.blocks = allocator.paused_blocks(tag)
        self.nbytes = sum(block.nbytes for block in self.blocks)
        allocator.require_free(self.nbytes)
        allocator.reserved_bytes += self.nbytes

    def commit(self) -> None:
        self.drop()
        self._allocator.require_free(self.nbytes)  # another process may have taken memory: raise, and no exit(1)
        paused = self._allocator._paused[self._tag]
        for name in sorted(paused):
            paused.remove(name)  # before: an interrupt comes when the saver has resumed it
            try:
                self._allocator._saver.resume(name)
            except Exception:
                paused.add(name)
                raise

    def drop(self) -> None:
        self._allocator.reserved_bytes -= self.nbytes


def preload_libraries() -> list[str]:
    """The paths that LD_PRELOAD must list for the preload mode: the saver's library, and the CUDA runtime of torch.

    The library needs the runtime, and is loaded before torch adds the runtime's folder to the search path.

    Raises:
        UnsupportedError: the saver is not installed, or not for this CUDA version.
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
    """A copy of the environment whose LD_PRELOAD begins with `libraries`."""
    others = [path for path in environment.get("LD_PRELOAD", "").split(":") if path and path not in libraries]
    return {**environment, "LD_PRELOAD": ":".join([*libraries, *others])}


def resolve_hook_mode(hook_mode: HookMode) -> str:
    """Resolve `auto` to `torch` or `preload`, by the libraries that this process has preloaded.

    Raises:
        UnsupportedError: `hook_mode` is `preload`, and the saver's library is not preloaded.
    """
    named = [Path(path) for path in os.environ.get("LD_PRELOAD", "").split(":") if "torch_memory_saver" in path]
    mapped = Path("/proc/self/maps").read_text() if named else ""
    preloaded = any(path.name in mapped for path in named)  # the loader only warns about a library that it cannot load
    if hook_mode == "preload" and not preloaded:
        raise UnsupportedError(
            "tms_hook_mode=preload needs torch_memory_saver's library to be preloaded, and this process has not loaded"
            f" it (LD_PRELOAD={os.environ.get('LD_PRELOAD', '')!r}): start with `rl-memory serve`, or add"
            " torch_memory_saver_hook_mode_preload to LD_PRELOAD",
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
            "allocator=tms does not work with torch's expandable_segments, which bypass torch_memory_saver:"
            " unset PYTORCH_CUDA_ALLOC_CONF and PYTORCH_ALLOC_CONF, or use allocator=vmm"
        )
    try:
        if getattr(saver, "_impl", None) is None:
            saver.hook_mode = mode
        with torch.cuda.device(index), saver.region(tag="rl_memory.start"):
            pass
    except (RuntimeError, AssertionError, OSError) as error:
        raise UnsupportedError(f"torch_memory_saver failed to start: {error}") from error
    missing = missing_symbols(saver, SAVER_SYMBOLS)
    if missing:
        raise UnsupportedError(
            f"allocator=tms needs {', '.join(missing)}, which this torch_memory_saver lacks", missing=missing
        )
    if hook_mode != "auto" and saver._impl._hook_mode != hook_mode:
        raise UnsupportedError(
            f"tms_hook_mode={hook_mode} conflicts with torch_memory_saver's mode in this process, which is"
            f" {saver._impl._hook_mode}"
        )
    keep_forever(saver._impl)  # the saver also calls exit(1) if its pools are dropped, as the interpreter does at exit
    return saver
