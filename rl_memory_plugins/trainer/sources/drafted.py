"""The tensors of a target model and of its draft model as one source."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from rl_memory_plugins.weights.manifest import TensorSpec
from rl_memory_plugins.weights.names import DRAFT
from rl_memory_plugins.weights.source import GroupingSource, ResidentSource, TensorSource

if TYPE_CHECKING:
    import torch


class DraftedSource:
    """The target's tensors, and then the draft's. The names of the draft's get the prefix `draft.`.

    Args:
        target: The source of the target's tensors.
        draft: The source of the draft's tensors, under the names of the draft's own checkpoint.
    """

    def __init__(self, target: TensorSource, draft: TensorSource) -> None:
        self._target = target
        self._draft = draft

    def specs(self) -> list[TensorSpec]:
        own = [msgspec.structs.replace(spec, name=DRAFT + spec.name) for spec in self._draft.specs()]
        return [*self._target.specs(), *own]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return itertools.chain(self._target.tensors(), self._renamed())

    def _renamed(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._draft.tensors():
            yield DRAFT + name, tensor

    @property
    def group_bytes(self) -> int:
        """See `GroupingSource`: one source is read after the other."""
        sources = (self._target, self._draft)
        return max(source.group_bytes if isinstance(source, GroupingSource) else 0 for source in sources)

    def resident(self) -> list[torch.Tensor] | None:
        """See `ResidentSource`. `None` if one of the sources makes its tensors."""
        found: list[torch.Tensor] = []
        for source in (self._target, self._draft):
            tensors = source.resident() if isinstance(source, ResidentSource) else None
            if tensors is None:
                return None
            found += tensors
        return found


def with_draft(target: TensorSource, draft: TensorSource | None) -> TensorSource:
    """The source of an update of the target, and of its draft model if there is a source of that."""
    return target if draft is None else DraftedSource(target, draft)
