"""Blocks of a device with the addresses of their copies in host memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from rl_memory_plugins.memory.allocator import Block
from rl_memory_plugins.memory.ranges import subtract


def copies_of(blocks: Sequence[Block], address: int) -> list[tuple[Block, int]]:
    """The blocks, each with the address of its copy. The copies lie one after the other from `address` on."""
    return list(zip(blocks, accumulate((block.nbytes for block in blocks), initial=address), strict=False))


def pairs_outside(copies: Sequence[tuple[Block, int]], holes: Sequence[Block]) -> list[tuple[Block, int]]:
    """The parts of blocks outside `holes`, each with the address of its copy.

    Args:
        copies: The blocks, by ascending address, each with the address of its copy.
    """
    blocks, addresses = [block for block, _ in copies], [address for _, address in copies]
    starts = [block.address for block in blocks]
    pairs = []
    for part in subtract(blocks, holes):  # no part spans two blocks
        at = bisect_right(starts, part.address) - 1
        pairs.append((part, addresses[at] + part.address - starts[at]))
    return pairs


def bytes_of_pairs(pairs: Sequence[tuple[Block, int]]) -> int:
    return sum(block.nbytes for block, _ in pairs)
