"""The segments of torch's caching allocator, by pool."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from itertools import product
from typing import Any, NamedTuple

import torch

from rl_memory_plugins.memory.allocator import Block

#: torch's pool for allocations outside all private pools.
DEFAULT_POOL = (0, 0)


class Segment(NamedTuple):
    """One allocation that torch made for a pool.

    Attributes:
        active_bytes: Bytes that tensors use.
        unused: Parts that torch may give to new tensors. No tensor and no pending work on the device uses them.
    """

    address: int
    nbytes: int
    active_bytes: int
    unused: tuple[Block, ...] = ()


class Segments:
    """The segments of one GPU by pool. They are read again only after torch has allocated or freed memory.

    `MemPool.snapshot` would read one pool only, but in torch 2.11 it drops one reference too many to the numbers of the
    pool's identifier, which leads to a segmentation fault.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._lock = threading.RLock()
        self._seen: tuple[int, ...] | None = None
        self._by_pool: dict[tuple[int, int], list[Segment]] = {}

    def of(self, pools: Iterable[Any]) -> list[Segment]:
        """The segments of these pools (`torch.cuda.MemPool`), in no particular order."""
        found = self.by_pool()
        return [segment for pool in pools for segment in found.get(pool_key(pool), ())]

    def by_pool(self) -> dict[tuple[int, int], list[Segment]]:
        """All segments by the identifiers of their pools."""
        with self._lock:
            stats = torch.cuda.memory_stats(self._index)
            counts = product(("active", "reserved_bytes"), ("allocated", "freed", "current"))
            now = tuple(stats.get(f"{memory}.all.{count}", 0) for memory, count in counts)
            if now != self._seen:
                self.read()
                self._seen = now  # taken before the read: a change during the read causes another read
            return dict(self._by_pool)

    def read(self) -> set[int]:
        """Read all segments again. Returns their addresses."""
        with self._lock:
            self._by_pool = {}
            for found in torch.cuda.memory._snapshot()["segments"]:
                if found["device"] == self._index:
                    inactive = (part for part in found["blocks"] if part["state"] == "inactive")
                    unused = tuple(Block(part["address"], part["size"]) for part in inactive)
                    segment = Segment(found["address"], found["total_size"], found["active_size"], unused)
                    self._by_pool.setdefault(tuple(found["segment_pool_id"]), []).append(segment)
            return {segment.address for segments in self._by_pool.values() for segment in segments}


def pool_key(pool: Any) -> tuple[int, int]:
    """The identifier of a `torch.cuda.MemPool`, as used by snapshots and `torch.cuda.graph(pool=…)`."""
    first, second = pool.id
    return int(first), int(second)


def cached_bytes(segments: Iterable[Segment]) -> int:
    """The bytes of the segments that no tensor uses."""
    return sum(segment.nbytes for segment in segments if not segment.active_bytes)
