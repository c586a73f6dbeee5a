"""Manually sharded parameters, as in Megatron: tensor-parallel shards, fused projections, pipeline stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
import torch
import torch.distributed as dist

from rl_memory_plugins.errors import InvalidRequestError
from rl_memory_plugins.trainer.gpu import own_device
from rl_memory_plugins.trainer.offloading import host_view
from rl_memory_plugins.trainer.peers import Peers
from rl_memory_plugins.trainer.sources.outgoing import Dtypes, Outgoing
from rl_memory_plugins.weights.manifest import Mismatch, TensorSpec
from rl_memory_plugins.weights.source import name_of

T = TypeVar("T")


class Layout(Protocol):
    """The layout of the checkpoint's tensors in the shards of one parameter.

    Attributes:
        sharded: Whether the tensor-parallel ranks hold different parts.
    """

    sharded: bool

    def merge(self, shards: list[torch.Tensor]) -> list[torch.Tensor]:
        """The checkpoint's tensors, given the shards of all ranks in their order. The result may be views.

        Also called with shards on the meta device, for the shapes of the result.
        """


@dataclass(frozen=True)
class Replicated:
    """Every tensor-parallel rank holds the whole parameter, e.g. a norm or a router."""

    sharded = False

    def merge(self, shards: list[torch.Tensor]) -> list[torch.Tensor]:
        return shards


@dataclass(frozen=True)
class Split:
    """Sharded along `dim`: 0 for column-parallel layers and vocabularies, 1 for row-parallel layers.

    `size` is the unpadded size of `dim`, if the last rank's shard is padded, e.g. in vocabularies.
    """

    dim: int
    size: int | None = None
    sharded = True

    def merge(self, shards: list[torch.Tensor]) -> list[torch.Tensor]:
        whole = torch.cat(shards, self.dim)
        return [whole if self.size is None else whole.narrow(self.dim, 0, self.size)]


@dataclass(frozen=True)
class FusedQKV:
    """Megatron's fused weight or bias of attention: for each key-value head its queries, its key and its value.

    Shape `[kv_heads * (heads / kv_heads + 2) * head_dim, ...]`, sharded between key-value heads. `merge` returns q, k
    and v.
    """

    heads: int
    kv_heads: int
    head_dim: int
    sharded = True

    def merge(self, shards: list[torch.Tensor]) -> list[torch.Tensor]:
        rest = shards[0].shape[1:]
        queries = self.heads // self.kv_heads
        groups = torch.cat(shards).view(self.kv_heads, queries + 2, self.head_dim, *rest)
        parts = (groups[:, :queries], groups[:, queries], groups[:, queries + 1])
        return [part.reshape(-1, *rest) for part in parts]


@dataclass(frozen=True)
class GateUp:
    """The first weight of a gated MLP: each shard is a part of gate, then a part of up. `merge` returns gate and up."""

    sharded = True

    def merge(self, shards: list[torch.Tensor]) -> list[torch.Tensor]:
        halves = [shard.chunk(2) for shard in shards]
        return [torch.cat([half[part] for half in halves]) for part in (0, 1)]


NameMap = Callable[[str], tuple[Sequence[str], Layout] | None]
"""Maps a parameter's name on this rank to the checkpoint's names and the layout, or to `None` to skip it."""


class _Entry(NamedTuple):
    """The facts about a parameter that every rank knows."""

    owner: int  # rank within the pipeline group
    names: tuple[str, ...]  # names of the checkpoint's tensors in the parameter
    shapes: tuple[tuple[int, ...], ...]  # shapes of these tensors
    dtype: str  # torch's name of the parameter's dtype


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

    def specs(self) -> list[TensorSpec]:
        return [
            msgspec.structs.replace(self._outgoing.spec(entry.names[0], getattr(torch, entry.dtype), shape), name=name)
            for entry in self._entries
            for name, shape in zip(entry.names, entry.shapes, strict=True)
        ]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        parameters = self._named()
        for entry in self._entries:
            if entry.owner == self._stage:
                local, layout = self._own[entry.names]
                tensors = self._gather(entry.names[0], parameters[local], layout)
            else:
                dtype = self._outgoing.sent_as(entry.names[0], getattr(torch, entry.dtype))
                tensors = [torch.empty(shape, dtype=dtype, device=self._device) for shape in entry.shapes]
            for name in entry.names:
                yield name, self._broadcast(tensors.pop(0), entry.owner)

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
                shards = [torch.empty(tensor.shape, device="meta")] * (self._tp_size if layout.sharded else 1)
                shapes = tuple(tuple(whole.shape) for whole in layout.merge(shards))
                if len(shapes) != len(names):
                    raise InvalidRequestError(
                        f"{local}: {layout} makes {len(shapes)} tensors, but name_map returns {list(names)}", name=local
                    )
                self._own.setdefault(tuple(names), (local, layout))
                yield _Entry(self._stage, tuple(names), shapes, name_of(tensor.dtype))


def _agree(group: Any, run: Callable[[], T], as_type: Any = Any) -> list[T]:
    """`Peers.agree` among the ranks of a group. Without a group, this rank is alone."""
    return [run()] if group is None else Peers(group).agree(run, as_type)
