"""Blocks of a device with the addresses of their copies in host memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

from rl_memory_plugins.memory.allocator import Block
from rl_memory_plugins.memory.ranges import subtract

#: Page-locked host memory may consist of pieces (`PinnedArena`). Every piece except the last ends at a multiple of
#: this number. The driver refuses a copy that reaches over two pieces.
PIECE_BYTES = 32 << 20
#: What a call of the driver locks at a time where no step of the engine waits for it, or somebody waits for the memory:
#: fewer calls, and fewer pauses between them. A multiple of `PIECE_BYTES`.
LARGE_PIECE_BYTES = 128 << 20


def end_of_piece(address: int, piece_bytes: int = PIECE_BYTES) -> int:
    return (address // piece_bytes + 1) * piece_bytes


def by_pieces(pairs: Sequence[tuple[Block, int]], piece_bytes: int = PIECE_BYTES) -> Iterator[tuple[Block, int]]:
    """The blocks, cut where the host memory of their copies consists of pieces, each with the address of its copy."""
    for block, address in pairs:
        done = 0
        while done < block.nbytes:
            nbytes = min(end_of_piece(address + done, piece_bytes) - address - done, block.nbytes - done)
            yield Block(block.address + done, nbytes), address + done
            done += nbytes


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
