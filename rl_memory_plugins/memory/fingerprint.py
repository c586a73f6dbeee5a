"""A 64-bit hash of memory by torch operators, on CPU and CUDA. It reads the memory once.

On GPUs the kernel of `hash_kernel.py` is ten times as fast, if it compiles.

The hash takes a range as rows of `WIDTH` 4-byte words. It mixes the 8-byte sum of each column and of each row with its
position, and adds up the results. Any changed word changes the hash, and so do two exchanged words. The hash finds
accidents, and no attacks: with chosen bytes, two ranges can collide.
"""

from __future__ import annotations

import ctypes
import hashlib
from array import array
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch

from rl_memory_plugins.memory.splitmix import GOLDEN, finalise, signed

#: A prime number, so that no stride of a tensor is a multiple of it.
WIDTH = 8191
_ROW_BYTES = WIDTH * 4
#: On a CPU a chunk fits the cache. On a GPU large chunks save launches, but torch makes a temporary copy of twice a
#: chunk's size, and a sleep may begin with little memory free.
_CHUNK_ROWS = {"cpu": 64, "cuda": 1024}


def fingerprint(views: Iterable[Any]) -> int:
    """Hash contiguous uint8 tensors of one device, in their order, to 0 <= hash < 2^64.

    The hash depends on the bytes, their positions and the lengths of the tensors, and not on addresses.
    """
    views = list(views)
    sums = [_sums(view) for view in views if view.numel()] or [torch.empty(0, dtype=torch.int64)]
    return combine([view.numel() for view in views], torch.cat(sums))


def combine(lengths: Iterable[int], sums: Any) -> int:
    """One hash, 0 <= hash < 2^64, of the ranges' lengths in bytes and of their sums, an int64 tensor."""
    positions = torch.arange(1, sums.numel() + 1, dtype=torch.int64, device=sums.device)
    total = finalise(sums + positions * signed(GOLDEN)).sum()
    digest = hashlib.blake2b(array("q", [*lengths, int(total)]), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


def _sums(view: Any) -> Any:
    whole = view.numel() // _ROW_BYTES * _ROW_BYTES
    step = _CHUNK_ROWS.get(view.device.type, _CHUNK_ROWS["cuda"]) * _ROW_BYTES
    column_sums = torch.zeros(WIDTH, dtype=torch.int64, device=view.device)
    rows = torch.zeros(1, dtype=torch.int64, device=view.device)  # the sums of columns alone ignore exchanged rows
    for start in range(0, whole, step):
        chunk = view[start : min(start + step, whole)]
        if chunk.data_ptr() % 4:
            chunk = chunk.clone()  # GPUs read words from aligned addresses only
        words = chunk.view(torch.int32).view(-1, WIDTH)
        column_sums += words.sum(0, dtype=torch.int64)
        first = start // _ROW_BYTES + 1
        positions = torch.arange(first, first + len(words), dtype=torch.int64, device=view.device)
        rows += finalise(words.sum(1, dtype=torch.int64) + positions * signed(GOLDEN)).sum()
    if whole < view.numel():
        last = torch.zeros(_ROW_BYTES, dtype=torch.uint8, device=view.device)
        last[: view.numel() - whole] = view[whole:]
        column_sums += last.view(torch.int32)
    return torch.cat([column_sums, rows])


def memory_view(address: int, nbytes: int, device: str = "cpu") -> Any:
    """A uint8 tensor of shape [nbytes] over existing memory. The caller keeps the memory alive."""
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8, device=device)
    if torch.device(device).type == "cpu":
        return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)
    interface = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}
    return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=interface), device=device)
