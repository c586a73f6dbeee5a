"""Updates from one GPU to another over NCCL: what arrives, the life of the communicator, and either end's death."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from processes import ROOT, other_process
from test_weight_stream import BUCKET, MODEL, OneByOne, assert_arrived, randomised

from integration.bench_wire import Engine
from integration.waiting import wait_until
from rl_memory_plugins.errors import UnsupportedError, WeightUpdateError
from rl_memory_plugins.trainer import ModelSource
from rl_memory_plugins.weights import cuda_ipc
from rl_memory_plugins.weights.buffers import NcclStaging
from rl_memory_plugins.weights.communicators import kept, over_nccl

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

NCCL = {"transport": "nccl", "bucket_bytes": BUCKET, "timeout_s": 60}


def new_engine():
    """An engine on the second GPU; the trainer is on the first."""
    return Engine(MODEL, CUDA_VISIBLE_DEVICES="1")


@pytest.fixture
def engine():
    started = new_engine()
    yield started
    kept.close_communicators()
    started.close()


@pytest.fixture(scope="module")
def lasting_engine():
    """For tests that do not end it."""
    started = new_engine()
    yield started
    kept.close_communicators()
    started.close()


@pytest.fixture
def made(monkeypatch):
    """How many communicators the trainer has made."""
    found, make = [], over_nccl.new_unique_id

    def noted():
        found.append(make())
        return found[-1]

    monkeypatch.setattr("rl_memory_plugins.weights.communicators.joining.new_unique_id", noted)
    return found


@pytest.mark.parametrize("place", ["cuda", "pinned", "cpu"])
def test_weights_arrive_by_one_communicator(engine, made, place):
    for seed in (1, 2, 3):
        tensors = randomised(place, seed)
        source = OneByOne(tensors) if seed == 3 else tensors
        report, error = engine.update(source, **NCCL)
        assert error is None and report["transport"] == report["receivers"][0]["transport"] == "nccl"
        assert_arrived(engine, tensors)
    assert len(made) == 1


@pytest.mark.parametrize("stable", [False, True])
def test_a_bucket_is_sent_after_its_copies_on_all_streams_though_no_thread_waits(lasting_engine, stable):
    tensors = randomised(seed=9)
    source = OneByOne(tensors)
    source.stable = stable

    def made_on_two_streams():
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        for number, (name, tensor) in enumerate(tensors.items()):
            with torch.cuda.stream(streams[number % 2]):
                torch.cuda._sleep(20_000_000)
                yield name, tensor + 0

    source.tensors = made_on_two_streams
    for _ in range(2):
        report, error = lasting_engine.update(source, **NCCL)
        assert error is None and report["transport"] == "nccl"
        assert_arrived(lasting_engine, tensors)


@pytest.mark.parametrize("slots", [None, 1, 2])
def test_slots_are_used_again_and_again(lasting_engine, slots):
    for seed in (10, 11):
        tensors = randomised(seed=seed)
        report, error = lasting_engine.update(OneByOne(tensors), **{**NCCL, "bucket_bytes": 1 << 20, "slots": slots})
        assert error is None and report["buckets"] > 50
        assert_arrived(lasting_engine, tensors)


@pytest.mark.parametrize("number", [0, 5])
def test_a_bucket_with_another_seal_is_not_written_and_the_next_update_is_right(lasting_engine, monkeypatch, number):
    tensors, sent = randomised(seed=12), []
    lasting_engine.update(tensors, **NCCL)
    own = NcclStaging.sent

    def changed(staging, slot, entries, seal):
        sent.append(slot)
        return own(staging, slot, entries, bytes(len(seal)) if len(sent) == number + 1 else seal)

    with monkeypatch.context() as patch:
        patch.setattr(NcclStaging, "sent", changed)
        with pytest.raises(WeightUpdateError, match="sent another"):
            lasting_engine.update(tensors, **NCCL)
    assert lasting_engine.call("state")["content"] == ("failed" if number else "valid")
    assert lasting_engine.update(tensors, **NCCL)[1] is None
    assert_arrived(lasting_engine, tensors)


def test_auto_does_not_take_it_even_where_the_trainer_does_not_see_the_engines_gpu(engine, monkeypatch):
    seen = cuda_ipc.local_gpus

    def without_the_engines(**options):
        return {name: index for name, index in seen(**options).items() if name != engine.device}

    tensors = randomised(seed=4)
    monkeypatch.setattr(cuda_ipc, "local_gpus", without_the_engines)
    for options in ({}, {"advertise": "127.0.0.1"}):
        report, error = engine.update(tensors, bucket_bytes=BUCKET, **options)
        assert error is None and report["transport"] not in ("", "nccl")


def test_a_gpu_cannot_be_joined_with_itself():
    one = Engine(MODEL, CUDA_VISIBLE_DEVICES="0")
    try:
        with pytest.raises(UnsupportedError, match="on one GPU"):
            one.update(randomised(), **NCCL)
    finally:
        one.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("whole", [0, 1], ids=["new", "kept"])
def test_an_engine_that_ends_in_the_middle_is_named_in_time(how, whole):
    tensors = randomised(seed=5)
    engine = new_engine()
    process = engine.process

    def end(number):
        if number == 20:
            os.kill(process.pid, how)

    try:
        for _ in range(whole):
            engine.update(tensors, **NCCL)
        start = time.monotonic()
        with pytest.raises(WeightUpdateError) as error:
            engine.update(OneByOne(tensors, end), **{**NCCL, "timeout_s": 20})
        assert error.value.details["reason"] == ("lost" if how is signal.SIGKILL else "stalled")
        assert time.monotonic() - start < 60
    finally:
        process.kill()
        engine.close()
    wait_until(lambda: kept.OF_TRAINER.names() == [], "the trainer's end is closed")
    torch.cuda.synchronize()  # no transfer is left on the GPU
    again = new_engine()
    try:
        assert again.update(tensors, **NCCL)[1] is None
        assert_arrived(again, tensors)
    finally:
        again.close()


def test_a_source_that_fails_in_the_middle_leaves_failed_weights_and_the_next_update_is_right(engine, made):
    tensors = randomised(seed=6)
    source = ModelSource(tensors)

    class Failing:
        specs = source.specs

        def tensors(self):
            for number, item in enumerate(source.tensors()):
                if number == 20:
                    raise RuntimeError("the gather failed")
                yield item

    for _ in range(2):
        with pytest.raises(WeightUpdateError, match="the gather failed"):
            engine.update(Failing(), **NCCL)
        assert engine.call("state")["content"] == "failed"
        report, error = engine.update(tensors, **NCCL)
        assert error is None and report["transport"] == "nccl"
        assert_arrived(engine, tensors)
    assert len(made) == 3  # a failure breaks the communicator


def test_a_trainer_that_is_killed_in_the_middle_leaves_an_engine_that_the_next_one_can_update(engine, tmp_path):
    """The trainer is a process of its own, and the engine outlives it."""
    code = f"""
        import os, signal, sys, torch
        from test_weight_stream import OneByOne, randomised
        from rl_memory_plugins.weights.sender import WeightSender

        def end(number):
            if number == 20:
                os.kill(os.getpid(), signal.SIGKILL)

        with WeightSender([{engine.device!r}], transport="nccl", bucket_bytes={BUCKET}, timeout_s=60) as sender:
            print(sender.endpoints[{engine.device!r}], sender.token, flush=True)
            sender.send(OneByOne(randomised(seed=7), end))
    """
    path = os.pathsep.join([str(Path(__file__).parent), str(ROOT), os.environ.get("PYTHONPATH", "")])
    start = time.monotonic()
    with other_process(code, PYTHONPATH=path) as trainer:
        place, token = trainer.first_line.split()
        with pytest.raises(WeightUpdateError):
            engine.call("receive", endpoints={"*": place}, token=token, timeout_s=60)
    assert time.monotonic() - start < 50
    assert engine.call("state")["content"] in ("failed", "valid")
    tensors = randomised(seed=8)
    assert engine.update(tensors, **NCCL)[1] is None
    assert_arrived(engine, tensors)
