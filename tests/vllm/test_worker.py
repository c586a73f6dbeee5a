"""What the worker's adapter does that no engine of this version needs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl_memory_plugins.config import RLMemoryConfig
from rl_memory_plugins.engines import communicators
from rl_memory_plugins.engines.vllm import modes
from rl_memory_plugins.engines.vllm.capabilities import resident_graphs
from rl_memory_plugins.engines.vllm.native_allocator import NativeAllocator, stand_in
from rl_memory_plugins.engines.vllm.worker import VllmWorker
from rl_memory_plugins.errors import StateConflictError, UnsupportedError
from rl_memory_plugins.memory.allocator import Block
from rl_memory_plugins.tags import Tag


class SecondRunner:
    """vLLM 0.26's `v1.worker.gpu.model_runner`: its block tables hold pointers into the KV cache."""

    def __init__(self) -> None:
        self.refreshed = 0

    def post_kv_cache_wake_up(self) -> None:
        self.refreshed += 1


class FirstRunner(SecondRunner):
    """vLLM 0.26's `v1.worker.gpu_model_runner`: it sets the FP8 scales, calibrated or not, to 1.0."""

    def init_fp8_kv_scales(self) -> None: ...


@pytest.mark.parametrize(
    ("runner", "tags", "refreshed"),
    [
        (SecondRunner(), [Tag.KV_CACHE, Tag.WEIGHTS], 1),
        (SecondRunner(), [Tag.WEIGHTS], 0),
        (FirstRunner(), [Tag.KV_CACHE], 0),
    ],
)
def test_a_wake_refreshes_pointers_and_loses_no_scales(runner: Any, tags: list[Tag], refreshed: int) -> None:
    worker = VllmWorker(SimpleNamespace(model_runner=runner), RLMemoryConfig())
    worker._manager = SimpleNamespace(allocator=Allocator())  # type: ignore[assignment]
    worker._after_wake(tags)
    assert runner.refreshed == refreshed


def test_pooled_rows_of_the_named_requests_are_dropped() -> None:
    from vllm.v1.pool.metadata import PoolingStates

    requests = {name: SimpleNamespace(pooling_states=PoolingStates()) for name in ("again", "frozen")}
    for request in requests.values():
        request.pooling_states.hidden_states_cache.append(torch.zeros(16, 4))
    requests["tokens"] = SimpleNamespace(pooling_states=None)
    worker = VllmWorker(SimpleNamespace(model_runner=SimpleNamespace(requests=requests)), RLMemoryConfig())
    worker._drop_pooled_rows(["again", "tokens", "never scheduled"])
    assert requests["again"].pooling_states.hidden_states_cache == []
    assert len(requests["frozen"].pooling_states.hidden_states_cache) == 1
    VllmWorker(SimpleNamespace(model_runner=SecondRunner()), RLMemoryConfig())._drop_pooled_rows(["again"])


class Allocator:
    name = "vmm"

    def pool_id(self, tag: Tag) -> str:
        return f"the pool of {tag.value}"


@pytest.mark.parametrize(
    ("allocator", "tensor_parallel_size", "disable_custom_all_reduce", "why"),
    [
        (Allocator(), 1, False, ""),
        (Allocator(), 2, True, ""),
        (Allocator(), 2, False, ""),
        (SimpleNamespace(name="tms"), 1, False, "the tms allocator"),
    ],
)
def test_graphs_that_stay_say_why(
    allocator: Any, tensor_parallel_size: int, disable_custom_all_reduce: bool, why: str
) -> None:
    parallel = SimpleNamespace(
        tensor_parallel_size=tensor_parallel_size, disable_custom_all_reduce=disable_custom_all_reduce
    )
    found = resident_graphs(allocator, parallel)
    assert why in found and bool(why) == bool(found)


def test_graphs_stay_if_a_custom_all_reduce_cannot_leave_them_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(communicators, "_all_reduces", [SimpleNamespace(disabled=False)])
    parallel = SimpleNamespace(tensor_parallel_size=2, disable_custom_all_reduce=False)
    assert "--disable-custom-all-reduce" in resident_graphs(Allocator(), parallel)


@pytest.mark.parametrize("has_switch", [True, False])
def test_vllms_all_reduce_copies_its_input_in_a_capture(monkeypatch: pytest.MonkeyPatch, has_switch: bool) -> None:
    """vLLM's own class, without its start and its kernel. Releases before 0.32 have no switch for it."""
    import torch
    from vllm.distributed.device_communicators import custom_all_reduce

    buffers: list[int] = []
    monkeypatch.setattr(communicators, "_all_reduces", set())
    monkeypatch.setattr(communicators, "_staging", False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    kernel = SimpleNamespace(all_reduce=lambda ptr, inp, out, buffer, size: buffers.append(buffer), dispose=id)
    monkeypatch.setattr(custom_all_reduce, "ops", kernel)

    class AllReduce(custom_all_reduce.CustomAllreduce):
        def __init__(self) -> None:
            self.disabled, self._ptr, self._IS_CAPTURING = False, 0, True
            self.rank, self.world_size, self.fully_connected = 0, 2, True
            self.max_size, self.buffer_ptrs = 1 << 20, [4096]
            if has_switch:
                self._capture_registered = True

        def custom_all_reduce(self, input: Any) -> Any:
            registered = self._capture_registered if has_switch else True  # as before 0.32
            return self.all_reduce(input, registered=registered)

    all_reduce = communicators.note_custom_all_reduce(AllReduce.__init__)
    instance = object.__new__(AllReduce)
    all_reduce(instance)
    instance.custom_all_reduce(torch.zeros(64))
    assert communicators.stage_captures()
    instance.custom_all_reduce(torch.zeros(64))
    assert buffers == [0, 4096]  # the graph's own memory at first, then the buffer of the all-reduce


def test_engines_that_come_later_capture_into_a_pool_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool for captures is the platform's, which all engines of a process share."""
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "_global_graph_pool", None)
    captured: list[Any] = []
    vllm_worker = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        vllm_config=SimpleNamespace(model_config=SimpleNamespace()),
        compile_or_warm_up_model=lambda: captured.append(current_platform._global_graph_pool),
    )
    worker = VllmWorker(vllm_worker, RLMemoryConfig())
    worker._manager = SimpleNamespace(allocator=Allocator())  # type: ignore[assignment]
    worker._capture_graphs_in_a_region()
    vllm_worker.compile_or_warm_up_model()
    assert captured == ["the pool of cuda_graph"]
    assert current_platform._global_graph_pool is None


class Region:
    """An allocator with two blocks of weights and one of the KV cache."""

    name = "vmm"

    def blocks(self, tag: Tag) -> list[Block]:
        return {Tag.WEIGHTS: [Block(4096, 100), Block(8192, 50)], Tag.KV_CACHE: [Block(1 << 20, 7)]}.get(tag, [])

    def pool_id(self, tag: Tag) -> tuple[int, int]:
        return (0, list(Tag).index(tag))


@pytest.fixture
def cumem(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's allocator as on a GPU, with the worker's own in its place."""
    from vllm.device_allocator import cumem
    from vllm.platforms import current_platform

    monkeypatch.setattr(cumem, "cumem_available", True)
    monkeypatch.setattr(cumem.CuMemAllocator, "instance", None)
    monkeypatch.setattr(type(current_platform), "is_cuda_alike", lambda self: True)
    asleep = {Tag.WEIGHTS}
    manager: Any = SimpleNamespace(allocator=Region(), is_resident=lambda tag: tag not in asleep)
    entered: list[str] = []

    @contextlib.contextmanager
    def region(tag: str) -> Iterator[None]:
        entered.append(tag)
        yield

    stand_in(NativeAllocator(lambda: manager, region))
    return SimpleNamespace(found=cumem.CuMemAllocator.get_instance(), asleep=asleep, entered=entered)


def test_vllms_own_allocator_shows_the_blocks_of_this_package(cumem: Any) -> None:
    found = cumem.found.pointer_to_data
    assert {address: (data.handle[1], data.tag, data.is_asleep) for address, data in found.items()} == {
        4096: (100, "weights", True),
        8192: (50, "weights", True),
        1 << 20: (7, "kv_cache", False),
    }
    assert cumem.found.get_current_usage() == 157
    cumem.asleep.clear()
    assert not any(data.is_asleep for data in cumem.found.pointer_to_data.values())


def test_memory_that_vllm_allocates_by_itself_lies_in_the_regions(cumem: Any) -> None:
    with cumem.found.use_memory_pool("kv_cache"), cumem.found.use_memory_pool(tag="runtime"):
        pass
    with cumem.found.use_memory_pool():
        pass
    assert cumem.entered == ["kv_cache", "runtime", "default"]
    with cumem.found.cudagraph_pool() as pool:
        assert pool == Region().pool_id(Tag.CUDA_GRAPH)


@pytest.mark.parametrize("call", ["sleep", "wake_up", "discard"])
def test_vllms_own_allocator_moves_nothing_behind_the_engine(cumem: Any, call: str) -> None:
    with pytest.raises(StateConflictError, match=f"CuMemAllocator.{call}"):
        getattr(cumem.found, call)(("weights",))


def test_a_later_engine_without_the_package_has_vllms_own_allocator(cumem: Any) -> None:
    from vllm.device_allocator.cumem import CuMemAllocator

    stand_in(None)
    assert CuMemAllocator.instance is None
    theirs = CuMemAllocator.instance = object()
    stand_in(None)
    assert CuMemAllocator.instance is theirs
    CuMemAllocator.instance = None


def test_caches_are_found_at_any_depth() -> None:
    """Hybrid models have several state tensors for a layer, and pipeline stages nest them once more."""
    tensors = [torch.zeros(size) for size in (1, 2, 3, 4)]
    caches = {"attention": tensors[0], "mamba": [tensors[1], (tensors[2],)], "stages": [[{"inner": [tensors[3]]}], []]}
    worker = VllmWorker(SimpleNamespace(model_runner=SimpleNamespace(kv_caches=caches)), RLMemoryConfig())
    found = {(block.address, block.nbytes) for block in worker._discardable(Tag.KV_CACHE)}
    assert found == {(tensor.data_ptr(), tensor.nbytes) for tensor in tensors}


@pytest.mark.parametrize(
    ("asked", "why", "cudagraph_mode", "on_gpu", "is_refused"),
    [
        (True, "no pool", "FULL", True, True),
        (True, "", "FULL", True, False),
        (False, "no pool", "FULL", True, False),
        (True, "no pool", "NONE", True, False),  # there are no graphs
        (True, "no pool", "FULL", False, False),  # vLLM ignores the flag there
    ],
)
def test_graphs_that_the_flag_asks_to_release_are_released_or_refused(
    monkeypatch: pytest.MonkeyPatch, asked: bool, why: str, cudagraph_mode: str, on_gpu: bool, is_refused: bool
) -> None:
    from vllm.config import CUDAGraphMode
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_cuda_alike", lambda self: on_gpu)
    config = SimpleNamespace(
        model_config=SimpleNamespace(sleep_mode_offload_cudagraph=asked),
        compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode[cudagraph_mode]),
    )
    if is_refused:
        with pytest.raises(UnsupportedError, match=f"--sleep-mode-offload-cudagraph: .*{why}"):
            modes.refuse_resident_graphs(config, why)
    else:
        modes.refuse_resident_graphs(config, why)
