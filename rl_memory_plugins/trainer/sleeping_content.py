"""The content of a sleeping storage, put together from the copies of its parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rl_memory_plugins.memory.adoption import bytes_of
from rl_memory_plugins.memory.allocator import Block
from rl_memory_plugins.memory.fingerprint import memory_view

if TYPE_CHECKING:
    import torch


def sleeping_content(storage: Any, copies: Sequence[tuple[Block, int]]) -> torch.Tensor | None:
    """The content of a storage as uint8, [bytes]; `None` without copies.

    Args:
        copies: The parts of the storage's memory that are in host memory only, with the addresses of their copies.
    """
    if not copies:
        return None
    whole = Block(storage.data_ptr(), storage.nbytes())
    if copies[0][0] == whole:
        found: torch.Tensor = memory_view(copies[0][1], whole.nbytes)
        return found
    content = bytes_of(storage).clone()  # of a CPU: the first and last bytes of a storage are never released
    for part, address in copies:
        start = part.address - whole.address
        content[start : start + part.nbytes] = memory_view(address, part.nbytes)
    return content
