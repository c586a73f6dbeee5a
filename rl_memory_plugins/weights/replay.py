"""Buckets of kept memory that come again: what they did last time is done again, with no look at each tensor.

With thousands of tensors the host's part of an update otherwise takes longer than the copies on the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from rl_memory_plugins.weights.manifest import BucketEntry
from rl_memory_plugins.weights.plan import Batch, LoadPlan

if TYPE_CHECKING:
    import torch


class Known(NamedTuple):
    """A bucket that was checked, and whose tensors were loaded."""

    entries: list[BucketEntry]
    batch: Batch
    nbytes: int


class Replays:
    """The buckets of the latest update from memory that its trainer keeps for the next one."""

    def __init__(self) -> None:
        self._plan: LoadPlan | None = None
        self._memory: list[torch.Tensor] = []
        self._known: dict[int, Known] = {}  # by the index of their first tensor

    def begin(self, plan: LoadPlan, memory: Sequence[torch.Tensor]) -> None:
        """Forget everything unless the plan and the opened allocations are those of the latest update."""
        same = plan is self._plan and len(memory) == len(self._memory)
        if not same or any(one is not other for one, other in zip(memory, self._memory, strict=True)):
            self._plan, self._memory, self._known = plan, list(memory), {}

    def find(self, entries: list[BucketEntry]) -> Known | None:
        """The same bucket of an earlier update."""
        known = self._known.get(entries[0].index) if entries else None
        return known if known is not None and known.entries == entries else None

    def keep(self, entries: list[BucketEntry], batch: Batch) -> None:
        """Note what a bucket of whole tensors did, none of which the engine's loader had to load."""
        self._known[entries[0].index] = Known(entries, batch, sum(entry.nbytes for entry in entries))

    def clear(self) -> None:
        self._plan, self._memory, self._known = None, [], {}
