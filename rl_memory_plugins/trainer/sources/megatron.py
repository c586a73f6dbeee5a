"""Manually sharded parameters, as in Megatron: tensor-parallel shards, fused projections, pipeline stages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch
import torch.distributed as dist

from rl_memory_plugins.errors import InvalidRequestError
from rl_memory_plugins.trainer.gpu import own_device
from rl_memory_plugins.trainer.offloading import host_view
from rl_memory_plugins.trainer.peers import Peers
from rl_memory_plugins.trainer.sources.megatron_layouts import FusedQKV, GateUp, Layout, Parted, Replicated, Split
from rl_memory_plugins.trainer.sources.outgoing import Dtypes, Outgoing
from rl_memory_plugins.weights import shards
from rl_memory_plugins.weights.manifest import Mismatch, TensorSpec
from rl_memory_plugins.weights.overrides import still_holds
from rl_memory_plugins.weights.source import name_of

__all__ = ["FusedQKV", "GateUp", "Layout", "MegatronSource", "NameMap", "Parted", "Replicated", "Split"]

T = TypeVar("T")


NameMap = Callable[[str], tuple[Sequence[str], Layout] | None]
"""Maps a parameter's name on this rank to the checkpoint's names and the layout, or to `None` to skip it."""


class _Entry(NamedTuple):
    """The facts about a parameter that every rank knows."""

    owner: int  # rank within the pipeline group
    names: tuple[str, ...]  # names of the checkpoint's tensors in the parameter
    shapes: tuple[tuple[int, ...], ...]  # shapes of these tensors
    dtype: str  # torch's name of the parameter's dtype
    sharded: bool  # over the tensor-parallel ranks
    holders: tuple[int, ...]  # the owner's tensor-parallel ranks, in the whole world


class _Cut(NamedTuple):
    """How the tensors of an entry are cut into parts."""

    names: tuple[str, ...]  # of the entry
    dim: int  # see `Parted`
    lengths: tuple[int, ...]  # of the parts of these tensors along `dim`; none if only a merge makes the tensors


class MegatronSource:
    """Gathers shards over the tensor-parallel group, then broadcasts the tensors from the stage that owns them.

    All ranks must create the source together and iterate over it in step. At any time the source holds the shards of
    one parameter and the tensors made of them.

    The source cannot send experts that are spread over the tensor-parallel ranks: expert-parallel ranks must be other
    ranks, as if Megatron's `expert_tensor_parallel_size` equals its `tensor_model_parallel_size`.

    Args:
        parameters: This rank's shards by their local names, or their module. They may be offloaded.
        name_map: See `NameMap`. It must translate the layer numbers of a stage to those of the checkpoint.
        tp_group: The process group of the tensor-parallel ranks; `None` without tensor parallelism.
        pp_group: The group of the ranks that hold other parameters: pipeline stages and expert-parallel ranks. If
            several ranks hold a name, the first sends it. This rank must be the only rank in both `pp_group` and
            `tp_group`. `None` if every rank holds all parameters.
        dtype: See `Outgoing`. Shards are cast before the gather. All tensors of one parameter are sent in the dtype of
            the first.
        device: The device of the gathers; by default the current GPU if this process uses one, else the CPU.

    Raises:
        InvalidRequestError: the number of a layout's tensors differs from the number of names, or the groups share more
            than one rank. If one rank fails, with this error or another, e.g. in `name_map`, all ranks raise.
    """

    only_reads = True  # see `weights.source.ReadingSource`

    def __init__(
        self,
        parameters: torch.nn.Module | Mapping[str, torch.Tensor],
        name_map: NameMap,
        *,
        tp_group: Any = None,
        pp_group: Any = None,
        dtype: Dtypes = None,
        device: torch.device | str | None = None,
    ) -> None:
        self._parameters = parameters
        self._outgoing = Outgoing(dtype)
        self._tp_group, self._pp_group = tp_group, pp_group
        self._tp_size = dist.get_world_size(tp_group) if tp_group is not None else 1
        self._stage = dist.get_rank(pp_group) if pp_group is not None else 0
        self._device = torch.device(device) if device else own_device()
        self._own: dict[tuple[str, ...], tuple[str, Layout]] = {}  # names of an entry: this rank's name, and the layout
        self._entries = self._plan(name_map)
        self._by_name = {name: entry for entry in self._entries for name in entry.names}
        self._cuts: dict[tuple[str, ...], _Cut] | None = None  # by the names of the entry; see `layouts`
        self._gathered = 0
        self._left_out: Collection[str] = ()
        self._current: Mapping[str, torch.Tensor] = {}  # the parameters, while `held` reads them
        self._parts: tuple[tuple[str, ...], list[torch.Tensor]] | None = None  # of the entry that `held` read last

    def specs(self) -> list[TensorSpec]:
        self.leave_out(())
        return self._specs()

    def _specs(self) -> list[TensorSpec]:
        return [
            msgspec.structs.replace(self._outgoing.spec(entry.names[0], getattr(torch, entry.dtype), shape), name=name)
            for entry in self._entries
            for name, shape in zip(entry.names, entry.shapes, strict=True)
        ]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        parameters = self._named()
        of_specs = [entry for entry in self._entries for _ in entry.names]
        self._gathered = sum(
            spec.nbytes
            for spec, entry in zip(self._specs(), of_specs, strict=True)
            if spec.name not in self._left_out and self._is_apart(entry)
        )
        for entry in self._entries:
            if entry.names[0] in self._left_out:  # all names of an entry are
                continue
            if entry.owner == self._stage:
                local, layout = self._own[entry.names]
                tensors = self._gather(entry.names[0], parameters[local], layout)
            else:
                dtype = self._outgoing.sent_as(entry.names[0], getattr(torch, entry.dtype))
                tensors = [torch.empty(shape, dtype=dtype, device=self._device) for shape in entry.shapes]
            for name in entry.names:
                yield name, self._broadcast(tensors.pop(0), entry.owner)

    @property
    def gathered(self) -> int:
        """See `weights.source.ShardedSource`. What stages broadcast counts too."""
        return self._gathered

    def layouts(self) -> list[shards.Layout | None] | None:
        """See `weights.source.ShardedSource`. All ranks must call it together: the first call tells all stages."""
        if self._cuts is None:
            self._cuts = self._find_cuts()
        found = [self._layout(entry, number) for entry in self._entries for number in range(len(entry.names))]
        return found if any(found) else None

    def leave_out(self, names: Collection[str]) -> None:
        self._left_out, self._parts = frozenset(names), None
        self._current = self._named() if names else {}

    def held(self, name: str) -> torch.Tensor:
        entry = self._by_name[name]
        if self._parts is None or self._parts[0] != entry.names:
            self._parts = None
            local, layout = self._own[entry.names]
            assert isinstance(layout, Parted)
            shard = self._outgoing.cast(entry.names[0], host_view(self._current[local].detach()))
            self._parts = entry.names, layout.parts(shard, self._tp_size if layout.sharded else 1)
        number = entry.names.index(name)
        whole, part = self._layout(entry, number), self._parts[1][number]
        box = None if whole is None else whole.box(_own_rank())
        if box is None or self._cuts is None:
            return part
        dim = self._cuts[entry.names].dim
        return part.narrow(dim, 0, box[dim][1])  # without the padding

    def _is_apart(self, entry: _Entry) -> bool:
        """Whether ranks lack something of the entry."""
        return self._pp_group is not None or (entry.sharded and self._tp_size > 1)

    def _layout(self, entry: _Entry, number: int) -> shards.Layout | None:
        """How a tensor of an entry lies over the ranks; `None` if every rank has it, or only a merge makes it."""
        cut = None if self._cuts is None else self._cuts.get(entry.names)
        if cut is None or not cut.lengths or not self._is_apart(entry):
            return None
        shape, length, dim = entry.shapes[number], cut.lengths[number], cut.dim
        boxes = []
        holders = entry.holders if entry.sharded else entry.holders[:1]
        for place in range(len(holders)):
            first = min(place * length, shape[dim])
            box = [(0, extent) for extent in shape]
            box[dim] = first, min(length, shape[dim] - first)
            boxes.append(tuple(box))
        return shards.Layout(tuple(holders), tuple(boxes))

    def _find_cuts(self) -> dict[tuple[str, ...], _Cut]:
        """The cuts of the entries of all stages, of each as its owner knows it.

        Raises:
            InvalidRequestError: a layout does not make as many parts as tensors; on all ranks of `pp_group`.
        """

        def own() -> list[_Cut]:
            parameters = self._named()
            return [self._cut(entry, parameters) for entry in self._entries if entry.owner == self._stage]

        return {cut.names: cut for stage in _agree(self._pp_group, own, as_type=list[_Cut]) for cut in stage}

    def _cut(self, entry: _Entry, parameters: Mapping[str, torch.Tensor]) -> _Cut:
        local, layout = self._own[entry.names]
        if not (isinstance(layout, Parted) and still_holds(layout, "parts", "merge") and all(entry.shapes)):
            return _Cut(entry.names, 0, ())
        shard = torch.empty(parameters[local].shape, device="meta")
        parts = layout.parts(shard, self._tp_size if layout.sharded else 1)
        if parts and len(parts) != len(entry.names):
            raise InvalidRequestError(f"{local}: {layout} makes {len(parts)} parts of {len(entry.names)}", name=local)
        return _Cut(entry.names, layout.dim, tuple(part.shape[layout.dim] for part in parts))

    @property
    def negotiable(self) -> bool:
        """See `weights.source.NegotiableSource`."""
        return self._outgoing.negotiable

    def revise(self, mismatches: Sequence[Mismatch]) -> bool:
        return self._outgoing.revise(mismatches)

    def _broadcast(self, tensor: torch.Tensor, owner: int) -> torch.Tensor:
        """Broadcast from the owner to all stages. On the other stages `tensor` is the buffer that receives."""
        if self._pp_group is None:
            return tensor
        tensor = tensor.contiguous()
        dist.broadcast(tensor, dist.get_global_rank(self._pp_group, owner), self._pp_group)
        return tensor

    def _gather(self, name: str, parameter: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
        shard = self._outgoing.cast(name, host_view(parameter.detach())).to(self._device).contiguous()
        shards = [shard]
        if layout.sharded and self._tp_size > 1:
            shards = [torch.empty_like(shard) for _ in range(self._tp_size)]
            dist.all_gather(shards, shard, group=self._tp_group)
        return layout.merge(shards)

    def _named(self) -> Mapping[str, torch.Tensor]:
        if isinstance(self._parameters, torch.nn.Module):
            return dict(self._parameters.named_parameters())
        return self._parameters

    def _plan(self, name_map: NameMap) -> list[_Entry]:
        """The parameters of all stages, in the order of the stages: the same list, or an error, on every rank."""
        own: list[_Entry] = []

        def plan_own() -> None:
            self._check_groups()
            own.extend(self._own_entries(name_map))

        def plan_stage() -> list[_Entry]:
            _agree(self._tp_group, plan_own)
            return own

        planned: dict[tuple[str, ...], _Entry] = {}
        for stage in _agree(self._pp_group, plan_stage, as_type=list[_Entry]):
            for entry in stage:
                planned.setdefault(entry.names, entry)
        return list(planned.values())

    def _check_groups(self) -> None:
        """Check that the groups share only this rank. Else one rank gathers while another broadcasts: a deadlock."""
        if self._tp_group is None or self._pp_group is None:
            return
        tensor, pipeline = (set(dist.get_process_group_ranks(group)) for group in (self._tp_group, self._pp_group))
        common = sorted(tensor & pipeline)
        if len(common) > 1:
            raise InvalidRequestError(
                f"tp_group and pp_group share the ranks {common}: expert-parallel ranks must not be tensor-parallel "
                "ranks of one group (set expert_tensor_parallel_size to tensor_model_parallel_size)",
                ranks=common,
            )

    def _own_entries(self, name_map: NameMap) -> Iterator[_Entry]:
        for local, tensor in self._named().items():
            mapped = name_map(local)
            if mapped is not None:
                names, layout = mapped
                ranks = self._tp_size if layout.sharded else 1
                meta = torch.empty(tensor.shape, device="meta")
                shapes = tuple(tuple(whole.shape) for whole in layout.merge([meta] * ranks))
                if len(shapes) != len(names):
                    raise InvalidRequestError(
                        f"{local}: {layout} makes {len(shapes)} tensors, but name_map returns {list(names)}", name=local
                    )
                self._own.setdefault(tuple(names), (local, layout))
                dtype = name_of(tensor.dtype)
                yield _Entry(self._stage, tuple(names), shapes, dtype, layout.sharded, self._tp_ranks())

    def _tp_ranks(self) -> tuple[int, ...]:
        """The tensor-parallel ranks of this rank's stage, in the whole world."""
        return (_own_rank(),) if self._tp_group is None else tuple(dist.get_process_group_ranks(self._tp_group))


def _own_rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _agree(group: Any, run: Callable[[], T], as_type: Any = Any) -> list[T]:
    """`Peers.agree` among the ranks of a group. Without a group, this rank is alone."""
    return [run()] if group is None else Peers(group).agree(run, as_type)
