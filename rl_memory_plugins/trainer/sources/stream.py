"""A source for tensors from a generator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from rl_memory_plugins.trainer.sources.outgoing import Dtypes, Outgoing
from rl_memory_plugins.weights.manifest import Mismatch, TensorSpec


class StreamSource:
    """The tensors of a generator, whose names, dtypes and shapes are known in advance.

    Args:
        specs: The tensors in the generator's order, with the trainer's dtypes, or with those of `dtype`.
        make: Returns a new iterable of names and tensors. Called for every update: a failed update can be repeated.
        dtype: See `Outgoing`.
    """

    def __init__(
        self,
        specs: Iterable[TensorSpec],
        make: Callable[[], Iterable[tuple[str, torch.Tensor]]],
        *,
        dtype: Dtypes = None,
    ) -> None:
        self._given = list(specs)
        self._make = make
        self._outgoing = Outgoing(dtype)

    def specs(self) -> list[TensorSpec]:
        return [self._outgoing.spec(spec.name, getattr(torch, spec.dtype), spec.shape) for spec in self._given]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._make():
            yield name, self._outgoing.cast(name, tensor)

    @property
    def negotiable(self) -> bool:
        """See `weights.source.NegotiableSource`."""
        return self._outgoing.negotiable

    def revise(self, mismatches: Sequence[Mismatch]) -> bool:
        return self._outgoing.revise(mismatches)
