"""Chooses the allocator and the host arena of a rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rl_memory_plugins.config import RLMemoryConfig
from rl_memory_plugins.errors import UnsupportedError
from rl_memory_plugins.memory.allocator import Allocator
from rl_memory_plugins.memory.backup import HostArena, PagedArena
from rl_memory_plugins.memory.faults import FaultyAllocator


def choose_allocator(config: RLMemoryConfig, device: Any, rank: int) -> tuple[Allocator, HostArena]:
    """Make the allocator that `config.allocator` names for `device` (a `torch.device`), and its arena.

    `auto` means `vmm` on CUDA, `tms` on ROCm and `host` on CPUs.

    Raises:
        UnsupportedError: the allocator does not work on this device, or with this installation.
    """
    kind = _automatic(device) if config.allocator == "auto" else config.allocator
    if (kind == "host") != (device.type == "cpu"):
        raise UnsupportedError(f"allocator={kind} does not support {device.type} devices", allocator=kind)
    allocator = _make(kind, device, rank, config)
    arena = _arena(device, config)
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


def _make(kind: str, device: Any, rank: int, config: RLMemoryConfig) -> Allocator:
    margin = config.device_memory_margin_bytes
    if kind == "vmm":
        from rl_memory_plugins.memory.cuda_vmm import CudaVmmAllocator

        return CudaVmmAllocator(_ordinal(device), margin)
    if kind == "tms":
        from rl_memory_plugins.memory.torch_saver import TorchSaverAllocator

        return TorchSaverAllocator(_ordinal(device), margin, config.tms_hook_mode)
    from rl_memory_plugins.memory.host import HostAllocator

    return HostAllocator(rank, config.host_memory_margin_bytes)


def _arena(device: Any, config: RLMemoryConfig) -> HostArena:
    bounds = (config.host_arena_max_bytes, config.host_memory_margin_bytes)
    if device.type == "cpu":
        return PagedArena(*bounds, config.prepare_host_memory)
    from rl_memory_plugins.memory.pinned import PinnedArena

    return PinnedArena(_ordinal(device), *bounds, config.prepare_host_memory)


def _ordinal(device: Any) -> int:
    import torch

    return int(torch.cuda.current_device() if device.index is None else device.index)
