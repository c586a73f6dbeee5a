"""When the rounds of `aggressive_empty_cache` end, on a pretended GPU; and what it says without one."""

import gc

import pytest
import torch

from rl_memory_plugins.trainer import aggressive_empty_cache

GIB = 1 << 30


@pytest.fixture
def gpu(monkeypatch):
    """A GPU whose cache gives back 50 GiB at first, then the listed bytes, one entry for each round."""

    class Gpu:
        reserved = 100 * GIB
        frees = ()
        calls = []

        def empty_cache(self):
            freed, *self.frees = (50 * GIB, *self.frees) if not self.calls else (*self.frees, 0)
            self.reserved -= freed
            self.calls.append("empty_cache")

    gpu = Gpu()
    gpu.calls = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: gpu.reserved)
    monkeypatch.setattr(torch.cuda, "empty_cache", gpu.empty_cache)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: gpu.calls.append("synchronize"))
    monkeypatch.setattr(gc, "collect", lambda: gpu.calls.append("collect") or 7)
    return gpu


@pytest.mark.parametrize(
    ("frees", "rounds"),
    [
        ([0], [0]),
        ([GIB - 1, GIB], [GIB - 1]),
        ([GIB, 5], [GIB, 5]),
        ([3 * GIB, GIB, GIB, GIB], [3 * GIB, GIB, GIB]),
    ],
)
def test_a_round_that_frees_little_is_the_last(gpu, frees, rounds):
    gpu.frees = frees
    clearing = aggressive_empty_cache()
    assert clearing.freed_bytes == rounds
    assert clearing.collected == 7 * len(rounds)
    assert gpu.calls == ["empty_cache"] + ["collect", "empty_cache", "synchronize"] * len(rounds)
    assert clearing.seconds > 0


def test_the_bounds_are_arguments(gpu):
    gpu.frees = [10, 9, 8, 7]
    assert aggressive_empty_cache(max_rounds=4, threshold_bytes=9).freed_bytes == [10, 9, 8]


@pytest.mark.parametrize(("in_use", "rounds"), [(49 * GIB, 1), (49 * GIB + 1, 0)])
def test_nothing_is_collected_where_it_cannot_help(gpu, in_use, rounds):
    assert len(aggressive_empty_cache(in_use_bytes=in_use).freed_bytes) == rounds
    assert gpu.calls.count("collect") == rounds


def test_without_rounds_the_cache_is_emptied_and_nothing_collected(gpu):
    clearing = aggressive_empty_cache(max_rounds=0)
    assert gpu.calls == ["empty_cache"] and gpu.reserved == 50 * GIB
    assert clearing.freed_bytes == [] and clearing.collected == 0


def test_without_a_gpu_garbage_is_collected_and_nothing_is_claimed():
    class Node:
        pass

    node = Node()
    node.itself = node
    del node
    clearing = aggressive_empty_cache()
    assert clearing.freed_bytes == []
    assert clearing.collected >= 1
    assert not torch.cuda.is_initialized()
