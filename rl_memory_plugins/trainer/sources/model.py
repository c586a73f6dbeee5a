"""Modules and mappings of tensors: plain, offloaded, or of DTensors (FSDP2, tensor parallelism)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from rl_memory_plugins.errors import InvalidRequestError
from rl_memory_plugins.trainer.offloading import host_view, host_views
from rl_memory_plugins.trainer.sources.gather import gather_all
from rl_memory_plugins.trainer.sources.listing import list_plain
from rl_memory_plugins.trainer.sources.outgoing import Dtypes, Outgoing, Rename
from rl_memory_plugins.trainer.sources.peft_names import base_names, warn_of_adapters
from rl_memory_plugins.trainer.sources.placements import is_sharded, layout_of
from rl_memory_plugins.trainer.sources.saved import OfParameters, SavedForm, reversal_of
from rl_memory_plugins.weights.manifest import Mismatch, TensorSpec
from rl_memory_plugins.weights.overrides import still_holds
from rl_memory_plugins.weights.shards import Layout
from rl_memory_plugins.weights.source import ReadingSource, TensorSource, named_tensors

Tensors: TypeAlias = TensorSource | torch.nn.Module | Mapping[str, torch.Tensor]
"""The tensors to send, for `as_source`."""


class ModelSource:
    """A module's parameters and persistent buffers, or a mapping such as a state dict; see `named_tensors`.

    A module is sent as `save_pretrained` would write it: a transformers model under the names of its checkpoint, with
    its experts one by one where the checkpoint has them so; of a model that PEFT has wrapped, the base model. If the
    engine refuses that form and takes the module's own tensors, those are sent.

    DTensors are gathered in batches during the iteration: all ranks of their mesh must iterate in step. Each rank casts
    its shards first, so that a gather moves only the dtype that is sent. Tensors in host memory, by `offload` or by
    `.cpu()`, are read there.

    Args:
        model: The module, or names and tensors. Every update reads it again. A mapping that is no `dict` may make each
            tensor on access; the source then holds only one tensor at a time.
        dtype, rename: See `Outgoing`. `rename` gets the names of the module, before those of its checkpoint are made.
    """

    def __init__(
        self,
        model: torch.nn.Module | Mapping[str, torch.Tensor],
        *,
        dtype: Dtypes = None,
        rename: Rename | None = None,
    ) -> None:
        self._model = model
        self._outgoing = Outgoing(dtype, rename)
        self._holds_tensors = isinstance(model, (torch.nn.Module, dict))  # does not make them on access
        self._listed: tuple[list[str], list[Any]] | None = None  # from `specs` to `tensors`, as names and tensors
        self._is_plain = False  # those are sent as they are, in their memory
        self._form: SavedForm | None = None
        self._as_held = False  # the tensors are sent as the module holds them
        self._fits_neither = False  # both forms were refused in this update
        self._is_agreed = False  # an engine has taken the specs in this form
        self._sharded: dict[str, int] = {}  # names of tensors that lie in several processes, and their bytes as sent
        self._left_out: Collection[str] = ()  # those that `tensors` does not yield
        self._parts: Mapping[str, Any] = {}  # the same; only during an update, so that none outlives its module
        self._gathered = 0 if self._holds_tensors else None  # bytes, by the last `tensors`

    def specs(self) -> list[TensorSpec]:
        """See `TensorSource`.

        Raises:
            InvalidRequestError: a tensor has no memory, because other code than `offload` has freed it; see also
                `named_tensors`.
        """
        if self._listed is not None:  # the last specs led to no update
            self._is_agreed = False
        self._listed = None
        if isinstance(self._model, torch.nn.Module):
            warn_of_adapters(self._model)
        self._sharded, self._left_out, self._parts = {}, (), {}
        entries, rename = self._entries(), self._renamed()
        plain = list_plain(entries) if rename == self._outgoing.name and self._outgoing.is_plain else None
        self._is_plain = plain is not None
        if plain is None:
            specs = self._list_each(named_tensors(entries, rename))
        else:
            tensors, specs = plain
            self._listed = [spec.name for spec in specs], tensors
        form = self._saved_form()
        if form is None:
            return specs
        dtypes = {name: tensor.dtype for name, tensor in self._named()}
        return [self._outgoing.spec(sent, dtypes[name], shape) for sent, shape, name in form.specs()]

    def _list_each(self, found: Iterable[tuple[str, Any]]) -> list[TensorSpec]:
        # Without a tuple for each: many objects that live for a while make Python collect its garbage, for 80 ms.
        listed: tuple[list[str], list[Any]] = [], []
        specs = []
        for name, tensor in found:
            if self._holds_tensors:
                listed[0].append(name)
                listed[1].append(tensor)
            is_apart = self._check(name, tensor)
            specs.append(self._outgoing.spec(name, tensor.dtype, tensor.shape))
            if is_apart:
                self._sharded[name] = specs[-1].nbytes
        self._listed = listed if self._holds_tensors else None
        return specs

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        form, self._is_agreed = self._saved_form(), True
        named, self._listed = self._named(), None
        left_out = self._left_out
        if self._holds_tensors:
            self._gathered = sum(nbytes for name, nbytes in self._sharded.items() if name not in left_out)
        if form is None:
            return gather_all([one for one in named if one[0] not in left_out] if left_out else named, self._outgoing)
        held = dict(named)
        ordered = [(name, held[name]) for group in form.groups for name in group.names]
        whole = gather_all(ordered, OfParameters(self._outgoing, form))
        return ((name, self._outgoing.cast(name, tensor)) for name, tensor in form.convert(whole))

    @property
    def gathered(self) -> int | None:
        """See `weights.source.ShardedSource`."""
        return self._gathered

    def layouts(self) -> list[Layout | None] | None:
        """See `weights.source.ShardedSource`. `None` also if the checkpoint's form is another than the module's."""
        if not self._sharded or not self._holds_tensors or self._saved_form() is not None:
            return None
        known: dict[Any, Layout | None] = {}
        return [layout_of(tensor, known) if name in self._sharded else None for name, tensor in self._named()]

    def leave_out(self, names: Collection[str]) -> None:
        self._left_out = frozenset(names)
        # A hook of `state_dict` may have made them, and nothing else may hold them.
        self._parts = {name: tensor for name, tensor in self._named() if name in self._left_out} if names else {}

    def held(self, name: str) -> torch.Tensor:
        return self._outgoing.cast(name, host_view(self._parts[name]._local_tensor.detach()))

    @property
    def negotiable(self) -> bool:
        """See `weights.source.NegotiableSource`."""
        return self._outgoing.negotiable or (not self._is_agreed and self._checkpoint_form() is not None)

    @property
    def only_reads(self) -> bool:
        """See `weights.source.ReadingSource`. A mapping that makes its tensors may do anything."""
        return self._holds_tensors

    def revise(self, mismatches: Sequence[Mismatch]) -> bool:
        if self._outgoing.revise(mismatches):
            return True
        if self._as_held:  # neither form fits: the error will name the checkpoint's tensors
            self._as_held, self._fits_neither = False, True
            return True
        self._as_held = not self._fits_neither and self._checkpoint_form() is not None
        self._fits_neither = False
        return self._as_held

    def resident(self) -> list[torch.Tensor] | None:
        """See `weights.source.ResidentSource`. `None` if a tensor is gathered, cast, negated, or made on access."""
        if not self._holds_tensors:
            return None
        form = self._saved_form()
        if form is None and self._is_plain and self._listed is not None:
            plain = [tensor.detach() if tensor.requires_grad else tensor for tensor in self._listed[1]]
            return None if any(map(torch.Tensor.is_neg, plain)) else host_views(plain)
        outgoing = self._outgoing if form is None else OfParameters(self._outgoing, form)
        names, tensors = [], []
        for name, tensor in self._named():
            dtype = tensor.dtype
            if hasattr(tensor, "full_tensor") or tensor.is_neg() or outgoing.sent_as(name, dtype) != dtype:
                return None
            names.append(name)
            tensors.append(tensor.detach() if tensor.requires_grad else tensor)
        held = host_views(tensors)
        return held if form is None else form.resident(dict(zip(names, held, strict=True)))

    def _named(self) -> Iterable[tuple[str, Any]]:
        """The tensors by the module's names: as `specs` has listed them, or else as they are now."""
        if self._listed is not None:
            return zip(*self._listed, strict=True)
        return list(self._found()) if self._holds_tensors else self._found()

    def _found(self) -> Iterator[tuple[str, Any]]:
        return named_tensors(self._entries(), self._renamed())

    def _entries(self) -> Mapping[str, Any]:
        return self._model.state_dict(keep_vars=True) if isinstance(self._model, torch.nn.Module) else self._model

    def _renamed(self) -> Rename:
        base = base_names(self._model) if isinstance(self._model, torch.nn.Module) else None
        if base is None:
            return self._outgoing.name
        return lambda name: None if (own := base(name)) is None else self._outgoing.name(own)

    def _saved_form(self) -> SavedForm | None:
        """The form in which the tensors are sent; `None` if that is the module's own."""
        return None if self._as_held else self._checkpoint_form()

    def _checkpoint_form(self) -> SavedForm | None:
        """The form of the module's checkpoint; `None` if that is the module's own."""
        revert = reversal_of(self._model) if isinstance(self._model, torch.nn.Module) else None
        if revert is None:
            return None
        shapes = {name: tuple(tensor.shape) for name, tensor in self._named()}
        if self._form is None or self._form.shapes != shapes:
            self._form = SavedForm(revert, shapes)
        return None if self._form.is_identity else self._form

    def _check(self, name: str, tensor: Any) -> bool:
        """Whether a tensor lies in parts in several processes.

        Raises:
            InvalidRequestError: it cannot be sent.
        """
        part = getattr(tensor, "_local_tensor", tensor)
        is_apart = part is not tensor and self._is_apart(name, tensor)
        if part.nbytes and not part.untyped_storage().nbytes() and host_view(part) is part:
            raise InvalidRequestError(
                f"{name} has no memory: other code than Offloader has freed it; load it first", name=name
            )
        return is_apart

    def _is_apart(self, name: str, tensor: Any) -> bool:
        """`_check` of a DTensor."""
        return is_sharded(tensor)


class OwnSource(ModelSource):
    """A `ModelSource` of a process that sends without the trainer's other processes.

    `specs()` refuses a tensor that is sharded over several processes: to gather it would wait for the others forever.
    """

    def _is_apart(self, name: str, tensor: Any) -> bool:
        if tensor.device_mesh.size() > 1:
            raise InvalidRequestError(
                f"{name} is sharded over {tensor.device_mesh.size()} processes: call push_from_all in all of them, or "
                "send a ModelSource, over whose tensors() the other processes iterate too",
                name=name,
            )
        return super()._is_apart(name, tensor)


def as_source(tensors: Tensors, kind: type[ModelSource] = ModelSource) -> TensorSource:
    """Convert a module or a mapping to a source of this kind. Another source stays as it is."""
    return kind(tensors) if isinstance(tensors, (torch.nn.Module, Mapping)) else tensors


def only_reads(tensors: Tensors) -> bool:
    """Whether an update with these tensors writes to none of the trainer's weights; see `ReadingSource`."""
    source = as_source(tensors)
    if not isinstance(source, ReadingSource):
        return False
    return still_holds(source, "only_reads", "specs", "tensors") and source.only_reads
