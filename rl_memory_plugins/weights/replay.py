"""Buckets of an update that the receiver can load again without new checks, because they are as in the latest update.

With thousands of tensors, the host's work for each tensor takes longer than the copies on the GPU.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from rl_memory_plugins.weights.manifest import BucketEntry
from rl_memory_plugins.weights.plan import Batch, LoadPlan

if TYPE_CHECKING:
    import torch

Position = tuple[int, int]
"""The index of the next tensor in the manifest, and how many of its bytes have arrived."""


class LoadedBucket(NamedTuple):
    """A bucket that was checked and loaded."""

    entries: list[BucketEntry]
    end: Position  # after it
    nbytes: int
    batch: Batch
    layout: Layout | None  # of the sources of `batch`, which has none then

    def run(self, slot: torch.Tensor) -> bool:
        """Load it again. Returns whether the slot holds all of it; without a layout no slot is used."""
        if self.layout is None:
            self.batch.run()
            return True
        sources = self.layout.sources(slot)
        if sources is None:
            return False
        batch = copy.copy(self.batch)
        batch.sources = sources
        batch.run()
        return True


class Layout:
    """Where the sources of a bucket lie in its slot, whichever slot that is.

    Args:
        slot: Memory of the slot, uint8.
        nbytes: How many of its bytes the bucket uses.
    """

    def __init__(self, sources: Sequence[torch.Tensor], slot: torch.Tensor, nbytes: int) -> None:
        base, self._nbytes, self._device = slot.storage_offset(), nbytes, slot.device
        self._places = [
            (source.dtype, source.shape, source.stride(), source.storage_offset() - base // source.element_size())
            for source in sources
        ]

    def sources(self, slot: torch.Tensor) -> list[torch.Tensor] | None:
        """The sources in another slot; `None` if it is too small, or on another device, which casts in another way."""
        if slot.numel() < self._nbytes or slot.device != self._device:
            return None
        whole: dict[torch.dtype, tuple[torch.Tensor, int]] = {}
        for dtype in {place[0] for place in self._places}:
            elements = slot[: slot.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
            whole[dtype] = elements, elements.storage_offset()
        found = []
        for dtype, shape, stride, start in self._places:
            elements, offset = whole[dtype]
            found.append(elements.as_strided(shape, stride, offset + start))
        return found


class Replays:
    """The buckets of the latest update."""

    def __init__(self) -> None:
        self._plan: LoadPlan | None = None
        self._memory: list[torch.Tensor] = []
        self._buckets: dict[Position, LoadedBucket] = {}  # by what is next before them

    def begin(self, plan: LoadPlan, memory: Sequence[torch.Tensor]) -> None:
        """Forget everything unless the plan and the allocations are those of the latest update.

        Args:
            memory: The trainer's allocations in which the tensors stay from update to update; without any, buckets
                come in slots.
        """
        same = plan is self._plan and len(memory) == len(self._memory)
        if not same or any(one is not other for one, other in zip(memory, self._memory, strict=True)):
            self._plan, self._memory, self._buckets = plan, list(memory), {}

    def find(self, begin: Position, entries: list[BucketEntry]) -> LoadedBucket | None:
        """The earlier bucket with exactly these entries; `None` if there was none."""
        bucket = self._buckets.get(begin)
        return bucket if bucket is not None and bucket.entries == entries else None

    def keep(
        self, begin: Position, end: Position, entries: list[BucketEntry], batch: Batch, slot: torch.Tensor
    ) -> None:
        """Store the writes of a bucket, of which the engine's loader got nothing.

        Args:
            begin, end: What is next before and after it.
            slot: The memory of the slot.
        """
        layout = None
        if not self._memory:
            if any(not _lies_in(source, slot) for source in batch.sources):  # it was cast elsewhere first
                return
            layout = Layout(batch.sources, slot, max(entry.offset + entry.nbytes for entry in entries))
            batch = copy.copy(batch)
            batch.sources = []  # they must not outlive the slot
        self._buckets[begin] = LoadedBucket(entries, end, sum(entry.nbytes for entry in entries), batch, layout)

    def clear(self) -> None:
        self._plan, self._memory, self._buckets = None, [], {}


def _lies_in(tensor: torch.Tensor, slot: torch.Tensor) -> bool:
    return bool(tensor.untyped_storage().data_ptr() == slot.untyped_storage().data_ptr())
