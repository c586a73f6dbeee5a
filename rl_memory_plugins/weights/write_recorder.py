"""Records the memory that a loader overwrites, for loaders that do not report which parameters they loaded.

Memory counts as overwritten if its new bytes do not depend on the old ones: `mul_` overwrites nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rl_memory_plugins.weights.coverage import Coverage
from rl_memory_plugins.weights.pools import inside, intercepted

aten = torch.ops.aten

_OVERWRITING = {
    *(aten.copy_, aten._foreach_copy_, aten.fill_, aten.zero_, aten._foreach_zero_),
    *(aten.normal_, aten.uniform_, aten.random_, aten.bernoulli_, aten.exponential_, aten.log_normal_),
}
"""In-place operators that overwrite every element."""


def _put(mask: torch.Tensor, indices: Any, values: Any, accumulate: bool = False) -> None:
    if not accumulate:
        mask[tuple(slice(None) if index is None else index for index in indices)] = True


def _fill_rows(mask: torch.Tensor, dim: int, index: torch.Tensor, value: Any) -> None:
    mask.index_fill_(dim, index, True)


_SELECTING: dict[Any, Callable[..., None]] = {
    aten.index_put_: _put,
    aten.index_copy_: _fill_rows,
    aten.index_fill_: _fill_rows,
}
"""In-place operators that overwrite some elements: each function marks them in a mask of the tensor's shape."""


_FLAT = {tuple, list}

_SCALARS = {type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format}


class WriteRecorder(TorchDispatchMode):  # type: ignore[misc]
    """Adds the memory that operators overwrite to a coverage. The operators run unchanged."""

    def __init__(self, overwritten: Coverage) -> None:
        super().__init__()
        self._overwritten = overwritten

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func._schema.is_mutable:
            for tensor in overwritten_by(func, args, kwargs):
                if not tensor.is_meta:
                    self._overwritten.add(tensor)
            selecting = _SELECTING.get(func._overloadpacket)
            if selecting is not None and not args[0].is_meta and not _is_recorded(args[0]):
                mask = torch.zeros(args[0].shape, dtype=torch.bool, device=args[0].device)
                selecting(mask, *args[1:], **kwargs)
                self._overwritten.add_where(args[0], mask)
        return result


def _is_recorded(tensor: torch.Tensor) -> bool:
    """Whether a CUDA graph is being captured. The operators then write nothing, and must not synchronise."""
    return tensor.is_cuda and bool(torch.cuda.is_current_stream_capturing())


def written_by(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that an operator writes, by its schema."""
    return _split(func, args, kwargs)[0] if func._schema.is_mutable else []


def overwritten_by(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that an operator overwrites completely without reading them."""
    written, read = _split(func, args, kwargs)
    if func._overloadpacket in _OVERWRITING:
        return written
    if func.namespace != "aten" or not any(argument.is_out for argument in func._schema.arguments):
        return []
    known = {tensor.untyped_storage()._cdata for tensor in read}
    return [tensor for tensor in written if tensor.untyped_storage()._cdata not in known]


def _split(func: Any, args: Any, kwargs: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors that an operator writes, and its other tensors, by its schema."""
    written: list[torch.Tensor] = []
    read: list[torch.Tensor] = []
    for position, (name, writes) in enumerate(_arguments(func)):
        value = args[position] if position < len(args) else kwargs.get(name)
        (written if writes else read).extend(tensors_in(value))
    return written, read


@functools.cache
def _arguments(func: Any) -> list[tuple[str, bool]]:
    """The arguments of an operator: their names, and whether it writes them."""
    return [(one.name, one.alias_info is not None and one.alias_info.is_write) for one in func._schema.arguments]


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors among an operator's arguments or results."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if type(tree) in _FLAT:  # the common case; `tree_leaves` takes a third of a trace
        found: list[torch.Tensor] = []
        for one in tree:
            if isinstance(one, torch.Tensor):
                found.append(one)
            elif type(one) not in _SCALARS:
                found += tensors_in(one)
        return found
    if type(tree) in _SCALARS:
        return []
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@contextmanager
def recording(overwritten: Coverage) -> Iterator[None]:
    """Record what this thread overwrites, and its calls in thread pools, which loaders of experts use."""
    with intercepted(inside(lambda: recording(overwritten))), WriteRecorder(overwritten):
        yield
