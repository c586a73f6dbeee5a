"""A source for tensors from a generator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import msgspec

from rl_memory_plugins.trainer.sources.outgoing import Outgoing
from rl_memory_plugins.weights.casts import is_floating
from rl_memory_plugins.weights.manifest import TensorSpec

if TYPE_CHECKING:
    import torch


class StreamSource:
    """The tensors of a generator, whose names, dtypes and shapes are known in advance.

    Args:
        specs: The tensors in the generator's order, with the dtypes in which they are sent.
        make: Returns a new iterable of names and tensors. Called for every update: a failed update can be repeated.
        dtype: The dtype to which floating-point tensors are cast.
    """

    def __init__(
        self,
        specs: Iterable[TensorSpec],
        make: Callable[[], Iterable[tuple[str, torch.Tensor]]],
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._specs = [
            msgspec.structs.replace(spec, chosen=True) if dtype is not None and is_floating(spec.dtype) else spec
            for spec in specs
        ]
        self._make = make
        self._outgoing = Outgoing(dtype)

    def specs(self) -> list[TensorSpec]:
        return self._specs

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._make():
            yield name, self._outgoing.cast(tensor)
