"""Buckets of an update that the receiver can load again without new checks, because the memory is the same.

With thousands of tensors, the host's work for each tensor takes longer than the copies on the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from rl_memory_plugins.weights.manifest import BucketEntry
from rl_memory_plugins.weights.plan import Batch, LoadPlan

if TYPE_CHECKING:
    import torch


class LoadedBucket(NamedTuple):
    """A bucket that was checked and loaded."""

    entries: list[BucketEntry]
    batch: Batch
    nbytes: int


class Replays:
    """The buckets of the latest update whose trainer keeps its memory (`keep_mapped`)."""

    def __init__(self) -> None:
        self._plan: LoadPlan | None = None
        self._memory: list[torch.Tensor] = []
        self._buckets: dict[int, LoadedBucket] = {}  # by the index of their first tensor

    def begin(self, plan: LoadPlan, memory: Sequence[torch.Tensor]) -> None:
        """Forget everything unless the plan and the opened allocations are those of the latest update."""
        same = plan is self._plan and len(memory) == len(self._memory)
        if not same or any(one is not other for one, other in zip(memory, self._memory, strict=True)):
            self._plan, self._memory, self._buckets = plan, list(memory), {}

    def find(self, entries: list[BucketEntry]) -> LoadedBucket | None:
        """The earlier bucket with exactly these entries; `None` if there was none."""
        bucket = self._buckets.get(entries[0].index) if entries else None
        return bucket if bucket is not None and bucket.entries == entries else None

    def keep(self, entries: list[BucketEntry], batch: Batch) -> None:
        """Store the copies of a bucket. It must hold whole tensors only, and none for the engine's loader."""
        self._buckets[entries[0].index] = LoadedBucket(entries, batch, sum(entry.nbytes for entry in entries))

    def clear(self) -> None:
        self._plan, self._memory, self._buckets = None, [], {}
