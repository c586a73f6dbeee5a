"""Parameters sharded by hand, as Megatron does: tensor-parallel shards, fused projections, pipeline stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from rl_memory_plugins.errors import InvalidRequestError
from rl_memory_plugins.trainer.offloading import host_view
from rl_memory_plugins.trainer.peers import Peers
from rl_memory_plugins.trainer.sources.outgoing import Outgoing
from rl_memory_plugins.weights.manifest import TensorSpec
from rl_memory_plugins.weights.source import name_of

T = TypeVar("T")


class Layout(Protocol):
    """How the checkpoint's tensors lie in the shards of one parameter."""

    @property
    def sharded(self) -> bool:
        """Whether the tensor-parallel ranks hold different parts."""

    def shapes(self, shard: Sequence[int], ranks: int) -> list[tuple[int, ...]]:
        """The shapes of the checkpoint's tensors, from the shape of one rank's shard."""

    def merge(self, shards: list[torch.Tensor]) -> list[torch.Tensor]:
        """The checkpoint's tensors, from all ranks' shards in their order; they may be views."""


@dataclass(frozen=True)
class Replicated:
    """Every tensor-parallel rank holds the whole: norms, routers."""

    sharded = False

    def shapes(self, shard: Sequence[int], ranks: int) -> list[tuple[int, ...]]:
        return [tuple(shard)]

    def merge(self, shards: list[torch.Tensor]) -> list[torch.Tensor]:
        return shards


@dataclass(frozen=True)
class Split:
    """Cut along `dim`: 0 for column-parallel layers and vocabularies, 1 for row-parallel layers.

    `size` is the true extent where the last rank's shard is padded, as vocabularies are.
    """

    dim: int
    size: int | None = None
    sharded = True

    def shapes(self, shard: Sequence[int], ranks: int) -> list[tuple[int, ...]]:
        extent = shard[self.dim] * ranks if self.size is None else self.size
        return [(*shard[: self.dim], extent, *shard[self.dim + 1 :])]

    def merge(self, shards: list[torch.Tensor]) -> list[torch.Tensor]:
        whole = torch.cat(shards, self.dim)
        return [whole if self.size is None else whole.narrow(self.dim, 0, self.size)]


@dataclass(frozen=True)
class FusedQKV:
    """Attention's weight or bias as Megatron keeps it: for each key-value head its queries, its key, its value.

    `[kv_heads * (heads / kv_heads + 2) * head_dim, ...]`, cut between key-value heads. Gives q, k and v.
    """

    heads: int
    kv_heads: int
    head_dim: int
    sharded = True

    def shapes(self, shard: Sequence[int], ranks: int) -> list[tuple[int, ...]]:
        rest = tuple(shard[1:])
        return [(count * self.head_dim, *rest) for count in (self.heads, self.kv_heads, self.kv_heads)]

    def merge(self, shards: list[torch.Tensor]) -> list[torch.Tensor]:
        rest = shards[0].shape[1:]
        queries = self.heads // self.kv_heads
        groups = torch.cat(shards).view(self.kv_heads, queries + 2, self.head_dim, *rest)
        parts = (groups[:, :queries], groups[:, queries], groups[:, queries + 1])
        return [part.reshape(-1, *rest) for part in parts]


@dataclass(frozen=True)
class GateUp:
    """A gated MLP's first weight: every rank's shard is its part of gate, then its part of up. Gives both."""

    sharded = True

    def shapes(self, shard: Sequence[int], ranks: int) -> list[tuple[int, ...]]:
        return [(shard[0] // 2 * ranks, *shard[1:])] * 2

    def merge(self, shards: list[torch.Tensor]) -> list[torch.Tensor]:
        halves = [shard.chunk(2) for shard in shards]
        return [torch.cat([half[part] for half in halves]) for part in (0, 1)]


NameMap = Callable[[str], tuple[Sequence[str], Layout] | None]
"""Gives the checkpoint's names and the layout for a parameter's name on this rank; `None` leaves it out."""


class _Entry(NamedTuple):
    """One parameter, as every rank knows it."""

    owner: int  # rank within the pipeline group
    names: tuple[str, ...]  # of the checkpoint's tensors that it holds
    shapes: tuple[tuple[int, ...], ...]  # theirs
    dtype: str  # its own, by torch's name


class _Local(NamedTuple):
    """One parameter, as its owner knows it."""

    name: str
    layout: Layout


class MegatronSource:
    """Shards gathered over the tensor-parallel group, then broadcast from the stage that owns them.

    Made on all ranks together, and iterated by all in step. At any moment there exist one parameter's shards
    and what is made of them.

    Expert-parallel ranks must be other ranks than the tensor-parallel ones, as where Megatron's
    `expert_tensor_parallel_size` is its `tensor_model_parallel_size`. Experts that are spread over the
    tensor-parallel ranks cannot be sent by this source.

    Args:
        parameters: This rank's shards by their local names, or their module. They may be offloaded.
        name_map: See `NameMap`. It translates a stage's own layer numbers to the checkpoint's.
        tp_group: The process group of tensor-parallel ranks; `None` where there is one only.
        pp_group: The group of the ranks that hold other parameters: pipeline stages, and expert-parallel ranks
            where there are any. A name that several hold is taken from the first. This rank is the only one that
            it shares with `tp_group`. `None` where all hold all.
        dtype: What floating-point tensors are sent as. Shards are cast before they are gathered.
        device: Where shards are gathered; by default the current GPU if the process uses one.

    Raises:
        InvalidRequestError: a layout does not give as many tensors as it has names, or the groups have more than one
            rank in common. Here and for whatever else fails on one rank, e.g. in `name_map`, all ranks get the error.
    """

    def __init__(
        self,
        parameters: torch.nn.Module | Mapping[str, torch.Tensor],
        name_map: NameMap,
        *,
        tp_group: Any = None,
        pp_group: Any = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        import torch.distributed as dist

        self._dist = dist
        self._parameters = parameters
        self._outgoing = Outgoing(dtype)
        self._tp_group, self._pp_group = tp_group, pp_group
        self._tp_size = dist.get_world_size(tp_group) if tp_group is not None else 1
        self._stage = dist.get_rank(pp_group) if pp_group is not None else 0
        self._device = torch.device(device or ("cuda" if torch.cuda.is_initialized() else "cpu"))
        self._own: dict[tuple[str, ...], _Local] = {}
        self._entries = self._plan(name_map)

    def specs(self) -> list[TensorSpec]:
        return [
            self._outgoing.spec(name, getattr(torch, entry.dtype), shape)
            for entry in self._entries
            for name, shape in zip(entry.names, entry.shapes, strict=True)
        ]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        parameters = self._named()
        for entry in self._entries:
            if entry.owner == self._stage:
                own = self._own[entry.names]
                tensors = self._gather(parameters[own.name], own.layout)
            else:
                dtype = self._outgoing.sent_as(getattr(torch, entry.dtype))
                tensors = [torch.empty(shape, dtype=dtype, device=self._device) for shape in entry.shapes]
            for name in entry.names:
                yield name, self._share(tensors.pop(0), entry.owner)

    def _share(self, tensor: torch.Tensor, owner: int) -> torch.Tensor:
        """From the owner to all stages; on the others `tensor` is only room for it."""
        if self._pp_group is None:
            return tensor
        tensor = tensor.contiguous()
        self._dist.broadcast(tensor, self._dist.get_global_rank(self._pp_group, owner), self._pp_group)
        return tensor

    def _gather(self, parameter: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
        shard = self._outgoing.cast(host_view(parameter.detach())).to(self._device).contiguous()
        shards = [shard]
        if layout.sharded and self._tp_size > 1:
            shards = [torch.empty_like(shard) for _ in range(self._tp_size)]
            self._dist.all_gather(shards, shard, group=self._tp_group)
        return layout.merge(shards)

    def _named(self) -> Mapping[str, torch.Tensor]:
        if isinstance(self._parameters, torch.nn.Module):
            return dict(self._parameters.named_parameters())
        return self._parameters

    def _plan(self, name_map: NameMap) -> list[_Entry]:
        """All stages' parameters in the order of the stages: the same list on every rank, or an error on every one."""
        own: list[_Entry] = []
        error: Exception | None = None
        try:
            self._check_groups()
            own = list(self._own_entries(name_map))
        except Exception as failure:
            error = failure
        _, error = _shared(self._tp_group, None, error)
        stages, error = _shared(self._pp_group, own, error, as_type=list[_Entry])
        if error is not None:
            raise error
        planned: dict[tuple[str, ...], _Entry] = {}
        for stage in stages:
            for entry in stage:
                planned.setdefault(entry.names, entry)
        return list(planned.values())

    def _check_groups(self) -> None:
        """Ranks in both groups would wait in different collectives: one in a gather, another in a broadcast."""
        if self._tp_group is None or self._pp_group is None:
            return
        tensor, pipeline = (set(self._dist.get_process_group_ranks(one)) for one in (self._tp_group, self._pp_group))
        common = sorted(tensor & pipeline)
        if len(common) > 1:
            raise InvalidRequestError(
                f"tp_group and pp_group share the ranks {common}: experts must lie on other ranks than tensor-parallel "
                "shards (expert_tensor_parallel_size equal to tensor_model_parallel_size)",
                ranks=common,
            )

    def _own_entries(self, name_map: NameMap) -> Iterator[_Entry]:
        for local, tensor in self._named().items():
            mapped = name_map(local)
            if mapped is not None:
                names, layout = mapped
                shapes = tuple(tuple(shape) for shape in layout.shapes(tensor.shape, self._tp_size))
                if len(shapes) != len(names):
                    raise InvalidRequestError(f"{local}: {layout} does not give {list(names)}", name=local)
                self._own.setdefault(tuple(names), _Local(local, layout))
                yield _Entry(self._stage, tuple(names), shapes, name_of(tensor.dtype))


def _shared(group: Any, value: T, error: Exception | None, as_type: Any = Any) -> tuple[list[T], Exception | None]:
    """All ranks' values, or an error if any rank of the group has one; see `Peers.share`."""
    if group is None:
        return [value], error
    try:
        return Peers(group).share(value, error, as_type=as_type), None
    except Exception as failure:
        return [], failure
