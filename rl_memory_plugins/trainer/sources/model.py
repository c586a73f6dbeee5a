"""Plain modules, and modules whose parameters are DTensors (FSDP2, tensor parallelism)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from rl_memory_plugins.trainer.offloading import host_view
from rl_memory_plugins.trainer.sources.outgoing import Outgoing, Rename
from rl_memory_plugins.weights.manifest import TensorSpec


class ModelSource:
    """A module's parameters and persistent buffers, or a mapping such as a state dict.

    A DTensor is gathered when its turn comes: all ranks of its mesh must iterate, in step. Each casts its part
    first, so that the gather moves and holds the dtype that is sent. Offloaded tensors, by `offload` or by
    `.cpu()`, are read where they are. Tied weights are sent once, under the first name.

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
        for name, tensor in self._named():
            if hasattr(tensor, "full_tensor"):
                yield name, _gather(tensor, self._outgoing)
            else:
                yield name, self._outgoing.cast(host_view(tensor.detach()))

    def resident(self) -> list[torch.Tensor] | None:
        """See `weights.source.ResidentSource`: none where some are gathered or cast."""
        tensors = [tensor.detach() for _, tensor in self._named()]
        for one in tensors:
            if hasattr(one, "full_tensor") or self._outgoing.sent_as(one.dtype) != one.dtype:
                return None
        return [host_view(one) for one in tensors]

    def _named(self) -> Iterator[tuple[str, Any]]:
        model = self._model
        tensors = model.state_dict(keep_vars=True) if isinstance(model, torch.nn.Module) else model
        seen = set()
        for name, tensor in tensors.items():
            sent = self._outgoing.name(name)
            if id(tensor) not in seen and sent is not None:
                seen.add(id(tensor))
                yield sent, tensor


def _gather(tensor: Any, outgoing: Outgoing) -> torch.Tensor:
    """A DTensor's whole, from its parts wherever they lie; a collective."""
    from torch.distributed.tensor import DTensor

    part = outgoing.cast(host_view(tensor._local_tensor)).to(tensor.device_mesh.device_type)
    sharded = DTensor.from_local(
        part, tensor.device_mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride(), run_check=False
    )
    whole: torch.Tensor = sharded.full_tensor()
    return whole
