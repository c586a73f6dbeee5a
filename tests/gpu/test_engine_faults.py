"""Faults around a real engine's server on a GPU, through its public API: `pytest tests/gpu --engine sglang`.

The engine's KV cache takes more than half of the GPU: a sleep and a wake move much memory. The small engines of some
tests stand beside it from the start, idle until they are asked.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from processes import gpu_memory_taken, memory_taker, other_process, together

from integration.engines import ENGINES
from integration.engines.base import Launch, Server, gpu_used_bytes
from integration.models import SHAPES, write_model
from integration.waiting import wait_until
from rl_memory_plugins.errors import DeviceMemoryError, HostMemoryError
from rl_memory_plugins.weights.open_allocations import release_mapped
from tests.conformance.conftest import PROMPT, SEED, STALL_S, Weights, assert_greedy, restore
from tests.conformance.test_sleep_wake import states
from tests.conformance.trainers import push

MiB, GiB = 1 << 20, 1 << 30
SHARE = 0.55  # of the GPU's memory
SMALL_KV_BYTES = 2 * GiB
LONG = 1500


@pytest.fixture(scope="module")
def big(tmp_path_factory) -> Launch:
    folder = tmp_path_factory.mktemp("model") / "small"
    kv_bytes = int(SHARE * torch.cuda.mem_get_info()[1])
    options = {"poison": True, "update_timeout_s": STALL_S}
    launch = Launch(folder, device="cuda", kv_bytes=kv_bytes, options=options, compiled=False)
    write_model(folder, SHAPES["small"], dtype=launch.dtype, seed=SEED)
    return launch


@pytest.fixture(scope="module")
def weights(big):
    return Weights(big)


@pytest.fixture(scope="module")
def host_limit(weights):
    """Bytes: too little for the weights with what lies among them (48 MiB on vLLM, 68 on SGLang), enough for that."""
    return sum(tensor.nbytes for tensor in weights.first.parameters())


@pytest.fixture(scope="module")
def servers(request, big, host_limit, tmp_path_factory):
    kind, folder = ENGINES[request.config.getoption("--engine")], tmp_path_factory.mktemp("servers")
    small = replace(big, kv_bytes=SMALL_KV_BYTES)
    limited = replace(small, options={**big.options, "host_arena_max_bytes": host_limit})
    launches = {"big": big, "limited": limited, "first": small, "second": small}
    with together(*(Server(kind(), launch, folder / f"{name}.log") for name, launch in launches.items())) as servers:
        yield dict(zip(launches, servers, strict=True))


@pytest.fixture(scope="module")
def running(servers, weights):
    push(servers["big"], weights.first)  # from now on its checksums have the names of the trainer's tensors
    return servers["big"]


@pytest.fixture(scope="module")
def first_tokens(running):
    return running.generate(PROMPT)


@pytest.fixture
def server(running, weights, first_tokens):
    restore(running, weights, first_tokens)
    yield running
    assert running.is_running(), running.tail()
    release_mapped()
    restore(running, weights, first_tokens)
    assert running.control.checksums()["tensors"] == weights.checksums(weights.first)


# -- device memory ----------------------------------------------------------------------------------------


def test_a_wake_finds_the_memory_taken(server, first_tokens):
    server.control.sleep(1)
    before = states(server)
    with gpu_memory_taken(left_bytes=4 * GiB):  # the weights would fit, the cache does not
        used = gpu_used_bytes()
        response = server.http.post("/v1/rl_memory/wake_up")
        assert response.status_code == 507, response.text
        error = response.json()["error"]
        assert error["code"] == "DeviceMemoryError"
        assert error["details"]["needed_bytes"] > error["details"]["free_bytes"] - error["details"]["margin_bytes"]
        assert states(server) == before
        assert abs(gpu_used_bytes() - used) < 16 * MiB  # nothing is half mapped
        assert server.post(PROMPT).status_code == 503
        server.control.wake_up(["weights"])
        with pytest.raises(DeviceMemoryError):
            server.control.wake_up(["kv_cache"])
        assert states(server)["weights"] == {"resident"}
        assert states(server)["kv_cache"] == {"discarded"}
    assert server.control.wake_up()["status"] == "awake"
    assert server.generate(PROMPT) == first_tokens


def test_the_memory_is_taken_while_the_wake_runs(server, big, first_tokens):
    """Whoever comes first: the wake happens, or leaves everything as it was; what it left works."""
    failed = 0
    with memory_taker() as taker, ThreadPoolExecutor(1) as pool:
        for attempt in range(12):
            server.control.sleep(1)
            before = states(server)
            taker.leave(big.kv_bytes + 2 * GiB)
            waking = pool.submit(server.control.wake_up)
            time.sleep(0.003 * attempt)  # a wake takes some milliseconds to get to the ranks
            taker.begin_to_leave(1 * GiB)
            try:
                waking.result()
            except DeviceMemoryError as error:
                failed += 1
                assert {"needed_bytes", "free_bytes", "margin_bytes"} <= set(error.details)
                assert states(server) == before
                assert server.post(PROMPT).status_code == 503
            taker.wait()
            taker.give_back()
            server.control.wake_up()
            assert server.generate(PROMPT) == first_tokens
    print(f"{failed} of 12 wakes lost the race")


@pytest.mark.parametrize("level", [1, 2])
def test_a_trainer_scribbles_over_the_freed_memory(server, weights, first_tokens, level):
    server.control.sleep(level)
    with gpu_memory_taken(left_bytes=512 * MiB):  # written full of 0xAB
        pass
    server.control.wake_up()
    if level == 2:
        assert server.post(PROMPT).status_code == 503
        push(server, weights.first)
    assert server.generate(PROMPT) == first_tokens


# -- host memory ------------------------------------------------------------------------------------------


def test_too_little_host_memory_is_found_before_anything_is_released(servers, weights, host_limit):
    server = servers["limited"]
    tokens = server.generate(PROMPT)
    for _ in range(2):
        with pytest.raises(HostMemoryError) as caught:
            server.control.sleep(1)
        assert caught.value.status == 507
        assert caught.value.details["needed_bytes"] > host_limit
        assert set().union(*states(server).values()) == {"resident"}
        assert server.generate(PROMPT) == tokens
    server.control.sleep(2, ["weights"])  # keeps what no parameter lies in; graphs would be preserved
    server.control.wake_up()
    push(server, weights.first)
    assert server.generate(PROMPT) == tokens


# -- requests that run ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_sleeping_under_load(server, weights, first_tokens, mode):
    """Eight requests, of which four run at a time, from CUDA graphs."""
    prompts = [[token + number for token in PROMPT] for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        asking = [pool.submit(server.post, prompt, LONG) for prompt in prompts]
        server.wait_held(len(prompts))
        running = [request for request in asking if not request.done()]
        assert running
        server.control.sleep(1, mode=mode)
        if mode == "keep":
            time.sleep(0.5)
            assert any(not request.done() for request in running)
        else:
            for request in asking:
                request.result(10)
        assert server.post(PROMPT).status_code == 503
        server.control.wake_up()
        answers = [request.result(60) for request in asking]
    for prompt, answer in zip(prompts, answers, strict=True):
        if mode == "abort" and answer.status_code == 503:
            continue
        assert answer.status_code == 200, answer.text
        tokens = server.kind.tokens(answer.json())
        assert len(tokens) == LONG or (mode == "abort" and server.kind.was_aborted(answer.json()))
        if tokens:
            assert_greedy(weights.first, prompt, tokens)
    assert server.generate(PROMPT) == first_tokens


# -- two engines ------------------------------------------------------------------------------------------


def test_two_engines_take_turns(server, servers, weights):
    """Their caches are small, so that a round is quick; another process takes the room that both would need."""
    server.control.sleep(1)
    first, second = servers["first"], servers["second"]
    with memory_taker() as taker:
        push(first, weights.first)
        push(second, weights.first)
        tokens = first.generate(PROMPT)
        assert_greedy(weights.first, PROMPT, tokens)
        assert second.generate(PROMPT) == tokens
        first.control.sleep(1)
        taker.leave(SMALL_KV_BYTES // 2)
        with pytest.raises(DeviceMemoryError):
            first.control.wake_up()
        asleep: list[int] = []
        for _ in range(50):
            second.control.sleep(1)
            asleep.append(gpu_used_bytes())
            first.control.wake_up()
            assert first.generate(PROMPT) == tokens
            first.control.sleep(1)
            second.control.wake_up()
            assert second.generate(PROMPT) == tokens
        assert asleep[-1] - asleep[1] < 32 * MiB
        taker.give_back()
        first.control.wake_up()
        for engine in (first, second):
            assert engine.control.checksums()["tensors"] == weights.checksums(weights.first)


# -- trainers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["cuda_direct", "cuda_ipc", "shm_pinned", "shm", "tcp"])
def test_every_transport_reaches_the_engine(server, weights, transport):
    for model in (weights.other, weights.first):
        server.control.sleep(2)
        server.control.wake_up(["weights"])
        report = push(server, model, transport=transport)
        assert report["transport"] == transport
        server.control.wake_up()
        assert_greedy(model, PROMPT, server.generate(PROMPT))
        assert server.control.checksums()["tensors"] == weights.checksums(model)


TRAINER = """
    import sys, threading
    from pathlib import Path
    from integration.models import new_model
    from rl_memory_plugins.client import EngineClient
    from rl_memory_plugins.weights import routes
    from tests.conformance.trainers import BUCKET_BYTES, BreakingSource

    class Resident(BreakingSource):
        def resident(self):
            return self._inner.resident()

    routes.DIRECT_BUCKET_BYTES = BUCKET_BYTES  # so that some are sent before the end
    model = new_model(Path({folder!r}), 2, {dtype!r}).to("cuda")
    source = Resident(model, after=30, release=threading.Event())

    def tell():
        source.reached.wait()
        print("halfway", flush=True)

    threading.Thread(target=tell, daemon=True).start()
    client = EngineClient({url!r})
    client.update_weights(source, bucket_bytes=BUCKET_BYTES, timeout_s=60, transport={transport!r})
"""


def assert_given_back(used: int) -> None:
    """By and by the GPU holds no more than it did; else how much more it holds is said."""
    try:
        wait_until(lambda: gpu_used_bytes() - used < 64 * MiB, "the dead process's memory is free", 30)
    except TimeoutError as error:
        raise AssertionError(f"{error}: {(gpu_used_bytes() - used) / MiB:.0f} MiB more are in use") from None


@pytest.mark.parametrize("transport", ["cuda_direct", "cuda_ipc"])
def test_a_trainer_is_killed_while_its_memory_is_mapped(server, big, weights, first_tokens, transport):
    used = gpu_used_bytes()
    code = TRAINER.format(folder=str(big.model), dtype=big.dtype, url=server.url, transport=transport)
    with other_process(code) as trainer:
        assert trainer.first_line.strip() == "halfway"
        assert server.post(PROMPT).status_code == 503
        trainer.kill()
        trainer.wait()
    wait_until(lambda: server.control.memory()["reason"] != "updating", "the update is over", 30)
    assert server.control.memory()["content"] == "failed"
    assert server.post(PROMPT).status_code == 503
    assert_given_back(used)
    push(server, weights.other, transport=transport)
    assert_greedy(weights.other, PROMPT, server.generate(PROMPT))


def test_updates_and_sleeps_alternate_with_a_trainer_that_keeps_its_tensors_mapped(server, weights):
    """A step of training, twenty times: nothing grows."""
    used: list[int] = []
    for step in range(20):
        model = (weights.other, weights.first)[step % 2]
        server.control.sleep(2)
        server.control.wake_up(["weights"])
        assert push(server, model, keep_mapped=True)["transport"] == "cuda_direct"
        server.control.wake_up()
        assert_greedy(model, PROMPT, server.generate(PROMPT))
        used.append(gpu_used_bytes())
    assert used[-1] - used[3] < 32 * MiB
