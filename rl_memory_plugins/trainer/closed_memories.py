"""Device memory whose `PausableMemory` has closed or ended, while tensors were still in it.

torch returns the memory of a tensor to the pool that it came from, and the pools of a closed memory stay for ever. So
the memory of tensors that end later, or move elsewhere, is free only after somebody has looked at these pools again.
"""

from __future__ import annotations

from collections.abc import Sequence

from rl_memory_plugins.memory.allocator import Allocator
from rl_memory_plugins.trainer.gpu import is_capturing

_closed: dict[int, tuple[Allocator, Sequence[str]]] = {}
"""Allocators that may have memory without a tensor later, with their tags; by the allocator's id."""


def note_closed(allocator: Allocator, tags: Sequence[str]) -> None:
    """No memory of these tags will be adopted any more. The garbage collector may call this in any thread."""
    if allocator.keeps_freed:
        _closed[id(allocator)] = allocator, tags


def free_closed() -> None:
    """Free the device memory of closed memories that holds no tensor. Does nothing while a CUDA graph is captured."""
    if not _closed or is_capturing():
        return
    for allocator, tags in list(_closed.values()):
        for tag in tags:
            allocator.free_unused(tag)
        if not any(allocator.blocks(tag) for tag in tags):
            _closed.pop(id(allocator), None)
