"""Modules and mappings of tensors: plain, offloaded, or of DTensors (FSDP2, tensor parallelism)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from rl_memory_plugins.errors import InvalidRequestError
from rl_memory_plugins.trainer.offloading import host_view
from rl_memory_plugins.trainer.sources.gather import gather_all
from rl_memory_plugins.trainer.sources.outgoing import Dtypes, Outgoing, Rename
from rl_memory_plugins.weights.manifest import Mismatch, TensorSpec
from rl_memory_plugins.weights.source import TensorSource, named_tensors

Tensors: TypeAlias = TensorSource | torch.nn.Module | Mapping[str, torch.Tensor]
"""The tensors to send, for `as_source`."""


class ModelSource:
    """A module's parameters and persistent buffers, or a mapping such as a state dict; see `named_tensors`.

    DTensors are gathered in batches during the iteration: all ranks of their mesh must iterate in step. Each rank casts
    its shards first, so that a gather moves only the dtype that is sent. Tensors in host memory, by `offload` or by
    `.cpu()`, are read there.

    Args:
        model: The module, or names and tensors. Every update reads it again. A mapping that is no `dict` may make each
            tensor on access; the source then holds only one tensor at a time.
        dtype, rename: See `Outgoing`.
    """

    def __init__(
        self,
        model: torch.nn.Module | Mapping[str, torch.Tensor],
        *,
        dtype: Dtypes = None,
        rename: Rename | None = None,
    ) -> None:
        self._model = model
        self._outgoing = Outgoing(dtype, rename)
        self._holds_tensors = isinstance(model, (torch.nn.Module, dict))  # does not make them on access
        self._listed: list[tuple[str, Any]] | None = None  # from `specs` to `tensors`: listing takes as long as sending

    def specs(self) -> list[TensorSpec]:
        """See `TensorSource`.

        Raises:
            InvalidRequestError: a tensor has no memory, because other code than `offload` has freed it; see also
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
        named, self._listed = self._named(), None
        return gather_all(named, self._outgoing)

    @property
    def negotiable(self) -> bool:
        """See `weights.source.NegotiableSource`."""
        return self._outgoing.negotiable

    def revise(self, mismatches: Sequence[Mismatch]) -> bool:
        return self._outgoing.revise(mismatches)

    def resident(self) -> list[torch.Tensor] | None:
        """See `weights.source.ResidentSource`. `None` if a tensor is gathered, cast, or made on access."""
        if not self._holds_tensors:
            return None
        named = list(self._named())
        if any(hasattr(t, "full_tensor") or self._outgoing.sent_as(name, t.dtype) != t.dtype for name, t in named):
            return None
        return [host_view(tensor.detach() if tensor.requires_grad else tensor) for _, tensor in named]

    def _named(self) -> Iterable[tuple[str, Any]]:
        """The tensors by the checkpoint's names: as `specs` has listed them, or else as they are now."""
        if self._listed is not None:
            return self._listed
        named = named_tensors(self._model, self._outgoing.name)
        return list(named) if self._holds_tensors else named

    def _check(self, name: str, tensor: Any) -> None:
        part = getattr(tensor, "_local_tensor", tensor)
        if part.nbytes and not part.untyped_storage().nbytes() and host_view(part) is part:
            raise InvalidRequestError(
                f"{name} has no memory: other code than Offloader has freed it; load it first", name=name
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
