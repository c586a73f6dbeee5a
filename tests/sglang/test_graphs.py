"""Where SGLang's CUDA graphs are captured. The capture itself needs a GPU (`tests/gpu`)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.model_executor.runner_utils import pool
from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter

from rl_memory_plugins.config import RLMemoryConfig
from rl_memory_plugins.engines.sglang import worker
from rl_memory_plugins.memory.fake import FakeAllocator

POOL = (0, 77)


class GpuAllocator(FakeAllocator):
    name = "vmm"

    def pool_id(self, tag: Any) -> tuple[int, int]:
        return POOL


@pytest.fixture(autouse=True)
def no_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_MEMORY_SAVER_CUDA_GRAPH", raising=False)
    pool.set_global_graph_memory_pool(None)


def memory_of(allocator: Any, tp: int = 1, disable_custom_all_reduce: bool = False) -> worker.Memory:
    arguments = SimpleNamespace(tp_size=tp, disable_custom_all_reduce=disable_custom_all_reduce)
    memory = worker.Memory(RLMemoryConfig(), lambda: ("cpu", 0), arguments)
    memory.chosen = (allocator, None)
    return memory


def load_weights(memory: worker.Memory) -> None:
    adapter = worker.RegionAdapter(memory, enabled=True)
    with adapter.region("kv_cache"):
        assert pool.get_global_graph_memory_pool() is None
    with adapter.region("weights"):
        pass


def test_graphs_go_to_our_pool() -> None:
    memory = memory_of(GpuAllocator())
    load_weights(memory)
    assert pool.get_or_create_global_graph_memory_pool(None) == POOL
    assert memory.notes == []


def test_graphs_that_other_ranks_read_stay_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = memory_of(GpuAllocator(), tp=2)
    load_weights(memory)
    assert pool.get_global_graph_memory_pool() is None
    assert "--disable-custom-all-reduce" in memory.notes[0]

    load_weights(memory_of(GpuAllocator(), tp=2, disable_custom_all_reduce=True))
    assert pool.get_global_graph_memory_pool() == POOL
    pool.set_global_graph_memory_pool(None)
    monkeypatch.setenv("SGLANG_MEMORY_SAVER_CUDA_GRAPH", "1")
    load_weights(memory_of(GpuAllocator(), tp=2))
    assert pool.get_global_graph_memory_pool() == POOL


def test_an_allocator_without_a_graph_pool_says_so() -> None:
    memory = memory_of(FakeAllocator())
    load_weights(memory)
    assert memory.notes == ["CUDA graphs stay resident: the fake allocator has no pool for graphs"]
    assert pool.get_global_graph_memory_pool() is None


def test_backends_that_refuse_a_memory_saver_are_not_shown_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's default prefill backend raises at the start if the adapter that it asked to be off is on."""
    monkeypatch.setattr(worker, "_memory", memory_of(GpuAllocator()))
    create = worker._create(TorchMemorySaverAdapter.create)
    assert create(enable=False).enabled is False
    assert create(enable=True).enabled is True
