"""The hash of GPU memory at the memory's speed: one launch for any number of ranges.

torch's operators need one launch and a temporary copy for each chunk of a range, and take nine times as long as the
memory needs (measured on an H200: 33 ms for 15 GB, this kernel 3.7). Not imported without Triton.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from rl_memory_plugins.memory.allocator import Block
from rl_memory_plugins.memory.splitmix import GOLDEN, MIX_1, signed

logger = logging.getLogger(__name__)

#: Bytes of one program; enough of them to fill a GPU even with the weights of a small model.
PIECE_BYTES = 1 << 20
WORD = 8

_GOLDEN = tl.constexpr(signed(GOLDEN))
_MIX = tl.constexpr(signed(MIX_1))
_LOW_35 = tl.constexpr((1 << 35) - 1)
_LOW_32 = tl.constexpr((1 << 32) - 1)


# Of annotations Triton understands its own alone.
@triton.jit  # type: ignore[untyped-decorator]
def _hash_pieces(table, hashes, TILE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Each 8-byte word is mixed with its position, by steps that lose nothing, so any one that changes shows.

    The masks make the shifts logical: with copies of the sign a word and its complement would look alike.
    """
    piece = tl.program_id(0)
    address = tl.load(table + 2 * piece)
    nbytes = tl.load(table + 2 * piece + 1)
    words = nbytes // 8
    start_of_words = address.to(tl.pointer_type(tl.int64))
    lanes = tl.arange(0, TILE)
    total = tl.zeros((TILE,), tl.int64)
    for start in range(0, words, TILE):
        position = (start + lanes).to(tl.int64)
        word = tl.load(start_of_words + position, mask=position < words, other=0)
        word = word ^ ((position + 1) * _GOLDEN)
        word = (word ^ ((word >> 29) & _LOW_35)) * _MIX
        total += word ^ ((word >> 32) & _LOW_32)
    last = tl.arange(0, 8)
    rest = tl.load(address.to(tl.pointer_type(tl.uint8)) + words * 8 + last, mask=last < nbytes - words * 8, other=0)
    ends = (rest.to(tl.int64) + 1) * (last.to(tl.int64) + 1) * _MIX
    tl.store(hashes + piece, tl.sum(total, 0) + tl.sum(ends, 0))


def hash_pieces(ranges: Sequence[Block], device: torch.device) -> torch.Tensor:
    """The hashes of the ranges' pieces, in their order: an int64 tensor in host memory, complete.

    Args:
        ranges: Of any alignment and length.
        device: The current one, whose current stream is waited for.
    """
    table = pieces(ranges).to(device)  # one argument: each of several might be aligned or not, and compiled for that
    # A GPU writes into the host's memory by itself: a copy of the results would queue behind all copies under way.
    on_gpu = device.type == "cuda"
    hashes = torch.empty(len(table), dtype=torch.int64, device="cpu", pin_memory=on_gpu)
    if len(table):
        _hash_pieces[(len(table),)](table, hashes, TILE=2048, num_warps=8)
        if on_gpu:
            torch.cuda.current_stream(device).synchronize()
    return hashes


def pieces(ranges: Sequence[Block]) -> torch.Tensor:
    """Addresses and lengths [pieces, 2] of what covers the ranges; words begin only where a GPU can read words."""
    addresses, lengths = torch.tensor(ranges, dtype=torch.int64, device="cpu").reshape(-1, 2).unbind(1)
    heads = torch.minimum(-addresses % WORD, lengths)  # before the first word; most ranges have none
    bodies = (lengths - heads + PIECE_BYTES - 1) // PIECE_BYTES
    counts = (heads > 0).long() + bodies
    of = torch.repeat_interleave(counts)  # of each piece, its range
    # The first piece of a range with a head is that; each other one follows on a multiple of `PIECE_BYTES`.
    place = torch.arange(len(of), device="cpu") - (counts.cumsum(0) - bodies)[of]
    starts = torch.where(place < 0, 0, heads[of] + place * PIECE_BYTES)
    ends = torch.where(place < 0, heads[of], torch.minimum(starts + PIECE_BYTES, lengths[of]))
    return torch.stack([addresses[of] + starts, ends - starts], dim=1)


@functools.cache
def usable(device: torch.device) -> bool:
    """Whether the kernel can be compiled here, and sees a byte that changes; tried once.

    Raises:
        torch.OutOfMemoryError: no device memory to try it with.
    """
    if device.type == "cuda" and not isinstance(_hash_pieces, triton.JITFunction):
        return False  # TRITON_INTERPRET: it would read the GPU's addresses on the host
    memory = torch.zeros(16 << 10, device=device, dtype=torch.uint8)

    def found() -> list[int]:
        result: list[int] = hash_pieces([Block(memory.data_ptr() + 1, memory.numel() - 2)], device).tolist()
        return result

    try:
        before = found()
        memory[5000] = 1
        return found() != before
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # no C compiler, no support for this GPU, …: torch's operators do without
        logger.warning("weights are identified by torch's operators, which is slower: %s", error)
        return False
