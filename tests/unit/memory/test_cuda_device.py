"""The cache of a GPU, without a GPU: when torch is asked to empty it."""

from __future__ import annotations

import contextlib

import pytest
import torch

from rl_memory_plugins.memory.cuda_device import CudaDevice
from rl_memory_plugins.memory.manager import TRIM_THRESHOLD_BYTES

GRAPHS = 2 << 30  # temporaries of captured graphs: torch counts them as cached, and frees none of them


class Cache:
    """torch's cache: some bytes stay in it, the others leave it when it is emptied."""

    def __init__(self) -> None:
        self.stays, self.free, self.emptied = GRAPHS, 0, 0

    def empty(self) -> None:
        self.free = 0
        self.emptied += 1


@pytest.fixture
def cache(monkeypatch):
    cache = Cache()
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 7 + cache.stays + cache.free)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda index: 7)
    monkeypatch.setattr(torch.cuda, "empty_cache", cache.empty)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", lambda **_: None)
    monkeypatch.setattr("rl_memory_plugins.memory.cuda_device.gpu_name", lambda index: "GPU-1")
    return cache


def test_what_an_emptying_leaves_is_no_reason_to_empty_again(cache):
    """Emptying takes 25 ms, and a sleep at TP=2 did it each time for the temporaries of its graphs."""
    device = CudaDevice(0)
    for _ in range(3):
        device.trim(TRIM_THRESHOLD_BYTES)
    assert cache.emptied == 1
    cache.free = TRIM_THRESHOLD_BYTES - 1
    device.trim(TRIM_THRESHOLD_BYTES)
    assert cache.emptied == 1
    cache.free = TRIM_THRESHOLD_BYTES
    device.trim(TRIM_THRESHOLD_BYTES)
    assert (cache.emptied, cache.free) == (2, 0)


def test_what_has_left_the_cache_by_itself_counts_when_it_comes_back(cache):
    device = CudaDevice(0)
    device.trim(TRIM_THRESHOLD_BYTES)
    cache.stays = 0
    device.trim(TRIM_THRESHOLD_BYTES)
    cache.free = TRIM_THRESHOLD_BYTES
    device.trim(TRIM_THRESHOLD_BYTES)
    assert (cache.emptied, cache.free) == (2, 0)


def test_without_a_bound_the_cache_is_always_emptied(cache):
    device = CudaDevice(0)
    for _ in range(2):
        cache.free = 1
        device.trim()
    assert (cache.emptied, cache.free) == (2, 0)
