"""The options of a `PausableMemory`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rl_memory_plugins.memory.preparation import PrepareMode
from rl_memory_plugins.trainer.offloading import HOST_MARGIN_BYTES


@dataclass(frozen=True)
class PauseOptions:
    """The options of a `PausableMemory`. `RLMemoryConfig` documents them."""

    allocator: Literal["auto", "vmm", "tms", "host"] = "auto"
    tms_hook_mode: Literal["auto", "torch", "preload"] = "auto"
    prepare_host_memory: PrepareMode = "auto"
    host_arena_max_bytes: int = 0
    host_memory_margin_bytes: int = HOST_MARGIN_BYTES
    device_memory_margin_bytes: int = 64 << 20
    fault_dir: str | None = None
