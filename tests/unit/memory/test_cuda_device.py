"""The cache of a GPU, without a GPU: when torch is asked to empty it."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import pytest
import torch

from rl_memory_plugins.memory.allocator import Block
from rl_memory_plugins.memory.copies import PIECE_BYTES
from rl_memory_plugins.memory.cuda_device import CudaDevice
from rl_memory_plugins.memory.manager import TRIM_THRESHOLD_BYTES

GRAPHS = 2 << 30  # temporaries of captured graphs: torch counts them as cached, and frees none of them
USED = 1 << 20


class Cache:
    """torch's memory: a pool of graphs, and beside it a segment in use, one in partial use and a free one."""

    def __init__(self) -> None:
        self.free, self.partly = 0, 0
        self.emptied = self.snapshots = 0

    def reserved(self, index: int) -> int:
        return GRAPHS + USED + self.partly + self.free

    def empty(self) -> None:
        self.free = 0
        self.emptied += 1

    def snapshot(self) -> dict[str, Any]:
        self.snapshots += 1
        sizes = [((0, 3), GRAPHS, 0), ((0, 0), USED + self.partly, USED), ((0, 0), self.free, 0)]
        return {
            "segments": [
                {
                    "device": 0,
                    "address": 1 << (40 + number),
                    "total_size": nbytes,
                    "active_size": active,
                    "segment_pool_id": pool,
                    "blocks": [],
                }
                for number, (pool, nbytes, active) in enumerate(sizes)
                if nbytes
            ]
        }


@pytest.fixture
def cache(monkeypatch):
    cache = Cache()
    monkeypatch.setattr(torch.cuda, "memory_reserved", cache.reserved)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda index: USED)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda index: {"reserved_bytes.all.current": cache.reserved(index)})
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", cache.snapshot)
    monkeypatch.setattr(torch.cuda, "empty_cache", cache.empty)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", lambda **_: None)
    monkeypatch.setattr("rl_memory_plugins.memory.cuda_device.gpu_name", lambda index: "GPU-1")
    return cache


def test_memory_that_an_emptying_does_not_free_is_no_reason_to_empty(cache):
    """Emptying takes 25 ms, and a sleep at TP=2 did it each time for the temporaries of its graphs."""
    device = CudaDevice(0)
    cache.partly, cache.free = 1 << 30, TRIM_THRESHOLD_BYTES - 1
    for _ in range(3):
        device.trim(TRIM_THRESHOLD_BYTES)
    assert cache.emptied == 0
    assert cache.snapshots == 1  # again only after torch has allocated or freed


def test_memory_that_has_become_free_is_a_reason(cache):
    device = CudaDevice(0)
    cache.partly = TRIM_THRESHOLD_BYTES
    device.trim(TRIM_THRESHOLD_BYTES)
    cache.partly, cache.free = 0, TRIM_THRESHOLD_BYTES + 1
    device.trim(TRIM_THRESHOLD_BYTES)
    assert (cache.emptied, cache.free) == (1, 0)


def test_without_a_bound_the_cache_is_always_emptied(cache):
    device = CudaDevice(0)
    for _ in range(2):
        cache.free = 1
        device.trim()
    assert (cache.emptied, cache.free, cache.snapshots) == (2, 0, 0)


@pytest.mark.parametrize("to_host", [True, False])
def test_no_copy_reaches_over_two_pieces_of_page_locked_memory(cache, monkeypatch, to_host):
    """The driver would refuse it."""

    class Bytes(NamedTuple):
        address: int
        nbytes: int
        device: str = "cpu"

        def copy_(self, source, *, non_blocking):
            assert non_blocking and {self.device, source.device} == {"cpu", "cuda:0"}
            assert (self.device == "cpu") is to_host and self.nbytes == source.nbytes
            host, gpu = (self, source) if to_host else (source, self)
            copied.append((host.address, gpu.address, host.nbytes))

    class Stream:
        def record_event(self):
            return self

        def synchronize(self):
            waited.append(list(copied))

    copied: list[tuple[int, int, int]] = []
    waited: list[Any] = []
    monkeypatch.setattr("rl_memory_plugins.memory.cuda_device.memory_view", Bytes)
    device = CudaDevice(0)
    monkeypatch.setattr(device, "_stream", Stream())
    monkeypatch.setattr(device, "_ordered_stream", lambda stream: contextlib.nullcontext())
    end = 5 * PIECE_BYTES
    pairs = [(Block(1 << 40, 100), end - 100), (Block(1 << 41, PIECE_BYTES + 30), end - 10), (Block(1 << 42, 0), end)]
    (device.begin_copy_to_host if to_host else device.begin_copy_from_host)(pairs)()
    second = 1 << 41
    assert copied == [
        (end - 100, 1 << 40, 100),
        (end - 10, second, 10),
        (end, second + 10, PIECE_BYTES),
        (end + PIECE_BYTES, second + 10 + PIECE_BYTES, 20),
    ]
    assert waited == [copied]
