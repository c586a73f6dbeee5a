"""Strided regions of memory: their canonical form, and the fraction of a tensor that a set of regions covers."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch


def canonical(size: Sequence[int], stride: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Size and stride of the same elements in the fewest dimensions, outermost first: at most one if contiguous."""
    dims = [(step, extent) for extent, step in zip(size, stride, strict=True) if extent != 1]
    dims.sort(reverse=True)
    merged: list[tuple[int, int]] = []
    for step, extent in dims:
        if merged and merged[-1][0] == step * extent:
            merged[-1] = (step, merged[-1][1] * extent)
        else:
            merged.append((step, extent))
    return tuple(extent for _, extent in merged), tuple(step for step, _ in merged)


class Coverage:
    """A set of bytes, built from strided tensors."""

    def __init__(self) -> None:
        self._small: list[tuple[int, int]] = []  # start and end address
        self._large: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._merged: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def add(self, tensor: torch.Tensor) -> None:
        if tensor.numel() == 0:
            return
        self._merged = None
        if tensor.is_contiguous():  # most are, and there are many
            self._small.append((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes))
            return
        starts, nbytes = _runs(tensor)
        if len(starts) == 1:
            self._small.append((int(starts[0]), int(starts[0]) + nbytes))
        else:
            self._large.append((starts, starts + nbytes))

    def add_where(self, tensor: torch.Tensor, mask: torch.Tensor) -> None:
        """Add the elements where `mask`, of the tensor's shape, is true."""
        places = mask.nonzero().cpu()
        if len(places):
            self._merged = None
            itemsize = tensor.element_size()
            starts = tensor.data_ptr() + (places * torch.tensor(tensor.stride())).sum(1) * itemsize
            self._large.append((starts, starts + itemsize))

    def extend(self, other: Coverage) -> None:
        """Add all bytes of another set."""
        self._merged = None
        self._small += other._small
        self._large += other._large

    def fraction(self, tensor: torch.Tensor) -> float:
        """The fraction of the tensor's bytes that is in the set, 0.0 to 1.0. It is 1.0 for an empty tensor."""
        if tensor.numel() == 0:
            return 1.0
        starts, nbytes = _runs(tensor)
        covered = (self._below(starts + nbytes) - self._below(starts)).sum().item()
        return float(covered / (nbytes * len(starts)))

    def _below(self, addresses: torch.Tensor) -> torch.Tensor:
        """For each address, the number of bytes of the set below it."""
        starts, ends, lengths = self._merge()
        count = torch.searchsorted(starts, addresses)  # of runs that start below
        if len(starts) == 0:
            return torch.zeros_like(addresses)
        last = (count - 1).clamp(min=0)
        below = lengths[last] - (ends[last] - addresses).clamp(min=0)
        return torch.where(count > 0, below, 0)

    def _merge(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Disjoint runs in ascending order: starts, ends, and cumulative lengths."""
        if self._merged is None:
            small = torch.tensor(self._small, dtype=torch.int64).view(-1, 2)
            starts = torch.cat([small[:, 0], *(start for start, _ in self._large)])
            ends = torch.cat([small[:, 1], *(end for _, end in self._large)])
            starts, order = starts.sort()
            if len(starts):
                reach = ends[order].cummax(0).values
                first = torch.ones(len(starts), dtype=torch.bool)
                first[1:] = starts[1:] > reach[:-1]
                starts = starts[first]
                last = torch.cat([first[1:], torch.ones(1, dtype=torch.bool)])
                ends = reach[last]
            self._merged = (starts, ends, (ends - starts).cumsum(0))
            self._small, self._large = [], [(starts, ends)] if len(starts) else []
        return self._merged


def _runs(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The start addresses of a tensor's contiguous runs, and the bytes of each run."""
    itemsize = tensor.element_size()
    size, stride = canonical(tensor.shape, tensor.stride())
    run = 1
    if stride and stride[-1] == 1:
        run, size, stride = size[-1], size[:-1], stride[:-1]
    starts = torch.tensor([tensor.data_ptr()], dtype=torch.int64)
    for extent, step in zip(size, stride, strict=True):
        starts = (starts[:, None] + torch.arange(extent, dtype=torch.int64) * (step * itemsize)).flatten()
    return starts, run * itemsize


@functools.lru_cache  # thousands of tensors have few shapes
def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides, in elements, of a contiguous tensor."""
    return tuple(itertools.accumulate(reversed(shape[1:]), lambda a, b: a * b, initial=1))[::-1] if shape else ()
