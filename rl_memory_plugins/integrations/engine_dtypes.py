"""Updates by trainers that keep weights in other dtypes than the engine, as float32 masters: the engine's answer says
which dtypes to send."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from rl_memory_plugins.errors import ManifestError

if TYPE_CHECKING:
    import torch

    from rl_memory_plugins.trainer import Peers, TensorSource, TensorSpec


class EngineDtypes:
    """The dtypes in which the engines of one trainer take its tensors. All ranks of the trainer make and call it."""

    def __init__(self) -> None:
        self._refused: Mapping[str, str] = {}  # by name: the engine's dtype, where it has refused the trainer's

    def push(
        self, engines: Any, source: Callable[[Mapping[str, str]], TensorSource], peers: Peers, **options: Any
    ) -> None:
        """`push_from_all`, again if the engine has refused dtypes. A refusal comes before the first gather.

        Args:
            engines, peers, **options: See `push_from_all`.
            source: Makes the tensors to send from the dtypes by name that are not the trainer's.

        Raises:
            RLMemoryError: on every rank, if the update failed on one.
        """
        from rl_memory_plugins.trainer import push_from_all

        while True:  # all ranks hear of the tensors that the engine refuses of one rank, then of the next
            try:
                push_from_all(engines, source(self._refused), peers, **options)
                return
            except ManifestError as error:
                found = error.details.get("mismatches", ())
                wrong = {
                    one["name"]: one["expected"] for one in found if one["kind"] == "dtype" and one.get("expected")
                }
                if wrong.items() <= self._refused.items():
                    raise
                self._refused = {**self._refused, **wrong}


def cast_stream(
    specs: Iterable[TensorSpec], tensors: Iterable[tuple[str, torch.Tensor]], dtypes: Mapping[str, str]
) -> TensorSource:
    """A trainer's tensors as a source that casts them one by one.

    Args:
        specs: The trainer's tensors, in their order.
        tensors: Their names and values. Read once.
        dtypes: By name, the dtypes to send where they are not the trainer's.
    """
    import torch

    from rl_memory_plugins.trainer import StreamSource, TensorSpec

    sent = [TensorSpec(spec.name, dtypes.get(spec.name, spec.dtype), spec.shape) for spec in specs]
    casts = {spec.name: getattr(torch, spec.dtype) for spec in sent}
    return StreamSource(sent, lambda: ((name, tensor.to(casts.get(name, tensor.dtype))) for name, tensor in tensors))
