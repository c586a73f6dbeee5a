"""The tensors that a `PausableMemory` adopts: of modules, optimisers and lists, by tag."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from rl_memory_plugins.errors import InvalidRequestError, StateConflictError, UnsupportedError
from rl_memory_plugins.memory.allocator import Block
from rl_memory_plugins.memory.emptied import nbytes_left_by_move
from rl_memory_plugins.trainer.held_tensors import (
    Target,
    check_target,
    has_memory,
    modules_of,
    optimizers_in,
    plain_parts,
    reshard,
    tensors_of,
)

PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer"

PLAIN = (torch.Tensor, torch.nn.Parameter)
"""The classes whose tensors have no parts, if they are not sparse."""


class Targets:
    """Modules, optimisers, and lists of tensors. Each call reads them again.

    Args:
        gradients: Whether the gradients of modules are adopted.
    """

    def __init__(self, *, gradients: bool) -> None:
        self._gradients = gradients
        self._tags: list[tuple[Target, str | None]] = []
        # The tags of optimisers that others hold, by id. Each of them asks at each of its steps.
        self._held: dict[int, list[str]] = {}

    @staticmethod
    def check(targets: Iterable[Target], tag: str | None) -> None:
        """Refuse what `PausableMemory.adopt` refuses with an `InvalidRequestError`."""
        for target in targets:
            check_target(target)
            if tag is None and not isinstance(target, (torch.nn.Module, torch.optim.Optimizer)):
                raise InvalidRequestError(
                    "tensors, lists and mappings need a tag: adopt(tensors, tag=...)", field="tag"
                )

    def add(self, targets: Iterable[Target], tag: str | None) -> None:
        self._tags += [(target, tag) for target in targets]
        self._look_inside()

    def remove_last(self, count: int) -> None:
        """Undo the `add` of this many targets."""
        del self._tags[len(self._tags) - count :]
        self._look_inside()

    def _look_inside(self) -> None:
        held: dict[int, list[str]] = {}
        for target, own in self._tags:
            for optimizer in optimizers_in(target):
                if optimizer is not target:
                    held.setdefault(id(optimizer), []).append(own or default_tag(target))
        self._held = held

    def of(self, tag: str) -> list[Target]:
        """The targets whose tensors belong to a tag."""
        return [target for target, own in self._tags if (own or default_tag(target)) == tag]

    def tags_of(self, target: Target) -> list[str]:
        """The tags that have adopted a target, or another optimiser which holds it."""
        found = [own or default_tag(target) for other, own in self._tags if other is target]
        return found + self._held.get(id(target), [])

    def without_tag(
        self,
        device: torch.device,
        is_owned: Callable[[int], bool],
        is_awake: Callable[[str], bool],
        is_elsewhere: Callable[[int], bool],
        only: torch.optim.Optimizer | None = None,
    ) -> dict[str, list[torch.Tensor]]:
        """The tensors to adopt by tag, one of each storage.

        Args:
            device: The device of the memory. Tensors in host memory are left out if it is a GPU.
            is_owned: Whether an address belongs to a tag already.
            is_awake: Whether a tag is awake. Tensors for sleeping tags are left out.
            is_elsewhere: Whether an address belongs to another memory.
            only: Look at the state of this optimiser alone.

        Raises:
            InvalidRequestError: a tensor is on another device.
            StateConflictError: a tensor belongs to another memory.
            UnsupportedError: a tensor subclass has neither a storage nor `__tensor_flatten__`.
        """
        found: dict[Any, tuple[str, torch.Tensor]] = {}
        for tag, tensor in self._new_tensors(is_awake, is_owned, only):
            storage = tensor.untyped_storage()
            # A move that failed may have left it empty: this one brings its content back.
            left = 0 if storage.nbytes() else nbytes_left_by_move(storage)
            if storage.device.type == "meta" or not (storage.nbytes() or left):
                continue
            if storage.device.type == "cpu" and device.type != "cpu":
                continue  # e.g. the steps of an optimiser
            if not (left or has_memory(storage)):
                raise UnsupportedError(
                    f"a {type(tensor).__name__} cannot be adopted: it has no storage and no __tensor_flatten__"
                )
            if storage in found or is_owned(storage.data_ptr()):
                continue
            if storage.device != device:
                raise InvalidRequestError(
                    f"a tensor is on {storage.device}, but this memory is of {device}", field="targets"
                )
            if is_elsewhere(storage.data_ptr()):
                raise StateConflictError("a tensor belongs to another PausableMemory: close that memory first", tag=tag)
            found[storage] = tag, tensor
        by_tag: dict[str, list[torch.Tensor]] = {}
        for tag, tensor in found.values():
            by_tag.setdefault(tag, []).append(tensor)
        return by_tag

    def drop_gradients(self, is_owned: Callable[[int], bool]) -> None:
        """Set the gradients of modules and of lists of tensors to `None`, except those that belong to a tag."""
        for parameter in itertools.chain(self._parameters(), self._listed()):
            gradient = parameter.grad
            if gradient is not None and not _any_owned(gradient, is_owned):
                parameter.grad = None
        for flat in self._flat_parameters():
            for name in ("grad", "_saved_grad_shard"):
                gradient = getattr(flat, name, None)
                if isinstance(gradient, torch.Tensor) and not _any_owned(gradient, is_owned):
                    setattr(flat, name, None)

    def without_gradient(self) -> Iterator[Block]:
        """The memory of the modules' parameters that need no gradient: training leaves them as they are."""
        for parameter in self._parameters():
            if not parameter.requires_grad and not torch.nn.parameter.is_lazy(parameter):
                for part in plain_parts(parameter.detach()):
                    if part.nbytes and part.is_contiguous():
                        yield Block(part.data_ptr(), part.nbytes)

    def _parameters(self) -> Iterator[torch.nn.Parameter]:
        for module in self._modules():
            yield from (parameter for parameter in module._parameters.values() if parameter is not None)

    def _listed(self) -> Iterator[torch.Tensor]:
        """The tensors of lists and mappings that may have gradients, such as masters."""
        for target, _ in self._tags:
            if not isinstance(target, (torch.nn.Module, torch.optim.Optimizer)):
                yield from (tensor for tensor in tensors_of(target) if tensor.is_leaf)

    @property
    def has_modules(self) -> bool:
        """Whether there are modules among the targets."""
        return next(self._modules(), None) is not None

    def _modules(self) -> Iterator[torch.nn.Module]:
        for target, _ in self._tags:
            if isinstance(target, torch.nn.Module):
                yield from modules_of(target)

    def _flat_parameters(self) -> Iterator[Any]:
        """FSDP1's flat parameters, which `parameters()` does not yield with `use_orig_params=True`."""
        for module in self._modules():
            flat = getattr(module.__dict__.get("_handle"), "flat_param", None)
            if flat is not None:
                yield flat

    def _new_tensors(
        self, is_awake: Callable[[str], bool], is_owned: Callable[[int], bool], only: torch.optim.Optimizer | None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The plain tensors, with their tags, but most of those that belong to a tag already."""
        if only is None:
            self._look_inside()
        chosen = self._tags if only is None else [(only, tag) for tag in self.tags_of(only)]
        for target, tag in chosen:
            kinds: list[tuple[str, bool]] = [(tag or default_tag(target), False)]
            if isinstance(target, torch.nn.Module):
                reshard(target)
                if self._gradients:
                    kinds.append((GRADIENTS, True))
            for own_tag, gradients in kinds:
                if is_awake(own_tag):
                    for tensor in tensors_of(target, gradients):
                        # Nearly all tensors end here at each sleep. To look at a storage takes longer.
                        if type(tensor) in PLAIN and tensor.layout is torch.strided and is_owned(tensor.data_ptr()):
                            continue
                        yield from ((own_tag, part) for part in plain_parts(tensor))


def default_tag(target: Target) -> str:
    """The tag of a target that is adopted without a tag."""
    return OPTIMIZER if isinstance(target, torch.optim.Optimizer) else PARAMETERS


def names_of(tags: str | Iterable[str], field: str = "tags") -> list[str]:
    """The names of tags. A string is one name.

    Raises:
        InvalidRequestError: neither a string nor several.
    """
    if isinstance(tags, str):
        return [tags]
    if not isinstance(tags, Iterable):
        raise InvalidRequestError(f"{field} is a name or several, not {tags!r}", field=field, got=str(tags))
    return list(tags)


def is_of_torch(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the class is one of `torch.optim`. Others may read their state anywhere, and communicate anywhere."""
    return type(optimizer).__module__.startswith("torch.optim.")


def _any_owned(tensor: torch.Tensor, is_owned: Callable[[int], bool]) -> bool:
    return any(is_owned(part.untyped_storage().data_ptr()) for part in plain_parts(tensor))
