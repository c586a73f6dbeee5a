"""Data-parallel engines on two hosts: the first beside the trainer and their server, the second elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.engines.base import Launch, Server
from integration.models import SHAPES, new_model, write_model
from integration.two_hosts import TwoHosts, namespaces_work
from tests.conformance.trainers import broken_update
from tests.vllm.calls import OTHER_SEED, PROMPT, SEED
from tests.vllm.conftest import greedy
from tests.vllm.hosts import started

pytestmark = pytest.mark.skipif(not namespaces_work(), reason="this machine makes no network namespaces")


@pytest.fixture(scope="module")
def two_engines(hosts: TwoHosts, hidden: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = write_model(tmp_path_factory.mktemp("model") / "tiny", SHAPES["tiny"], seed=SEED)
    options = {"poison": True, "update_hosts": hosts.networks, "update_timeout_s": 60}
    launch = Launch(model, dp=2, forked=True, kv_bytes=64 << 20, options=options)
    flag = ["--rl-memory", json.dumps(options)]
    with started(hosts, hidden, launch, tmp_path_factory.mktemp("logs"), flag) as server, server:
        yield server


@pytest.mark.long
def test_no_caller_waits_for_the_board_of_another_host(two_engines: Server, hosts: TwoHosts, hidden: Path) -> None:
    """While an update hangs no engine answers. The second one has no board here."""
    server, model = two_engines, new_model(two_engines.launch.model, OTHER_SEED, "float32")
    engines = server.control.memory()["engines"]
    assert [engine["engine_rank"] for engine in engines] == [0, 1]
    assert len(list(hidden.glob("rl-memory-*/*.board"))) == 1
    with broken_update(server, model, stall=True, advertise=hosts.addresses[0], directory=hidden) as hanging:
        for _ in range(3):
            memory = server.control.memory()
            assert [engine["busy"] for engine in memory["engines"]] == ["update_weights"] * 2
            assert not server.control.is_sleeping()
            assert server.post(PROMPT).status_code == 503
            assert hanging.runs()
    assert server.generate(PROMPT) == greedy(model)
    server.control.sleep(1)
    assert server.control.is_sleeping() and server.post(PROMPT).status_code == 503
    server.control.wake_up()
    assert server.generate(PROMPT) == greedy(model)
