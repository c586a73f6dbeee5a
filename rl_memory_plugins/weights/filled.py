"""What the load of the engine's own checkpoint fills of a model's parameters, found by a trace, without writing.

A parameter that the load does not fill at all holds the value that the engine gave it: the bias of a reward model's
head, the query tokens of a vision model that serves text. Elements that the load does not fill of other parameters are
padding.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch

from rl_memory_plugins.errors import ManifestError
from rl_memory_plugins.weights.casts import CastRule
from rl_memory_plugins.weights.loader_run import Loader, run_traced
from rl_memory_plugins.weights.manifest import ITEMSIZE, TensorSpec
from rl_memory_plugins.weights.trace import Tracer


class Region(NamedTuple):
    """Elements of a parameter: size, strides, and the distance of the first from the parameter's first, in elements."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, parameter: torch.Tensor) -> torch.Tensor:
        """The view of these elements."""
        plain = parameter.detach().as_subclass(torch.Tensor)
        return plain.as_strided(self.size, self.stride, plain.storage_offset() + self.offset)


Filled = Mapping[str, tuple[Region, ...]]
"""By the name of each parameter that a load does not fill whole, the regions that it fills."""


def filled_by(
    load_weights: Loader,
    checkpoint: Mapping[str, TensorSpec],
    parameters: Mapping[str, torch.Tensor],
    unchanged: Callable[[], AbstractContextManager[None]],
) -> Filled:
    """Run the loader on meta tensors of the checkpoint.

    Args:
        load_weights: The model's loader.
        checkpoint: The tensors of the engine's checkpoint; empty if they are not known.
        parameters: The parameters by name.
        unchanged: The model has its layers again at the exit of this context. A loader may make new tensors.

    Returns: nothing if the trace cannot tell: the checkpoint is not known, the loader does not take it as it is, or the
        loader writes where the trace cannot follow.
    """
    if not checkpoint or any(spec.dtype not in ITEMSIZE for spec in checkpoint.values()):
        return {}
    tracer = Tracer(checkpoint.values(), parameters.values(), casts=CastRule(any=True))
    try:
        with unchanged():
            failures, untried = run_traced(load_weights, tracer, list(checkpoint))
    except ManifestError:  # the loader takes nothing at all
        return {}
    lacking = {name: one for name, one in parameters.items() if tracer.written.fraction(one) < 1}
    if failures or untried or len(lacking) == len(parameters) or any(map(tracer.may_have_written, lacking.values())):
        return {}
    by_storage: dict[int, list[torch.Tensor]] = defaultdict(list)
    for destination in tracer.destinations:
        by_storage[destination.untyped_storage().data_ptr()].append(destination)
    found = {name: _regions(one, by_storage[one.untyped_storage().data_ptr()]) for name, one in lacking.items()}
    return {name: regions for name, regions in found.items() if regions is not None}


def _regions(parameter: torch.Tensor, destinations: Iterable[torch.Tensor]) -> tuple[Region, ...] | None:
    """The destinations as regions of the parameter; `None` if one of them is not a region of this parameter alone."""
    regions = []
    first, last = _range(parameter)
    for destination in destinations:
        start, end = _range(destination)
        if start >= last or end <= first:
            continue
        if destination.dtype != parameter.dtype or not first <= start < end <= last:
            return None
        offset = (start - first) // parameter.element_size()
        regions.append(Region(tuple(destination.shape), tuple(destination.stride()), offset))
    return tuple(dict.fromkeys(regions))


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of a tensor's first byte, and after its last."""
    if not tensor.numel():
        return tensor.data_ptr(), tensor.data_ptr()
    last = sum((extent - 1) * step for extent, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
