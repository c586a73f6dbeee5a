"""Tensors that a model's loader computes of weights and assigns to layers, such as the absorbed projections of MLA."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from rl_memory_plugins.engines.saved_layers import alike

_TABLES = frozenset(vars(torch.nn.Module()))
"""The attributes that every module has: its parameters, buffers and children."""

_MOST, _DEEPEST = 64, 3
"""Longer containers, and deeper ones, are tables of something else."""


@contextmanager
def in_place(model: torch.nn.Module) -> Iterator[None]:
    """The body runs the model's loader. What it has computed anew lies at its exit where the former tensors lie.

    CUDA graphs read these by their addresses. A loader assigns new ones (SGLang's Kimi-Linear: `w_kc`), puts several
    into a tuple (Kimi-K3), or gives parameters other memory (Kimi-K3 too). What has another shape, dtype or device
    stays where the loader has made it, and so does what would overwrite a parameter, a buffer, or another such tensor.
    After an error the layers have their former tensors, whatever these hold.
    """
    parameters = [(parameter, parameter.data) for parameter in model.parameters()]
    former = [
        (vars(module), name, _saved(value))
        for module in model.modules()
        for name, value in vars(module).items()
        if name not in _TABLES and _has_tensors(value)
    ]
    try:
        yield
        for parameter, memory in parameters:
            if parameter.data_ptr() != memory.data_ptr() and alike(parameter, memory):
                memory.copy_(parameter.data)
                parameter.data = memory
        changed = [one for one in former if _differs(one[0].get(one[1]), one[2])]
        owned = {_storage(tensor) for tensor in (*model.parameters(), *model.buffers())} if changed else set()
        written: dict[int, torch.Tensor] = {}  # by address, what has been copied there

        def put(new: Any, old: torch.Tensor) -> Any:
            if not isinstance(new, torch.Tensor) or new is old or not alike(new, old):
                return new
            if _storage(old) in owned:
                return old if torch.equal(old, new) else new  # a view of parameters, which have their new values
            if written.setdefault(old.data_ptr(), new) is not new:
                return new
            old.data.copy_(new.data)
            return old

        for attributes, name, old in changed:
            attributes[name] = _merged(attributes.get(name), old, put)
    except BaseException:
        for parameter, memory in parameters:
            parameter.data = memory
        for attributes, name, old in former:
            attributes[name] = _restored(old)
        raise


def _has_tensors(value: Any, depth: int = _DEEPEST) -> bool:
    """Whether this is a tensor, or a container of some."""
    if isinstance(value, torch.Tensor):
        return not value.is_meta
    if not depth or not isinstance(value, (dict, list, tuple)) or len(value) > _MOST:
        return False
    return any(_has_tensors(one, depth - 1) for one in (value.values() if isinstance(value, dict) else value))


class _Saved(NamedTuple):
    """A container, and what was in it: keys and values, of which those that hold tensors are saved too."""

    container: Any
    content: list[tuple[Any, Any]]


def _saved(value: Any, depth: int = _DEEPEST) -> Any:
    if isinstance(value, torch.Tensor) or not _has_tensors(value, depth):
        return value
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return _Saved(value, [(key, _saved(one, depth - 1)) for key, one in items])


def _restored(old: Any) -> Any:
    """The value as it was when it was saved."""
    if not isinstance(old, _Saved):
        return old
    container = old.container
    content = [(key, _restored(one)) for key, one in old.content]
    if isinstance(container, list):
        container[:] = [one for _, one in content]
    elif isinstance(container, dict):
        container.clear()
        container.update(content)
    return container


def _get(container: Any, key: Any) -> Any:
    try:
        return container[key]
    except (LookupError, TypeError):
        return None


def _differs(new: Any, old: Any) -> bool:
    """Whether a value has others of the tensors than when it was saved."""
    if isinstance(old, _Saved):
        return any(_differs(_get(new, key), one) for key, one in old.content)
    return isinstance(old, torch.Tensor) and new is not old


def _merged(new: Any, old: Any, put: Callable[[Any, torch.Tensor], Any]) -> Any:
    """The new value, in which `put` decides about each tensor in the place of a former one."""
    if isinstance(old, torch.Tensor):
        return put(new, old)
    if not isinstance(old, _Saved) or type(new) is not type(old.container) or len(new) != len(old.content):
        return new
    merged = {key: _merged(_get(new, key), one, put) for key, one in old.content}
    if isinstance(new, dict):
        new.update((key, one) for key, one in merged.items() if key in new)
    elif isinstance(new, list):
        new[:] = merged.values()
    else:
        return type(new)(*merged.values()) if hasattr(new, "_fields") else type(new)(merged.values())
    return new


def _storage(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_meta else int(tensor.untyped_storage().data_ptr())
