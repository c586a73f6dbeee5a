"""An engine on torch_memory_saver, in both of its hook modes: `pytest tests/gpu/test_tms_engine.py --engine sglang`.

The server is started by `rl-memory serve`, which preloads the library where the options ask for that mode.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from processes import run, together

from integration.engines import ENGINES
from integration.engines.base import Launch, Server, gpu_used_bytes
from integration.models import SHAPES, write_model
from tests.conformance.conftest import PROMPT, SEED, Weights
from tests.conformance.test_sleep_wake import states
from tests.conformance.trainers import push

MiB, GiB = 1 << 20, 1 << 30


HOOK_MODES = ("torch", "preload")


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "small"
    options = {"allocator": "tms", "poison": True}
    launch = Launch(folder, device="cuda", kv_bytes=2 * GiB, options=options, compiled=False)
    write_model(folder, SHAPES["small"], dtype=launch.dtype, seed=SEED)
    return launch


@pytest.fixture(scope="module")
def servers(request, launch, tmp_path_factory):
    kind, folder = ENGINES[request.config.getoption("--engine")], tmp_path_factory.mktemp("servers")
    launches = [replace(launch, options={**launch.options, "tms_hook_mode": mode}) for mode in HOOK_MODES]
    logs = [folder / f"{mode}.log" for mode in HOOK_MODES]
    with together(*(Server(kind(), *each) for each in zip(launches, logs, strict=True))) as servers:
        yield dict(zip(HOOK_MODES, servers, strict=True))


@pytest.fixture(scope="module", params=HOOK_MODES)
def server(request, servers):
    return servers[request.param]


@pytest.fixture(scope="module")
def weights(launch):
    return Weights(launch)


@pytest.fixture(scope="module")
def first_tokens(server):
    return server.generate(PROMPT)


def region_bytes(server) -> int:
    tags = server.control.memory()["engines"][0]["ranks"][0]["tags"]
    return sum(tag["bytes"] for tag in tags.values())


def test_the_status_says_what_it_runs_on(server):
    rank = server.control.memory()["engines"][0]["ranks"][0]
    assert rank["allocator"] == "tms"
    assert any("CUDA graphs stay resident" in note for note in rank["notes"])
    assert rank["tags"]["kv_cache"]["bytes"] >= 1 * GiB


def test_preserved_weights_answer_as_before(server, first_tokens):
    awake = gpu_used_bytes()
    for _ in range(3):
        server.control.sleep(level=1)
        assert awake - gpu_used_bytes() > 0.9 * region_bytes(server)
        assert server.post(PROMPT).status_code == 503
        server.control.wake_up(["weights"])
        server.control.wake_up()
        assert server.generate(PROMPT) == first_tokens
    assert abs(gpu_used_bytes() - awake) < 256 * MiB


def test_discarded_weights_are_refused_until_they_are_sent(server, weights, first_tokens):
    for _ in range(2):
        server.control.sleep(level=2)
        server.control.wake_up()
        assert server.control.memory()["content"] == "stale"
        assert server.post(PROMPT).status_code == 503
        push(server, weights.first)
        assert server.generate(PROMPT) == first_tokens
    push(server, weights.other)
    other = server.generate(PROMPT)
    assert other != first_tokens
    server.control.sleep(level=1)
    server.control.wake_up()
    assert server.generate(PROMPT) == other
    push(server, weights.first)
    assert server.generate(PROMPT) == first_tokens


def test_transitions_that_would_end_the_process_are_none(server, first_tokens):
    """torch_memory_saver exits when it is asked to pause what is paused, or to resume what is resident."""
    server.control.wake_up()
    server.control.sleep(level=1, tags=["kv_cache"])
    server.control.sleep(level=2, tags=["kv_cache"])
    server.control.sleep(level=1)
    server.control.sleep(level=1)
    assert states(server)["weights"] == {"preserved"}
    server.control.wake_up(["kv_cache"])
    server.control.wake_up(["kv_cache"])
    server.control.wake_up()
    server.control.wake_up()
    assert server.generate(PROMPT) == first_tokens
    assert server.is_alive()


def test_the_preload_mode_without_the_preload_says_so():
    output = run(
        """
        import torch
        from rl_memory_plugins.config import RLMemoryConfig
        from rl_memory_plugins.errors import UnsupportedError
        from rl_memory_plugins.memory.select import choose_allocator
        try:
            choose_allocator(RLMemoryConfig(allocator="tms", tms_hook_mode="preload"), torch.device("cuda", 0), 0)
        except UnsupportedError as error:
            print(error.message)
        """,
        LD_PRELOAD="",
    )
    assert "rl-memory serve" in output


def test_expandable_segments_are_refused():
    output = run(
        """
        import torch
        from rl_memory_plugins.config import RLMemoryConfig
        from rl_memory_plugins.errors import UnsupportedError
        from rl_memory_plugins.memory.select import choose_allocator
        try:
            choose_allocator(RLMemoryConfig(allocator="tms"), torch.device("cuda", 0), 0)
        except UnsupportedError as error:
            print(error.message)
        """,
        LD_PRELOAD="",
        PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True",
        PYTORCH_ALLOC_CONF="expandable_segments:True",
    )
    assert "expandable_segments" in output
