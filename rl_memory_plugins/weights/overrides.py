"""What a subclass has changed, so that what its base says of itself may no longer be true."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeGuard

from rl_memory_plugins.weights.source import (
    ArrivingSource,
    Places,
    PlacingSource,
    ResidentSource,
    ShardedSource,
    StableSource,
    TensorSource,
)

if TYPE_CHECKING:
    import torch


def still_holds(one: Any, said: str, *of: str) -> bool:
    """Whether no subclass has overridden an attribute of `of` without `said`, which describes them."""
    return _depth(one, said) <= min(_depth(one, name) for name in of)


def as_sharded(source: TensorSource) -> ShardedSource | None:
    """The source, if its shards are what its `tensors` would gather; see `weights.source.ShardedSource`."""
    if isinstance(source, ShardedSource) and still_holds(source, "held", "specs", "tensors"):
        return source
    return None


def resident_of(source: TensorSource) -> list[torch.Tensor] | None:
    """The tensors of a source that has them all, if its `tensors` gives the same; see `source.ResidentSource`."""
    if isinstance(source, ResidentSource) and still_holds(source, "resident", "tensors"):
        return source.resident()
    return None


def is_stable(source: TensorSource) -> bool:
    """Whether no tensor of the source changes after it has been given; see `source.StableSource`."""
    return resident_of(source) is not None or (isinstance(source, StableSource) and source.stable)


def silent_s(source: TensorSource) -> float:
    """How long the source may wait for another trainer, in seconds; see `source.ArrivingSource`."""
    return source.silent_s if isinstance(source, ArrivingSource) else 0.0


def tensors_in(source: TensorSource, places: Places) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a source, made in `places` if the source can; see `weights.source.PlacingSource`."""
    if makes_in_places(source):
        return source.tensors_in(places)
    return source.tensors()


def makes_in_places(source: TensorSource) -> TypeGuard[PlacingSource]:
    """Whether a source can make tensors in places that it is given; see `weights.source.PlacingSource`."""
    return isinstance(source, PlacingSource) and still_holds(source, "tensors_in", "tensors")


def _depth(one: Any, name: str) -> int:
    """How many classes above that of an object define an attribute; -1 if the object has it by itself.

    Of one that only `__getattr__` gives, nothing is known but that all classes come before it.
    """
    if name in getattr(one, "__dict__", ()):
        return -1
    return next((depth for depth, kind in enumerate(type(one).__mro__) if name in vars(kind)), sys.maxsize)
