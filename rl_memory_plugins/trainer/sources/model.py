"""Modules and mappings of tensors: plain, offloaded, or of DTensors (FSDP2, tensor parallelism)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch

from rl_memory_plugins.errors import InvalidRequestError
from rl_memory_plugins.trainer.offloading import host_view
from rl_memory_plugins.trainer.sources.gather import gather_all
from rl_memory_plugins.trainer.sources.outgoing import Outgoing, Rename
from rl_memory_plugins.weights.manifest import TensorSpec
from rl_memory_plugins.weights.source import TensorSource, named_tensors

Tensors: TypeAlias = TensorSource | torch.nn.Module | Mapping[str, torch.Tensor]
"""The tensors to send, for `as_source`."""


class ModelSource:
    """A module's parameters and persistent buffers, or a mapping such as a state dict; see `named_tensors`.

    DTensors are gathered when their turn comes, a few at a time: all ranks of their mesh must iterate, in step. Each
    casts its parts first, so that the gather moves and holds the dtype that is sent. Offloaded tensors, by
    `offload` or by `.cpu()`, are read where they are.

    Args:
        model: The module, or names and tensors. It is looked at anew for every update. A mapping that is no `dict`
            may make each tensor when it is asked for: one of them exists at a time.
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
        self._kept = isinstance(model, (torch.nn.Module, dict))  # not made when they are asked for
        self._listed: list[tuple[str, Any]] | None = None  # by `specs()`, until `tensors()` gives them

    def specs(self) -> list[TensorSpec]:
        """See `TensorSource`.

        Raises:
            InvalidRequestError: a tensor has no memory, since other code than `offload` has moved it away; see also
                `named_tensors`.
        """
        self._listed = None
        specs = []
        named = self._named()
        for name, tensor in named:
            self._check(name, tensor)
            specs.append(self._outgoing.spec(name, tensor.dtype, tensor.shape))
        self._listed = named if isinstance(named, list) else None
        return specs

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        named, self._listed = self._now(), None  # listing the tensors takes as long as sending them
        return gather_all(named, self._outgoing)

    def resident(self) -> list[torch.Tensor] | None:
        """See `weights.source.ResidentSource`: none where some are gathered, cast, or made when they are asked for."""
        if not self._kept:
            return None
        tensors = [tensor for _, tensor in self._now()]
        for one in tensors:
            if hasattr(one, "full_tensor") or self._outgoing.sent_as(one.dtype) != one.dtype:
                return None
        return [host_view(one.detach() if one.requires_grad else one) for one in tensors]

    def _now(self) -> Iterable[tuple[str, Any]]:
        return self._named() if self._listed is None else self._listed

    def _named(self) -> Iterable[tuple[str, Any]]:
        named = named_tensors(self._model, self._outgoing.name)
        return list(named) if self._kept else named

    def _check(self, name: str, tensor: Any) -> None:
        part = getattr(tensor, "_local_tensor", tensor)
        if part.nbytes and not part.untyped_storage().nbytes() and host_view(part) is part:
            raise InvalidRequestError(
                f"{name} has no memory: other code than Offloader has moved it away; load it first", name=name
            )


class OwnSource(ModelSource):
    """A `ModelSource` of a process that sends without the trainer's other processes.

    `specs()` refuses a tensor that is sharded over several processes: to gather it would wait for the others forever.
    """

    def _check(self, name: str, tensor: Any) -> None:
        if hasattr(tensor, "full_tensor") and tensor.device_mesh.size() > 1:
            raise InvalidRequestError(
                f"{name} is sharded over {tensor.device_mesh.size()} processes: call push_from_all in all of them, or "
                "send a ModelSource, over whose tensors() the other processes iterate too",
                name=name,
            )
        super()._check(name, tensor)


def as_source(tensors: Tensors, kind: type[ModelSource] = ModelSource) -> TensorSource:
    """Convert a module or a mapping to a source of this kind. Another source stays as it is."""
    return kind(tensors) if isinstance(tensors, (torch.nn.Module, Mapping)) else tensors
