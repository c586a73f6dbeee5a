"""A module's tensors as `save_pretrained` would write them.

transformers 5 holds some models in another form than their checkpoints: it stacks experts into one tensor, and renames
the parts of vision-language models. It can undo that for a whole state dict. `SavedForm` lets it do so once, on tensors
without data. Most tensors of the checkpoint turn out to be views of a parameter, and later need neither transformers
nor a copy.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rl_memory_plugins.trainer.sources.outgoing import Outgoing
from rl_memory_plugins.weights.coverage import row_major

Revert: TypeAlias = Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]]
"""Makes the checkpoint's tensors from those of a model. The result may hold views."""

_LAYER = re.compile(r"^(?:.*?\.)??\d+\.")


class Piece(NamedTuple):
    """A tensor of the checkpoint as a view of a contiguous parameter."""

    name: str  # in the checkpoint
    size: tuple[int, ...]
    stride: tuple[int, ...]  # in elements, as `offset`
    offset: int


class Group(NamedTuple):
    """Parameters, and the tensors of the checkpoint that are made of them alone.

    Attributes:
        names: The names of the parameters, in their order.
        pieces: For each parameter, the tensors that are views of it.
        made: Tensors that transformers must make, with their names and shapes; then no tensor of the group is a view.
    """

    names: list[str]
    pieces: list[list[Piece]]
    made: list[tuple[str, tuple[int, ...]]]


def reversal_of(module: torch.nn.Module) -> Revert | None:
    """Makes a state dict one of the checkpoint; `None` if transformers holds this model as its checkpoint does."""
    loading: Any = sys.modules.get("transformers.core_model_loading")  # new in transformers 5
    revert = getattr(loading, "revert_weight_conversion", None)
    modeling: Any = sys.modules.get("transformers.modeling_utils")
    if revert is None or modeling is None:
        return None
    model = next((one for one in module.modules() if isinstance(one, modeling.PreTrainedModel)), None)
    return None if model is None else lambda tensors: revert(model, tensors)


class SavedForm:
    """The checkpoint's form of a model's tensors.

    Args:
        revert: See `Revert`.
        shapes: The names and shapes of the model's tensors, in their order.
    """

    def __init__(self, revert: Revert, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._revert = revert
        self.shapes = dict(shapes)
        empty = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        with _Views():
            saved = revert(dict(empty))
        sources = {tensor.untyped_storage()._cdata: name for name, tensor in empty.items()}
        pieces: dict[str, list[Piece]] = {name: [] for name in shapes}
        for name, tensor in saved.items():
            source = sources.get(tensor.untyped_storage()._cdata)
            if source is not None:
                pieces[source].append(
                    Piece(name, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))
                )
        self.groups = [self._group(names, pieces, empty) for names in _grouped(shapes)]
        self.is_identity = all(
            [(piece.name, piece.stride) for piece in pieces[name]] == [(name, row_major(shape))]
            for name, shape in self.shapes.items()
        )

    def specs(self) -> Iterator[tuple[str, tuple[int, ...], str]]:
        """The names and shapes of the checkpoint's tensors in order, each with the name of its parameter.

        For a tensor that is made of several parameters, this is the first of its group.
        """
        for group in self.groups:
            for name, pieces in zip(group.names, group.pieces, strict=True):
                for piece in pieces:
                    yield piece.name, piece.size, name
            for made, shape in group.made:
                yield made, shape, group.names[0]

    def resident(self, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor] | None:
        """The checkpoint's tensors as views of the model's; `None` if some must be made."""
        if any(group.made for group in self.groups) or not all(one.is_contiguous() for one in tensors.values()):
            return None
        return [tensor for _, tensor in self.convert((name, tensors[name]) for g in self.groups for name in g.names)]

    def convert(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The checkpoint's tensors, given the model's whole tensors in their order. Holds one group at a time."""
        source = iter(tensors)
        for group in self.groups:
            if not group.made:
                for (_, tensor), pieces in zip(_take(source, group.names), group.pieces, strict=True):
                    yield from views(tensor, pieces)
                continue
            made = self._revert(dict(_take(source, group.names)))
            for name, _ in group.made:
                yield name, made[name]
            del made

    def _group(self, names: list[str], pieces: Mapping[str, list[Piece]], empty: Mapping[str, torch.Tensor]) -> Group:
        own = [pieces[name] for name in names]
        covered = (sum(math.prod(piece.size) for piece in found) for found in own)
        if all(empty[name].numel() == numel for name, numel in zip(names, covered, strict=True)):
            return Group(names, own, [])
        made = self._revert({name: empty[name] for name in names})
        return Group(names, [[] for _ in names], [(name, tuple(tensor.shape)) for name, tensor in made.items()])


class OfParameters(Outgoing):
    """The dtypes in which a model's own tensors are gathered: those of the checkpoint's tensors, if they agree."""

    def __init__(self, outgoing: Outgoing, form: SavedForm) -> None:
        super().__init__()
        self._outgoing = outgoing
        self._sent: dict[str, list[str]] = {}
        for sent, _, name in form.specs():
            self._sent.setdefault(name, []).append(sent)
        for group in form.groups:
            if group.made:  # of all its parameters
                self._sent |= {name: [made for made, _ in group.made] for name in group.names}

    def sent_as(self, name: str, dtype: torch.dtype) -> torch.dtype:
        found = {self._outgoing.sent_as(sent, dtype) for sent in self._sent[name]}
        return found.pop() if len(found) == 1 else dtype


def views(tensor: torch.Tensor, pieces: Iterable[Piece]) -> Iterator[tuple[str, torch.Tensor]]:
    whole = tensor.detach().contiguous()
    for name, size, stride, offset in pieces:
        yield name, whole.as_strided(size, stride, whole.storage_offset() + offset)


def _take(source: Iterator[tuple[str, torch.Tensor]], names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    for name in names:
        found, tensor = next(source)
        assert found == name, (found, name)
        yield name, tensor


def _grouped(names: Iterable[str]) -> list[list[str]]:
    """The names of each layer, and each other name, in order."""
    groups: dict[str, list[str]] = {}
    for name in names:
        layer = _LAYER.match(name)
        groups.setdefault(layer[0] if layer else name, []).append(name)
    return list(groups.values())


class _Views(TorchDispatchMode):  # type: ignore[misc]
    """Makes a view of what would be a contiguous copy."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clone.default:
            return args[0].view_as(args[0])
        return func(*args, **(kwargs or {}))
