"""Which tensors a model's loader writes, found without writing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from rl_memory_plugins.weights.casts import CastRule
from rl_memory_plugins.weights.loader_run import Loader, run_traced
from rl_memory_plugins.weights.manifest import TensorSpec
from rl_memory_plugins.weights.trace import Tracer

if TYPE_CHECKING:
    import torch


class Written(NamedTuple):
    """Which tensors a loader writes.

    Attributes:
        names: Those that it writes anywhere.
        only_in: Those that it writes only into given memory.
    """

    names: frozenset[str]
    only_in: frozenset[str]


def written_names(load_weights: Loader, specs: Sequence[TensorSpec], memory: Iterable[torch.Tensor]) -> Written:
    """Run the loader on meta tensors, as `trace` does, and find out which it writes."""
    tracer = Tracer(specs, casts=CastRule(any=True))
    run_traced(load_weights, tracer, [spec.name for spec in specs])
    tracer.finish(None)
    given = {tensor.untyped_storage().data_ptr() for tensor in memory}
    only_in = frozenset(
        name
        for name, steps in tracer.steps.items()
        if given and all(step.destination.untyped_storage().data_ptr() in given for step in steps)
    )
    return Written(frozenset(tracer.steps.keys() | tracer.opaque.keys()), only_in)
