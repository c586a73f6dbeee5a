"""Chooses the allocator and the host arena of a rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Protocol

from rl_memory_plugins.errors import UnsupportedError
from rl_memory_plugins.memory.allocator import Allocator
from rl_memory_plugins.memory.arena import PagedArena
from rl_memory_plugins.memory.faults import FaultyAllocator
from rl_memory_plugins.memory.preparation import PrepareMode


class MemoryOptions(Protocol):
    """The options of `RLMemoryConfig` that concern memory. Trainers have no pydantic, and give these alone."""

    @property
    def allocator(self) -> Literal["auto", "vmm", "tms", "host"]: ...
    @property
    def tms_hook_mode(self) -> Literal["auto", "torch", "preload"]: ...
    @property
    def prepare_host_memory(self) -> PrepareMode: ...
    @property
    def host_arena_max_bytes(self) -> int: ...
    @property
    def host_memory_margin_bytes(self) -> int: ...
    @property
    def device_memory_margin_bytes(self) -> int: ...
    @property
    def fault_dir(self) -> str | None: ...


def choose_allocator(
    config: MemoryOptions, device: Any, rank: int, *, serves: bool = False
) -> tuple[Allocator, PagedArena]:
    """Make the allocator that `config.allocator` names for `device` (a `torch.device`), and its arena.

    `auto` means `vmm` on CUDA, `tms` on ROCm and `host` on CPUs.

    Args:
        serves: Whether the process answers requests; see `PinnedArena`.

    Raises:
        UnsupportedError: the allocator does not work on this device, or with this installation.
    """
    kind = _automatic(device) if config.allocator == "auto" else config.allocator
    if (kind == "host") != (device.type == "cpu"):
        raise UnsupportedError(f"allocator={kind} does not support {device.type} devices", allocator=kind)
    arena_options = (config.host_arena_max_bytes, config.host_memory_margin_bytes, config.prepare_host_memory)
    allocator: Allocator
    arena: PagedArena
    if kind == "host":
        from rl_memory_plugins.memory.host import HostAllocator

        allocator, arena = HostAllocator(rank, config.host_memory_margin_bytes), PagedArena(*arena_options)
    else:
        import torch

        from rl_memory_plugins.memory.pinned import PinnedArena

        index = int(torch.cuda.current_device() if device.index is None else device.index)
        allocator, arena = _gpu_allocator(kind, index, config), PinnedArena(index, *arena_options, serves=serves)
    if config.fault_dir is not None:
        allocator = FaultyAllocator(allocator, Path(config.fault_dir), rank)
    return allocator, arena


def _automatic(device: Any) -> str:
    import torch

    if device.type == "cpu":
        return "host"
    if device.type != "cuda":
        raise UnsupportedError(f"no allocator supports {device.type} devices: use CUDA, ROCm or CPU")
    return "tms" if torch.version.hip else "vmm"


def _gpu_allocator(kind: str, index: int, config: MemoryOptions) -> Allocator:
    if kind == "vmm":
        from rl_memory_plugins.memory.cuda_vmm import CudaVmmAllocator

        return CudaVmmAllocator(index, config.device_memory_margin_bytes)
    from rl_memory_plugins.memory.torch_saver import TorchSaverAllocator

    return TorchSaverAllocator(index, config.device_memory_margin_bytes, config.tms_hook_mode)
