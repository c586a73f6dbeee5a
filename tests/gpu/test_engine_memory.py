"""A real engine's memory on a GPU: graphs in their tag, what is left asleep, and copies made in advance."""

from __future__ import annotations

import time

import pytest
from processes import together

from integration.engines import ENGINES
from integration.engines.base import Launch, Server, gpu_used_bytes
from integration.engines.sglang import Sglang
from integration.models import SHAPES, write_model
from integration.waiting import wait_until
from tests.conformance.conftest import PROMPT, SEED, Weights
from tests.conformance.test_sleep_wake import copied_bytes
from tests.conformance.trainers import push

MiB, GiB = 1 << 20, 1 << 30
CYCLES = 20
CAUSES = {"context", "nccl", "workspace", "graphs", "other"}


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "small"
    launch = Launch(folder, device="cuda", kv_bytes=1 * GiB, options={"poison": True, "eager_backup": True})
    write_model(folder, SHAPES["small"], dtype=launch.dtype, seed=SEED)
    return launch


class DefaultGraphs(Sglang):
    """With the graphs of prefills too, which SGLang captures by default, in pieces."""

    def command(self, launch, port):
        return [argument for argument in super().command(launch, port) if argument != "--disable-prefill-cuda-graph"]


@pytest.fixture(scope="module")
def servers(request, launch, tmp_path_factory):
    folder = tmp_path_factory.mktemp("servers")
    kind = ENGINES[request.config.getoption("--engine")]
    kinds = [kind, DefaultGraphs] if kind is Sglang else [kind]
    with together(*(Server(kind(), launch, folder / f"{kind.__name__}.log") for kind in kinds)) as servers:
        yield servers


@pytest.fixture(scope="module")
def server(servers):
    return servers[0]


@pytest.fixture(scope="module")
def first_tokens(server):
    return server.generate(PROMPT)


def rank_of(server):
    return server.control.memory()["engines"][0]["ranks"][0]


def test_graphs_are_in_their_tag_and_replay_after_many_cycles(server, first_tokens):
    rank = rank_of(server)
    assert not [note for note in rank["notes"] if "graphs" in note], rank["notes"]
    assert rank["tags"]["cuda_graph"]["bytes"] > 0
    for cycle in range(CYCLES):
        server.control.sleep(level=1)
        assert rank_of(server)["tags"]["cuda_graph"]["state"] == "preserved"
        server.control.wake_up()
        assert server.generate(PROMPT) == first_tokens, f"cycle {cycle}"


def test_what_is_left_asleep_is_named(server, first_tokens):
    assert rank_of(server)["left"] == {}
    server.control.sleep(level=1)
    wait_until(lambda: rank_of(server)["left"] != {}, "an account of what is left")  # it follows the reply
    rank = rank_of(server)
    left = rank["left"]
    print(
        {cause: f"{nbytes / MiB:.0f} MiB" for cause, nbytes in left.items()}, f"used {gpu_used_bytes() / MiB:.0f} MiB"
    )
    assert left
    assert set(left) <= CAUSES
    assert left.get("graphs", 0) < 64 * MiB  # they are in their tag
    if "context" in left:  # the driver tells processes apart here
        assert left["context"] > 64 * MiB
        assert sum(left.values()) <= rank["device_total_bytes"] - rank["device_free_bytes"]
    server.control.wake_up(["weights"])
    assert rank_of(server)["left"] == left
    server.control.wake_up()
    assert rank_of(server)["left"] == {}
    assert server.generate(PROMPT) == first_tokens


def test_after_an_update_the_sleep_copies_no_weights(server, launch, first_tokens):
    weights = Weights(launch)
    kept = copied_bytes(server.control.sleep(level=2), "weights")  # what lies among them and is none
    server.control.wake_up()
    for model in (weights.other, weights.first):
        push(server, model)
        before = server.generate(PROMPT)  # beside the copy
        assert copied_bytes(server.control.sleep(level=1), "weights") == kept  # it waits for a copy that is under way
        server.control.wake_up()
        assert server.generate(PROMPT) == before
    assert before == first_tokens


def test_updates_and_sleeps_at_any_moment_of_the_copy(server, launch, first_tokens):
    weights = Weights(launch)
    for step in range(12):
        push(server, weights.other)
        time.sleep(0.002 * step)
        if step % 3 == 0:
            server.control.sleep(level=2)
            server.control.wake_up()
        push(server, weights.first)
        if step % 2:
            server.control.sleep(level=1)
            server.control.wake_up()
        assert server.generate(PROMPT) == first_tokens, f"step {step}"
    assert server.is_alive()


def test_sglang_with_its_own_choice_of_prefill_graphs(request, servers):
    """Its backend for them refuses to start beside a memory saver that is on."""
    if request.config.getoption("--engine") != "sglang":
        pytest.skip("SGLang's own")
    server = servers[1]
    prompt = list(range(5, 205))
    expected = server.generate(prompt)
    for _ in range(2):
        server.control.sleep(level=1)
        server.control.wake_up()
        assert server.generate(prompt) == expected
