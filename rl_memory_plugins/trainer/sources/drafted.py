"""The tensors of a target model and of its draft model as one source."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from rl_memory_plugins.trainer.sources.model import only_reads
from rl_memory_plugins.weights.manifest import Mismatch, TensorSpec
from rl_memory_plugins.weights.names import DRAFT
from rl_memory_plugins.weights.overrides import is_stable, resident_of, silent_s, tensors_in
from rl_memory_plugins.weights.source import GroupingSource, NegotiableSource, Places, TensorSource

if TYPE_CHECKING:
    import torch


class DraftedSource:
    """The target's tensors, and then the draft's. The names of the draft's get the prefix `draft.`.

    Tensors that lie in several processes are gathered, also where the sources alone would be sent from their shards.

    Args:
        target: The source of the target's tensors.
        draft: The source of the draft's tensors, under the names of the draft's own checkpoint.
    """

    def __init__(self, target: TensorSource, draft: TensorSource) -> None:
        self._target = target
        self._draft = draft
        self._both = (target, draft)

    def specs(self) -> list[TensorSpec]:
        own = [msgspec.structs.replace(spec, name=DRAFT + spec.name) for spec in self._draft.specs()]
        return [*self._target.specs(), *own]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return itertools.chain(self._target.tensors(), self._renamed())

    def tensors_in(self, places: Places) -> Iterator[tuple[str, torch.Tensor]]:
        """See `PlacingSource`. Those of the draft, which are few, are copied."""
        return itertools.chain(tensors_in(self._target, places), self._renamed())

    def _renamed(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._draft.tensors():
            yield DRAFT + name, tensor

    @property
    def group_bytes(self) -> int:
        """See `GroupingSource`: one source is read after the other."""
        return max(source.group_bytes if isinstance(source, GroupingSource) else 0 for source in self._both)

    @property
    def stable(self) -> bool:
        """See `StableSource`."""
        return all(map(is_stable, self._both))

    @property
    def silent_s(self) -> float:
        """See `ArrivingSource`: one source is read after the other."""
        return max(map(silent_s, self._both))

    @property
    def only_reads(self) -> bool:
        """See `ReadingSource`."""
        return all(map(only_reads, self._both))

    @property
    def negotiable(self) -> bool:
        """See `NegotiableSource`."""
        return any(isinstance(source, NegotiableSource) and source.negotiable for source in self._both)

    def revise(self, mismatches: Sequence[Mismatch]) -> bool:
        """See `NegotiableSource`. Each source learns of its own tensors, by its own names."""
        own = [one for one in mismatches if not one.name.startswith(DRAFT)]
        rest = [one for one in mismatches if one.name.startswith(DRAFT)]
        draft = [msgspec.structs.replace(one, name=one.name.removeprefix(DRAFT)) for one in rest]
        found = False
        for source, theirs in zip(self._both, (own, draft), strict=True):
            if theirs and isinstance(source, NegotiableSource):
                found = source.revise(theirs) or found
        return found

    def resident(self) -> list[torch.Tensor] | None:
        """See `ResidentSource`. `None` if one of the sources makes its tensors."""
        found: list[torch.Tensor] = []
        for source in self._both:
            tensors = resident_of(source)
            if tensors is None:
                return None
            found += tensors
        return found


def with_draft(target: TensorSource, draft: TensorSource | None) -> TensorSource:
    """The source of an update of the target, and of its draft model if there is a source of that."""
    return target if draft is None else DraftedSource(target, draft)
