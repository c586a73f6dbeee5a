"""Plain modules, and modules whose parameters are DTensors (FSDP2, tensor parallelism)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rl_memory_plugins.trainer.offloading import host_view
from rl_memory_plugins.trainer.sources.gather import gather_all
from rl_memory_plugins.trainer.sources.outgoing import Outgoing, Rename
from rl_memory_plugins.weights.manifest import TensorSpec
from rl_memory_plugins.weights.source import named_tensors

if TYPE_CHECKING:
    import torch


class ModelSource:
    """A module's parameters and persistent buffers, or a mapping such as a state dict; see `named_tensors`.

    DTensors are gathered when their turn comes, a few at a time: all ranks of their mesh must iterate, in step. Each
    casts its parts first, so that the gather moves and holds the dtype that is sent. Offloaded tensors, by
    `offload` or by `.cpu()`, are read where they are.

    Args:
        model: The module, or names and tensors. It is looked at anew for every update.
        dtype, rename: See `Outgoing`.
    """

    def __init__(
        self,
        model: torch.nn.Module | Mapping[str, torch.Tensor],
        *,
        dtype: torch.dtype | None = None,
        rename: Rename | None = None,
    ) -> None:
        self._model = model
        self._outgoing = Outgoing(dtype, rename)

    def specs(self) -> list[TensorSpec]:
        return [self._outgoing.spec(name, tensor.dtype, tensor.shape) for name, tensor in self._named()]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return gather_all(self._named(), self._outgoing)

    def resident(self) -> list[torch.Tensor] | None:
        """See `weights.source.ResidentSource`: none where some are gathered or cast."""
        tensors = [tensor.detach() for _, tensor in self._named()]
        for one in tensors:
            if hasattr(one, "full_tensor") or self._outgoing.sent_as(one.dtype) != one.dtype:
                return None
        return [host_view(one) for one in tensors]

    def _named(self) -> Iterator[tuple[str, Any]]:
        return named_tensors(self._model, self._outgoing.name)
