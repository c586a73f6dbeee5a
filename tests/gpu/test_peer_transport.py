"""Updates from one GPU to another by CUDA IPC: buckets that the trainer packs on the engine's GPU."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from test_weight_stream import BUCKET, MODEL, OneByOne, assert_arrived, randomised

from integration.bench_wire import Engine
from rl_memory_plugins.errors import WeightUpdateError
from rl_memory_plugins.weights import cuda_ipc

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

PAGE = 2 << 20  # the least that the driver allocates by itself
OPTIONS = {"bucket_bytes": BUCKET, "timeout_s": 20}


def new_engine():
    """An engine on the second GPU; the trainer is on the first."""
    return Engine(MODEL, CUDA_VISIBLE_DEVICES="1")


@pytest.fixture(scope="module")
def engine():
    started = new_engine()
    yield started
    started.close()


@pytest.fixture
def copied(monkeypatch):
    """The bytes of the copies that this package makes itself."""
    found, copy, copy_many = [], cuda_ipc.CudaGpu.copy, cuda_ipc.CudaGpu.copy_many

    def noted(gpu, target, source, nbytes, stream):
        found.append(nbytes)
        copy(gpu, target, source, nbytes, stream)

    def many_noted(gpu, targets, sources, sizes, stream):
        found.extend(sizes)
        copy_many(gpu, targets, sources, sizes, stream)

    monkeypatch.setattr(cuda_ipc.CudaGpu, "copy", noted)
    monkeypatch.setattr(cuda_ipc.CudaGpu, "copy_many", many_noted)
    return found


@pytest.mark.parametrize(
    ("slots", "count", "bucket"), [(None, 3, BUCKET), (1, 1, BUCKET), (2, 2, BUCKET), (3, 3, 256 << 10)]
)
def test_auto_packs_on_the_engines_gpu(engine, copied, slots, count, bucket):
    """Small slots too, whose allocations the driver must not put together."""
    for seed in (1, 2):
        tensors = randomised(seed=seed)
        report, error = engine.update(tensors, slots=slots, **{**OPTIONS, "bucket_bytes": bucket})
        assert error is None and report["transport"] == "cuda_ipc"
        assert (count - 1) * bucket < report["staging_bytes"] <= count * max(bucket, PAGE)
        assert engine.call("state")["mapped"] == 0
        assert_arrived(engine, tensors)
    assert sum(copied) == 2 * sum(tensor.nbytes for tensor in tensors.values())


def test_a_source_may_use_its_memory_again(engine, copied):
    tensors = randomised(seed=3)
    report, error = engine.update(OneByOne(tensors), transport="cuda_ipc", **OPTIONS)
    assert error is None and copied
    assert_arrived(engine, tensors)


def test_tensors_of_any_layout_arrive(engine, copied):
    tensors = randomised(seed=4)
    given = {name: tensor.t().contiguous().t() if tensor.dim() == 2 else tensor for name, tensor in tensors.items()}
    report, error = engine.update(given, transport="cuda_ipc", **OPTIONS)
    assert error is None and 0 < sum(copied) < sum(tensor.nbytes for tensor in tensors.values())
    assert_arrived(engine, tensors)


@pytest.mark.parametrize("stable", [False, True], ids=["each", "together"])
@pytest.mark.parametrize("place", ["cuda", "mixed"])
def test_copies_follow_the_streams_on_which_tensors_were_made(engine, place, stable):
    tensors = randomised(seed=5)
    source = OneByOne(tensors)
    source.stable = stable

    def made_on_two_streams():
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        for number, (name, tensor) in enumerate(tensors.items()):
            with torch.cuda.stream(streams[number % 2]):
                torch.cuda._sleep(20_000_000)
                yield name, (tensor + 0).cpu() if place == "mixed" and number % 3 == 0 else tensor + 0

    source.tensors = made_on_two_streams
    report, error = engine.update(source, transport="cuda_ipc", **OPTIONS)
    assert error is None
    assert_arrived(engine, tensors)


def test_the_next_tensors_of_a_stable_source_wait_for_the_copies_of_those_before(engine):
    """They get the memory that torch's cache has of the former ones."""
    tensors = randomised(seed=8)
    source = OneByOne(tensors)
    source.stable = True

    def made_in_the_same_memory():
        for name, tensor in tensors.items():
            made = tensor + 0
            yield name, made
            del made

    source.tensors = made_in_the_same_memory
    for _ in range(3):
        assert engine.update(source, transport="cuda_ipc", **OPTIONS)[1] is None
        assert_arrived(engine, tensors)


@pytest.mark.parametrize("release", ["12.8", "12.0"])
def test_older_drivers_copy_too(engine, monkeypatch, release):
    gpu = cuda_ipc.local_gpu(cuda_ipc.gpu_name(0))

    class Older:
        def __getattr__(self, name):
            if name == "cuMemcpyBatchAsync_v2" or (release == "12.0" and name == "cuMemcpyBatchAsync"):
                raise AttributeError(name)
            return getattr(driver, name)

    driver = gpu._api
    monkeypatch.setattr(gpu, "_api", Older())
    tensors = randomised(seed=9)
    assert engine.update(tensors, transport="cuda_ipc", **OPTIONS)[1] is None
    assert_arrived(engine, tensors)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_an_engine_that_ends_in_the_middle_is_named_in_time(how):
    tensors = randomised(seed=6)
    engine = new_engine()
    process = engine.process

    def end(number):
        if number == 20:
            os.kill(process.pid, how)

    try:
        with pytest.raises(WeightUpdateError) as error:
            engine.update(OneByOne(tensors, end), transport="cuda_ipc", **OPTIONS)
        assert error.value.details["reason"] == ("lost" if how is signal.SIGKILL else "stalled")
    finally:
        process.kill()
        engine.close()
    torch.cuda.synchronize()
    again = new_engine()
    try:
        assert again.update(tensors, transport="cuda_ipc", **OPTIONS)[1] is None
        assert_arrived(again, tensors)
    finally:
        again.close()


def test_a_source_that_fails_with_a_bucket_on_its_way_leaves_no_memory(engine):
    tensors = randomised(seed=7)
    engine.update(tensors, transport="cuda_ipc", **OPTIONS)

    def fail(number):
        if number == 20:
            raise RuntimeError("the gather failed")

    for _ in range(2):
        before = torch.cuda.mem_get_info(1)[0]
        with pytest.raises(WeightUpdateError, match="the gather failed"):
            engine.update(OneByOne(tensors, fail), transport="cuda_ipc", **OPTIONS)
        assert before - torch.cuda.mem_get_info(1)[0] < BUCKET
    assert engine.update(tensors, transport="cuda_ipc", **OPTIONS)[1] is None
    assert_arrived(engine, tensors)
