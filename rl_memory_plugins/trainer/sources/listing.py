"""The specs of plain tensors, as a former update has listed them.

To compare thousands of tensors with a former list takes a third of the time in which their specs are made. Only names,
dtypes and shapes are compared and kept: the tensors may be others, or lie elsewhere.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import NamedTuple

import torch

from rl_memory_plugins.trainer.sources.outgoing import PLAIN
from rl_memory_plugins.weights.host_copy import LOWEST
from rl_memory_plugins.weights.manifest import TensorSpec
from rl_memory_plugins.weights.recent import Recent
from rl_memory_plugins.weights.source import spec_of, without_wrappers


class _Known(NamedTuple):
    names: list[str]  # those of the entries
    dtypes: list[torch.dtype]
    shapes: list[torch.Size]
    specs: list[TensorSpec]


_recent = Recent[_Known]()


def list_plain(entries: Mapping[str, torch.Tensor]) -> tuple[list[torch.Tensor], list[TensorSpec]] | None:
    """A dictionary's tensors, sent as they are and under their names without the parts of wrappers.

    Of a tensor with several names (tied weights) the first one counts.

    Returns: `None` if it takes a closer look: at an entry of another type, a tensor that may have no memory, and a
        mapping that may make its tensors.
    """
    if type(entries) not in (dict, collections.OrderedDict):
        return None
    names, tensors = list(entries), list(entries.values())
    if not PLAIN.issuperset(map(type, tensors)):
        return None
    if len(set(map(id, tensors))) != len(tensors):  # tied weights: the first name counts
        first = {id(tensor): name for name, tensor in zip(reversed(names), reversed(tensors), strict=True)}
        names = [name for name in names if first[id(entries[name])] == name]
        tensors = [entries[name] for name in names]
    try:
        if min(map(torch.Tensor.data_ptr, tensors), default=0) < LOWEST:
            return None
    except RuntimeError:  # a sparse tensor has no address
        return None
    return tensors, _specs_of(names, tensors)


def _specs_of(names: list[str], tensors: list[torch.Tensor]) -> list[TensorSpec]:
    dtypes = [tensor.dtype for tensor in tensors]
    shapes = [tensor.shape for tensor in tensors]
    known = _recent.find(lambda one: one.names == names and one.dtypes == dtypes and one.shapes == shapes)
    if known is not None:
        return list(known.specs)
    specs = [spec_of(without_wrappers(name), tensor) for name, tensor in zip(names, tensors, strict=True)]
    _recent.add(_Known(names, dtypes, shapes, specs))
    return list(specs)
