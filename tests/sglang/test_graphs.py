"""Where SGLang's CUDA graphs are captured. The capture itself needs a GPU (`tests/gpu`)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.runner_utils import pool
from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter

from rl_memory_plugins.config import RLMemoryConfig
from rl_memory_plugins.engines import communicators
from rl_memory_plugins.engines.sglang import worker
from rl_memory_plugins.memory.fake import FakeAllocator

POOL = (0, 77)


class GpuAllocator(FakeAllocator):
    name = "vmm"

    def pool_id(self, tag: Any) -> tuple[int, int]:
        return POOL


@pytest.fixture(autouse=True)
def no_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(communicators, "_all_reduces", set())
    monkeypatch.setattr(communicators, "_staging", False)
    pool.set_global_graph_memory_pool(None)


def memory_of(allocator: Any, tp: int = 1, disable_custom_all_reduce: bool = False) -> worker.Memory:
    arguments = SimpleNamespace(
        tp_size=tp, disable_custom_all_reduce=disable_custom_all_reduce, model_path="target", revision=None
    )
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


def test_graphs_of_several_ranks_go_to_our_pool() -> None:
    for off in (True, False):
        load_weights(memory_of(GpuAllocator(), tp=2, disable_custom_all_reduce=off))
        assert pool.get_global_graph_memory_pool() == POOL
        pool.set_global_graph_memory_pool(None)


def test_graphs_that_other_ranks_read_stay_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(communicators, "_all_reduces", [SimpleNamespace(disabled=False)])
    memory = memory_of(GpuAllocator(), tp=2)
    load_weights(memory)
    assert pool.get_global_graph_memory_pool() is None
    assert "--disable-custom-all-reduce" in memory.notes[0]


def test_sglangs_all_reduce_copies_its_input_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own class, without its start and its kernel."""
    from sglang.srt.distributed.device_communicators import custom_all_reduce

    buffers: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    kernel = SimpleNamespace(all_reduce=lambda ptr, inp, out, buffer, size: buffers.append(buffer))
    monkeypatch.setattr(custom_all_reduce, "ops", kernel)
    monkeypatch.setattr(custom_all_reduce, "_is_hip", False)

    class AllReduce(custom_all_reduce.CustomAllreduce):
        def __init__(self) -> None:
            self.disabled, self._ptr, self._IS_CAPTURING, self.tms_cudagraph = False, 0, True, False
            self.rank, self.world_size, self.full_nvlink = 0, 2, True
            self.max_size, self.buffer_ptrs = 1 << 20, [4096]

    instance = object.__new__(AllReduce)
    communicators.note_custom_all_reduce(AllReduce.__init__)(instance)
    instance.custom_all_reduce(torch.zeros(64))
    assert communicators.stage_captures()
    instance.custom_all_reduce(torch.zeros(64))
    assert buffers == [0, 4096]  # the graph's own memory at first, then the buffer of the all-reduce


def test_sglangs_second_all_reduce_allows_no_graph_mode_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.distributed.device_communicators.custom_all_reduce_v2 import CustomAllReduceV2

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    class AllReduce(CustomAllReduceV2):
        def __init__(self) -> None:
            self.disabled, self._is_graph_mode_supported, self._graph_inputs = False, True, []
            self._graph_mode_allowed = False

    instance = object.__new__(AllReduce)
    communicators.note_custom_all_reduce(AllReduce.__init__)(instance)
    allowed = []
    for _ in range(2):
        with instance.capture():
            allowed.append(instance._graph_mode_allowed)
        assert communicators.stage_captures()
    assert allowed == [True, False]


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
