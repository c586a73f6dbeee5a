"""How Megatron's shards of a parameter lie in the tensors of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch


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


@runtime_checkable
class Parted(Layout, Protocol):
    """A layout of which each shard is a part of each tensor by itself.

    It says nothing about a subclass with a `merge` of its own and no `parts`.

    Attributes:
        dim: The dimension along which the parts of the ranks follow each other; all parts of a tensor are equally long.
    """

    dim: int

    def parts(self, shard: torch.Tensor, ranks: int) -> list[torch.Tensor]:
        """The parts of the checkpoint's tensors that are in one shard of so many ranks. The result may be views.

        Also called with a shard on the meta device. Without a result the tensors are gathered and merged.
        """


@dataclass(frozen=True)
class Replicated:
    """Every tensor-parallel rank holds the whole parameter, e.g. a norm or a router."""

    sharded = False
    dim = 0

    def merge(self, shards: list[torch.Tensor]) -> list[torch.Tensor]:
        return shards

    def parts(self, shard: torch.Tensor, ranks: int) -> list[torch.Tensor]:
        return [shard]


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

    def parts(self, shard: torch.Tensor, ranks: int) -> list[torch.Tensor]:
        return [shard]


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
    dim = 0

    def merge(self, shards: list[torch.Tensor]) -> list[torch.Tensor]:
        return self._split(torch.cat(shards), self.kv_heads)

    def parts(self, shard: torch.Tensor, ranks: int) -> list[torch.Tensor]:
        if self.kv_heads % ranks:  # a key-value head lies on several ranks
            return []
        return self._split(shard, self.kv_heads // ranks)

    def _split(self, fused: torch.Tensor, kv_heads: int) -> list[torch.Tensor]:
        rest = fused.shape[1:]
        queries = self.heads // self.kv_heads
        groups = fused.view(kv_heads, queries + 2, self.head_dim, *rest)
        parts = (groups[:, :queries], groups[:, queries], groups[:, queries + 1])
        return [part.reshape(-1, *rest) for part in parts]


@dataclass(frozen=True)
class GateUp:
    """The first weight of a gated MLP: each shard is a part of gate, then a part of up. `merge` returns gate and up."""

    sharded = True
    dim = 0

    def parts(self, shard: torch.Tensor, ranks: int) -> list[torch.Tensor]:
        return list(shard.chunk(2))

    def merge(self, shards: list[torch.Tensor]) -> list[torch.Tensor]:
        halves = [shard.chunk(2) for shard in shards]
        return [torch.cat([half[part] for half in halves]) for part in (0, 1)]
