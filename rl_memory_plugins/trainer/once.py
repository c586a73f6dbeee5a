"""A source whose tensors are read once, although the sender may stop early."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from rl_memory_plugins.trainer.sources.model import only_reads
from rl_memory_plugins.weights.manifest import Mismatch, TensorSpec
from rl_memory_plugins.weights.overrides import as_sharded, resident_of, silent_s, tensors_in
from rl_memory_plugins.weights.sender import close_iterator
from rl_memory_plugins.weights.shards import Layout
from rl_memory_plugins.weights.source import (
    GroupingSource,
    NegotiableSource,
    Places,
    StableSource,
    TensorSource,
)

if TYPE_CHECKING:
    import torch


class Once:
    """A source that is iterated once. If the sender stops early, `drain` continues the same iteration."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source
        self._sharded = as_sharded(source)
        self._leaves_out = False
        self._tensors: Iterator[tuple[str, torch.Tensor]] | None = None

    def specs(self) -> list[TensorSpec]:
        return self._source.specs()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._tensors = self._source.tensors()
        return itertools.chain(self._tensors)  # a chain has no `close`, so the sender cannot end the iteration

    def tensors_in(self, places: Places) -> Iterator[tuple[str, torch.Tensor]]:
        self._tensors = tensors_in(self._source, places)
        return itertools.chain(self._tensors)

    @property
    def negotiable(self) -> bool:
        return isinstance(self._source, NegotiableSource) and self._source.negotiable

    def revise(self, mismatches: Sequence[Mismatch]) -> bool:
        return isinstance(self._source, NegotiableSource) and self._source.revise(mismatches)

    def resident(self) -> list[torch.Tensor] | None:
        return resident_of(self._source)

    @property
    def stable(self) -> bool:
        return isinstance(self._source, StableSource) and self._source.stable

    @property
    def only_reads(self) -> bool:
        return only_reads(self._source)

    @property
    def group_bytes(self) -> int:
        return self._source.group_bytes if isinstance(self._source, GroupingSource) else 0

    @property
    def silent_s(self) -> float:
        return silent_s(self._source)

    @property
    def gathered(self) -> int | None:
        return None if self._sharded is None else self._sharded.gathered

    def layouts(self) -> list[Layout | None] | None:
        return None if self._sharded is None else self._sharded.layouts()

    def leave_out(self, names: Collection[str]) -> None:
        assert self._sharded is not None
        self._leaves_out = True
        self._sharded.leave_out(names)

    def held(self, name: str) -> torch.Tensor:
        assert self._sharded is not None
        return self._sharded.held(name)

    def drain(self) -> None:
        """Take part in the remaining gathers."""
        for _ in self.tensors() if self._tensors is None else self._tensors:
            pass

    def close(self) -> None:
        """End the iteration, and with it the gathers."""
        close_iterator(self._tensors)
        if self._leaves_out and self._sharded is not None:
            self._sharded.leave_out(())
            self._leaves_out = False
