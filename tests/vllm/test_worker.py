"""What the worker's adapter does that no engine of this version needs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl_memory_plugins.config import RLMemoryConfig
from rl_memory_plugins.engines.vllm.capabilities import resident_graphs
from rl_memory_plugins.engines.vllm.native_allocator import NativeAllocator, stand_in
from rl_memory_plugins.engines.vllm.worker import VllmWorker
from rl_memory_plugins.errors import StateConflictError
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
    VllmWorker(SimpleNamespace(model_runner=runner), RLMemoryConfig())._after_wake(tags)
    assert runner.refreshed == refreshed


class Allocator:
    name = "vmm"

    def pool_id(self, tag: Tag) -> str:
        return f"the pool of {tag.value}"


@pytest.mark.parametrize(
    ("allocator", "tensor_parallel_size", "disable_custom_all_reduce", "why"),
    [
        (Allocator(), 1, False, ""),
        (Allocator(), 2, True, ""),
        (Allocator(), 2, False, "--disable-custom-all-reduce"),
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


def test_engines_that_come_later_capture_into_a_pool_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool for captures is the platform's, which all engines of a process share."""
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "_global_graph_pool", None)
    captured: list[Any] = []
    vllm_worker = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
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
