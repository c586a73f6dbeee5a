"""Any code that makes tensors one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from rl_memory_plugins.trainer.sources.outgoing import Outgoing
from rl_memory_plugins.weights.manifest import TensorSpec

if TYPE_CHECKING:
    import torch


class StreamSource:
    """The tensors of a generator, whose names, dtypes and shapes are known before it runs.

    Args:
        specs: What will come, in order, in the dtypes that are sent.
        make: Called for every update (so that one that broke off can be repeated); gives names and tensors.
        dtype: What floating-point tensors are cast to as they come.
    """

    def __init__(
        self,
        specs: Iterable[TensorSpec],
        make: Callable[[], Iterable[tuple[str, torch.Tensor]]],
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._specs = list(specs)
        self._make = make
        self._outgoing = Outgoing(dtype)

    def specs(self) -> list[TensorSpec]:
        return self._specs

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._make():
            yield name, self._outgoing.cast(tensor)
