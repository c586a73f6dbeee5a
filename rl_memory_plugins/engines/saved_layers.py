"""The layers of a model at one moment: to restore them, or to keep their tensors over a load that makes new ones."""

from __future__ import annotations

import copy
import mmap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from rl_memory_plugins.engines.layer_tensors import Held, held_by_methods, tensors_of, walk
from rl_memory_plugins.errors import WeightUpdateError


class Graphs:
    """What the CUDA graphs of one model read and its layers no longer hold.

    Args:
        derived: Whether a tensor of a layer's quantisation method was computed from weights.

    Attributes:
        tensors: Tensors that stay alive as long as the model, by layer and path.
        holds: Whether graphs hold an attribute of a layer, if it is a number.
    """

    def __init__(self, derived: Callable[[torch.nn.Module, torch.Tensor], bool]) -> None:
        self.derived = derived
        self.tensors: dict[tuple[torch.nn.Module, tuple[Any, ...]], torch.Tensor] = {}
        self.holds: Callable[[torch.nn.Module, str], bool] = lambda layer, name: True


_CONTAINERS = (list, dict, set)


class SavedLayers:
    """The attributes, tensors, children and tables of layers at one moment, and the attributes of their parameters and
    quantisation methods.

    Args:
        layers: The layers by name.
    """

    def __init__(self, layers: Mapping[str, torch.nn.Module]) -> None:
        self._names = {layer: name for name, layer in layers.items()}
        self._attributes = {layer: dict(vars(layer)) for layer in self._names}
        self._tensors = {layer: tensors_of(layer) for layer in self._names}
        self._tables = {
            layer: (dict(layer._parameters), dict(layer._buffers), set(layer._non_persistent_buffers_set))
            for layer in self._names
        }
        self._modules = {layer: dict(layer._modules) for layer in self._names}
        # Loaders note on a parameter what they have loaded into it, e.g. the type of its quantisation.
        parameters = {id(one): one for layer in self._names for one in layer._parameters.values() if one is not None}
        self._notes = [(one, dict(vars(one))) for one in parameters.values()]
        noted = [*self._attributes.values(), *(attributes for _, attributes in self._notes)]
        containers = {id(value): value for values in noted for value in values.values() if type(value) in _CONTAINERS}
        self._contents = [(value, copy.copy(value)) for value in containers.values()]
        self._held: dict[torch.nn.Module, dict[tuple[Any, ...], Held]] = {}
        self._methods: list[tuple[Any, dict[str, Any]]] = []
        for layer in self._names:
            walked = list(walk(layer))
            self._held[layer] = {path: held for path, held, _ in walked if held is not None}
            objects = (owner for _, _, owner in walked if owner is not None and hasattr(owner, "__dict__"))
            self._methods += [(owner, dict(vars(owner))) for owner in objects]
        self._owner: dict[Any, torch.nn.Module] = {}  # by the memory of a parameter: the first layer that has it
        for layer in self._names:
            for parameter in layer._parameters.values():
                self._owner.setdefault(_memory(parameter), layer)

    def tied(self, layer: torch.nn.Module) -> set[str]:
        """The names of a layer's parameters that an earlier layer has too, and which are loaded with that layer."""
        parameters = self._tables[layer][0]
        return {name for name, parameter in parameters.items() if self._owner[_memory(parameter)] is not layer}

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """Restore the layers at the end of the body."""
        try:
            yield
        finally:
            self.restore()

    def restore(self) -> None:
        """Restore the layers and their methods, but not the values in their tensors."""
        for owner, attributes in (*self._methods, *self._notes):
            vars(owner).clear()
            vars(owner).update(attributes)
        for container, content in self._contents:
            container.clear()
            (container.extend if type(container) is list else container.update)(content)
        for layer, attributes in self._attributes.items():
            vars(layer).clear()
            vars(layer).update(attributes)
            for table, former in zip((layer._parameters, layer._buffers), self._tables[layer][:2], strict=True):
                table.clear()
                table.update(former)
            layer._modules.clear()
            layer._modules.update(self._modules[layer])
            layer._non_persistent_buffers_set.clear()
            layer._non_persistent_buffers_set.update(self._tables[layer][2])

    def keep_addresses(self, graphs: Graphs | None) -> None:
        """Copy the values of new tensors into the old tensors, and put the old tensors back.

        Args:
            graphs: What CUDA graphs and compiled code read; `None` if there are none.

        Raises:
            WeightUpdateError: the shape, dtype or device of a tensor has changed; or a number that is part of a graph;
                or a tensor that a graph reads has no successor.
        """
        for layer, former in self._tensors.items():
            now = tensors_of(layer)
            for name, old in former.items():
                new = now.get(name)
                if new is None or new is old:
                    self._require(new is old or name not in layer._parameters, layer, name)
                    continue
                self._require(alike(new, old), layer, name)
                if new.data_ptr() != old.data_ptr():
                    old.data.copy_(new.data)
                    vars(old).update({key: value for key, value in vars(new).items() if isinstance(value, (int, str))})
                    setattr(layer, name, old)
            self._keep_held(layer, graphs)
            if graphs is not None:
                self._require_numbers(layer, graphs)

    def _require_numbers(self, layer: torch.nn.Module, graphs: Graphs) -> None:
        """Check that the numbers that CUDA graphs may hold are as before, such as the scales of a KV cache."""
        for name, value in self._attributes[layer].items():
            now = vars(layer).get(name)
            changed = isinstance(value, (int, float)) and now is not value and now != value
            if changed and graphs.holds(layer, name):
                where = f"{self._names[layer]}.{name}"
                raise WeightUpdateError(
                    f"the engine's reload changed {where} from {value} to {now}. CUDA graphs hold this number: send "
                    "weights with the former value, or start the engine without CUDA graphs",
                    name=where,
                )

    def _keep_held(self, layer: torch.nn.Module, graphs: Graphs | None) -> None:
        """Put the old tensors back into the layer's methods, which may be new objects."""
        now = held_by_methods(layer)
        done = {tensor.data_ptr() for tensor in self._tensors[layer].values()}
        for path, (_, _, old) in self._held[layer].items():
            new = now.get(path)
            first = old if graphs is None else graphs.tensors.get((layer, path), old)
            fits = new is not None and alike(new.tensor, first)
            if new is not None and fits:
                if first.data_ptr() not in {new.tensor.data_ptr(), *done}:
                    first.data.copy_(new.tensor.data)
                if new.replace(first):
                    continue
            if graphs is not None:
                self._require(fits or not graphs.derived(layer, first), layer, ".".join(map(str, path)))
                graphs.tensors[layer, path] = first

    def _require(self, condition: bool, layer: torch.nn.Module, name: str) -> None:
        if not condition:
            where = f"{self._names[layer]}.{name}"
            raise WeightUpdateError(f"the engine's reload changed {where}, which must not change", name=where)


def alike(new: torch.Tensor, old: torch.Tensor) -> bool:
    return (new.shape, new.dtype, new.device) == (old.shape, old.dtype, old.device)


def _memory(parameter: torch.Tensor | None) -> Any:
    """Equal for parameters that are the same elements in memory, also if they are two objects."""
    if parameter is None or parameter.is_meta or not parameter.numel():
        return id(parameter)
    return parameter.data_ptr(), parameter.dtype, parameter.shape, parameter.stride()


def without_memory(meta: torch.Tensor) -> torch.Tensor:
    """A tensor like `meta`, with its class and attributes, at an address of its own, without physical memory."""
    nbytes = extent(meta) * meta.element_size()
    if nbytes:
        no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
        flat = torch.frombuffer(pages, dtype=torch.uint8).view(meta.dtype)
        tensor = flat.as_strided(meta.shape, meta.stride())
    else:
        tensor = torch.empty(meta.shape, dtype=meta.dtype)
    return like(tensor, meta)


def like(tensor: torch.Tensor, meta: torch.Tensor) -> torch.Tensor:
    """Give a tensor the class and the attributes of another one."""
    tensor.__class__ = meta.__class__
    tensor.__dict__ = dict(meta.__dict__)
    return tensor


def extent(tensor: torch.Tensor) -> int:
    """The elements from the first to the last of a tensor in memory."""
    if not tensor.numel():
        return 0
    return 1 + sum(int(size - 1) * int(step) for size, step in zip(tensor.shape, tensor.stride(), strict=True))
