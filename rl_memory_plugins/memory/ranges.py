"""Arithmetic on address ranges."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

from rl_memory_plugins.memory.allocator import Block


def merge(blocks: Iterable[Block]) -> list[Block]:
    """Merge blocks that touch or overlap. Returns ascending blocks."""
    merged: list[Block] = []
    for block in sorted(block for block in blocks if block.nbytes > 0):
        if merged and block.address <= merged[-1].end:
            last = merged.pop()
            block = Block(last.address, max(last.end, block.end) - last.address)
        merged.append(block)
    return merged


def subtract(blocks: Sequence[Block], holes: Iterable[Block]) -> list[Block]:
    """The parts of `blocks` outside `holes`. No part spans two blocks."""
    remaining = []
    holes = merge(holes)
    ends = [hole.end for hole in holes]
    for block in blocks:
        start = block.address
        for index in range(bisect_right(ends, start), len(holes)):
            hole = holes[index]
            if hole.address >= block.end:
                break
            if hole.address > start:
                remaining.append(Block(start, hole.address - start))
            start = hole.end
        if start < block.end:
            remaining.append(Block(start, block.end - start))
    return remaining


def intersect(blocks: Sequence[Block], others: Iterable[Block]) -> list[Block]:
    """The parts of `blocks` inside `others`. No part spans two blocks."""
    return subtract(blocks, subtract(blocks, others))
