"""The layout that the parameters of layers had before the engine transformed them, recorded without their memory.

A reload gives a layer parameters of this layout again: same shapes, strides, classes and loaders. They begin with the
values that the engine gave its own, where these were small: a scale that no checkpoint has keeps its default.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from rl_memory_plugins.engines.layer_tensors import BACKEND, walk
from rl_memory_plugins.engines.saved_layers import extent, like, without_memory

_SMALL = 1 << 20
"""Up to this number of elements the first values of a parameter are compared. Larger ones are weights."""

_KEPT_BYTES = 1 << 16
"""Up to this size, first values that are not all equal are kept."""


_KV_SCALES = "BaseKVCacheMethod"
"""The class, in both engines, of the methods whose step gives the scales of an FP8 KV cache defaults if none came."""


class LayerTemplate:
    """The parameters and buffers of one layer before its weights were loaded.

    Args:
        beside: For parameters that other layers have too, these layers.
        dummy: The first load writes random numbers into every parameter, also into those that no checkpoint has.

    Attributes:
        parameters: By name; on the meta device, with their classes and attributes. `None` where the layer has none.
        optional: The parameters that the first load left as they were, because the checkpoint does not have them.
        ready: Whether a first step has begun.
        is_deferred: Whether a parameter had no memory yet, because the engine makes it while weights arrive.
    """

    def __init__(
        self,
        layer: torch.nn.Module,
        beside: Mapping[str, Collection[torch.nn.Module]] = types.MappingProxyType({}),
        *,
        dummy: bool = False,
    ) -> None:
        self._layer = layer
        self._beside = beside
        self._shared: frozenset[str] = frozenset()
        self._dummy = dummy
        self.parameters = {name: _on_meta(parameter) for name, parameter in layer._parameters.items()}
        self.is_deferred = any(one is not None and one.is_meta for one in layer._parameters.values())
        self._buffers = dict(layer._buffers)
        self._first = {name: _first_values(tensor) for name, tensor in layer._parameters.items() if tensor is not None}
        buffers = self._buffers if self.has_kv_scales else {}
        self._first_buffers = {name: _first_values(one) for name, one in buffers.items() if one is not None}
        self.optional: frozenset[str] = frozenset()
        self.ready = False
        self._dtype = torch.get_default_dtype()
        self._before: list[tuple[Any, dict[str, Any]]] = []  # attributes of the layer, and of its method's objects
        self._changed: list[set[str]] = []  # for each of them, the attributes that a step has changed

    @contextmanager
    def first_step(self) -> Iterator[None]:
        """A step of the first load runs in the body. Records what it may change, and which attributes it changes.

        The engine sets further attributes later, such as the KV cache of an attention layer. They stay at a reload.
        """
        if not self.ready:
            self._before_step()
        former = [dict(vars(owner)) for owner, _ in self._before]
        yield
        for (owner, _), then, changed in zip(self._before, former, self._changed, strict=True):
            now = vars(owner)
            names = then.keys() | now.keys()
            changed |= {name for name in names if then.get(name, _ABSENT) is not now.get(name, _ABSENT)}

    def _before_step(self) -> None:
        layer = self._layer
        self.ready = True
        self._dtype = torch.get_default_dtype()
        self.optional = frozenset(
            name
            for name, parameter in layer._parameters.items()
            if parameter is not None and (_is_still(parameter, self._first.get(name)) or self._has_default())
        )
        # Not those of a backend: the layer's own step changes it, and finds what it has made before.
        owners = [
            owner
            for path, _, owner in walk(layer)
            if owner is not None and hasattr(owner, "__dict__") and path[0] != BACKEND
        ]
        self._before = [(owner, dict(vars(owner))) for owner in (layer, *owners)]
        self._changed = [set() for _ in self._before]

    def _has_default(self) -> bool:
        """Whether an update may leave the parameters out, although the first load wrote them."""
        return self._dummy and self.has_kv_scales

    @property
    def has_kv_scales(self) -> bool:
        """Whether the parameters are scales of an FP8 KV cache, which have defaults."""
        method = type(getattr(self._layer, "quant_method", None))
        return any(one.__name__ == _KV_SCALES for one in method.__mro__)

    def leave_shared(self, transformed: Collection[torch.nn.Module]) -> frozenset[str]:
        """From now on leave parameters as they are that another layer fills: one that is not transformed has them too.

        Returns: those of them that the layer no longer shares. Nothing fills what it has in their place.
        """
        owners = {name: [one for one in layers if one not in transformed] for name, layers in self._beside.items()}
        now = self._layer._parameters
        shared = frozenset(name for name, layers in owners.items() if layers)
        if shared != self._shared:
            self._shared = shared
            vars(self).pop("blank", None)
        held = {
            name: {id(one) for layer in layers for one in layer._parameters.values()} for name, layers in owners.items()
        }
        return frozenset(name for name in shared if id(now.get(name)) not in held[name])

    def is_loadable(self) -> bool:
        """Whether the layer's parameters still are of the classes, and have the attributes, that their loaders need."""
        now = self._layer._parameters
        return all(
            meta is None or (type(now.get(name)) is type(meta) and vars(meta).keys() <= vars(now[name]).keys())
            for name, meta in self.parameters.items()
        )

    def give_first_values(self) -> None:
        """Give scales of the KV cache the values again that the engine made them with, as far as these are known."""
        for table, values in ((self._layer._parameters, self._first), (self._layer._buffers, self._first_buffers)):
            for name, first in values.items():
                if first is not None:
                    table[name].data.copy_(first)

    @functools.cached_property
    def blank(self) -> dict[str, torch.Tensor]:
        """The parameters without physical memory, each at an address of its own, for a trace of the loader."""
        return {name: without_memory(meta) for name, meta in self._own()}

    def materialised(self, device: torch.device, padded: Collection[str] = ()) -> dict[str, torch.Tensor]:
        """New parameters on a device. Large ones are zero if they are among `padded`, as engines make these; else
        undefined."""
        made: dict[str, torch.Tensor] = {}
        for name, meta in self._own():
            make = torch.zeros if name in padded else torch.empty
            memory = make(extent(meta), dtype=meta.dtype, device=device)
            tensor = memory.as_strided(meta.shape, meta.stride())
            first = self._first.get(name)
            if first is not None:
                tensor.copy_(first)
            made[name] = like(tensor, meta)
        return made

    def rewind(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Give the layer these parameters, and what its step has changed in it and in its method's objects before."""
        layer = self._layer
        self.give(parameters)
        layer._buffers.clear()
        layer._buffers.update(self._buffers)
        for (owner, before), changed in zip(self._before, self._changed, strict=True):
            for name in changed - _TABLES if owner is layer else changed:
                if name in before:
                    vars(owner)[name] = before[name]
                else:
                    vars(owner).pop(name, None)

    def give(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Give the layer these parameters in place of its own."""
        table = self._layer._parameters
        shared = {name: table.get(name) for name in self._shared}
        table.clear()
        table.update({name: parameters.get(name) for name in self.parameters} | shared)

    def _own(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, meta in self.parameters.items():
            if meta is not None and name not in self._shared:
                yield name, meta

    @contextmanager
    def default_dtype(self) -> Iterator[None]:
        """torch's default dtype is the one of the first step while the body runs."""
        former = torch.get_default_dtype()
        torch.set_default_dtype(self._dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(former)

    @contextmanager
    def traced(self) -> Iterator[None]:
        """The layer has the blank parameters while the body runs."""
        former = dict(self._layer._parameters)
        self.give(self.blank)
        try:
            yield
        finally:
            self._layer._parameters.clear()
            self._layer._parameters.update(former)


_ABSENT = object()

_TABLES = frozenset(vars(torch.nn.Module()))
"""The attributes that every module has."""


def _on_meta(parameter: torch.Tensor | None) -> torch.Tensor | None:
    if parameter is None:
        return None
    meta = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
    return like(meta, parameter)


def _first_values(tensor: torch.Tensor) -> torch.Tensor | None:
    """The values of a small tensor, on the host: one element if all are equal. `None` if they are not worth keeping."""
    if tensor.is_meta or not 0 < tensor.numel() <= _SMALL:
        return None
    with torch.no_grad(), contextlib.suppress(NotImplementedError):  # not all dtypes can be compared
        values = tensor.data.as_subclass(torch.Tensor).cpu()
        one = values.reshape(-1)[:1]
        if bool((values == one).all()):
            return one.reshape(()).clone()
        if values.nbytes <= _KEPT_BYTES:
            return values.clone()
    return None


def _is_still(tensor: torch.Tensor, first: torch.Tensor | None) -> bool:
    """Whether a parameter still has its first values."""
    if first is None or tensor.is_meta or not 0 < tensor.numel() <= _SMALL:
        return False
    return bool((tensor.data.as_subclass(torch.Tensor).cpu() == first).all())
