"""The tensors of one layer: its own, and those that its quantisation method or its attention backend holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

#: The attributes of a layer that hold its quantisation method.
METHODS = ("quant_method", "scheme")

#: The attribute of an attention layer that holds its backend. The backend may hold others, and each has a step.
BACKEND = "impl"

STEP = "process_weights_after_loading"
"""The name of the step in both engines, on a layer, on its `quant_method`, or on its backend."""

_MOST_NESTED = 6
_FOREIGN = ("torch", "transformers", "vllm.config", "numpy", "builtins")  # packages whose objects hold no constants


class Held(NamedTuple):
    """A tensor that a method or a backend holds: the object or container that has it, and its attribute or key."""

    owner: Any
    key: Any
    tensor: torch.Tensor

    def replace(self, tensor: torch.Tensor) -> bool:
        """Make the owner hold another tensor. Returns whether it does: a tuple keeps its own."""
        if isinstance(self.owner, (dict, list)):
            self.owner[self.key] = tensor
        elif not isinstance(self.owner, tuple):
            object.__setattr__(self.owner, self.key, tensor)  # also of a frozen dataclass
        return not isinstance(self.owner, tuple)


def held_by_methods(layer: torch.nn.Module) -> dict[tuple[Any, ...], Held]:
    """The tensors in a layer's quantisation method and backend, and in the objects below them, by the path to each."""
    return {path: held for path, held, _ in walk(layer) if held is not None}


def walk(layer: torch.nn.Module) -> Iterator[tuple[tuple[Any, ...], Held | None, Any]]:
    """The path of each tensor and each object of a layer's quantisation method and of its backend."""
    seen: set[int] = {id(layer)}
    backend = getattr(layer, BACKEND, None)
    roots = {name: getattr(layer, name, None) for name in METHODS}
    pending: list[tuple[tuple[Any, ...], Any]] = [
        ((name,), root)
        for name, root in roots.items()
        if isinstance(root, torch.nn.Module) or _may_hold_tensors(root)  # a method may be a module
    ]
    if hasattr(backend, STEP) and _may_hold_tensors(backend):
        pending.append(((BACKEND,), backend))
    while pending:
        path, owner = pending.pop()
        if id(owner) in seen or len(path) > _MOST_NESTED:
            continue
        seen.add(id(owner))
        yield path, None, owner
        if isinstance(owner, dict):
            items = list(owner.items())
        elif isinstance(owner, (list, tuple)):
            items = list(enumerate(owner))
        else:
            items = list(vars(owner).items())
        for key, value in items:
            if isinstance(value, torch.Tensor):
                yield (*path, key), Held(owner, key, value), None
            elif path[0] == BACKEND and not hasattr(value, STEP):  # a backend knows much that it does not own
                continue
            elif isinstance(value, (dict, list, tuple)) or _may_hold_tensors(value):
                pending.append(((*path, key), value))


def _may_hold_tensors(value: Any) -> bool:
    if isinstance(value, (type, torch.nn.Module)) or callable(value) or not hasattr(value, "__dict__"):
        return False
    if any(base.__name__ == "QuantizationConfig" for base in type(value).__mro__):  # of all layers, and without tensors
        return False
    module = type(value).__module__
    return not any(module == package or module.startswith(f"{package}.") for package in _FOREIGN)


def tensors_of(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of a layer by attribute name: parameters, buffers and plain attributes. Excludes submodules."""
    own: Mapping[str, Any] = {**vars(layer), **layer._buffers, **layer._parameters}
    return {name: value for name, value in own.items() if isinstance(value, torch.Tensor)}
