"""One engine over two hosts, by vLLM's `--nnodes`: one rank beside the trainer, the other elsewhere.

The ranks are pipeline stages, or split each tensor.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from integration.engines.base import Launch, Server
from integration.models import SHAPES, new_model, write_model
from integration.two_hosts import TwoHosts, namespaces_work
from rl_memory_plugins import tensor_checksum
from rl_memory_plugins.errors import UnsupportedError, WeightUpdateError
from rl_memory_plugins.trainer import RolloutHandoff
from tests.conformance.trainers import BUCKET_BYTES, broken_update
from tests.vllm.calls import OTHER_SEED, PROMPT, SEED
from tests.vllm.conftest import greedy
from tests.vllm.hosts import started

pytestmark = pytest.mark.skipif(not namespaces_work(), reason="this machine makes no network namespaces")


@pytest.fixture(scope="module", params=["pp", pytest.param("tp", marks=pytest.mark.long)])
def server(
    request: pytest.FixtureRequest, hosts: TwoHosts, hidden: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    model = write_model(tmp_path_factory.mktemp("model") / "tiny", SHAPES["tiny"], seed=SEED)
    options = {"poison": True, "update_hosts": hosts.networks, "update_timeout_s": 20}
    launch = Launch(model, **{request.param: 2}, forked=True, kv_bytes=64 << 20, options=options)
    with started(
        hosts, hidden, launch, tmp_path_factory.mktemp("logs"), ["--rl-memory", json.dumps(options)]
    ) as server:
        with server:
            yield server


@pytest.fixture(scope="module")
def models(server: Server) -> list[torch.nn.Module]:
    return [new_model(server.launch.model, seed, "float32") for seed in (SEED, OTHER_SEED)]


def update(server: Server, model: Any, hosts: TwoHosts, hidden: Path, **options: Any) -> dict[str, Any]:
    given = {"advertise": hosts.addresses[0], "directory": hidden, "bucket_bytes": BUCKET_BYTES, **options}
    return server.control.update_weights(model, **given)


@pytest.mark.long
def test_a_host_without_the_plugin_ends_the_start(hosts: TwoHosts, hidden: Path, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "tiny", SHAPES["tiny"], seed=SEED)
    launch = Launch(folder, pp=2, forked=True, kv_bytes=64 << 20)
    with started(hosts, hidden, launch, tmp_path, []) as server, pytest.raises(RuntimeError, match="exited with"):
        server.__enter__()
    assert "start every host with the same --rl-memory" in server.log.read_text()


def test_ranks_of_both_hosts_sleep_and_wake(server: Server) -> None:
    before = server.generate(PROMPT)
    for level in (0, 1):
        report = server.control.sleep(level)["report"]
        assert {change["rank"] for change in report["changes"]} == (set() if level == 0 else {0, 1})
        assert server.control.is_sleeping()
        assert server.post(PROMPT).status_code == 503
        server.control.wake_up()
        assert server.generate(PROMPT) == before


def test_each_rank_finds_the_trainer(
    server: Server, hosts: TwoHosts, hidden: Path, models: list[torch.nn.Module]
) -> None:
    """By a Unix socket where it is, and over TCP."""
    for model in reversed(models):
        report = update(server, model, hosts, hidden)
        transports = {rank["rank"]: rank["transport"] for rank in report["receivers"]}
        assert transports[1] == "tcp" and transports[0] != "tcp"
        assert server.generate(PROMPT) == greedy(model)
        own = {name: tensor_checksum(tensor) for name, tensor in model.named_parameters()}
        assert server.control.checksums()["tensors"] == own


@pytest.mark.long
def test_a_handoff(server: Server, hosts: TwoHosts, hidden: Path, models: list[torch.nn.Module]) -> None:
    for model in reversed(models):
        handoff = RolloutHandoff(server.control, model, advertise=hosts.addresses, tls=True, directory=hidden)
        with handoff.training():
            assert server.control.is_sleeping()
        assert server.generate(PROMPT) == greedy(model)


@pytest.mark.long
def test_a_rank_that_finds_no_trainer_changes_no_rank(
    server: Server, hidden: Path, models: list[torch.nn.Module]
) -> None:
    before = server.generate(PROMPT)
    with pytest.raises(WeightUpdateError, match="needs advertise=") as caught:
        server.control.update_weights(models[1], directory=hidden, timeout_s=10)
    assert caught.value.details["rank"] == 1
    with pytest.raises(UnsupportedError, match="the server's host"):
        server.control.update_weights_from_checkpoint(server.launch.model)
    assert server.generate(PROMPT) == before


def test_a_broken_update_closes_the_engine_on_both_hosts(
    server: Server, hosts: TwoHosts, hidden: Path, models: list[torch.nn.Module]
) -> None:
    broken_update(server, models[1], advertise=hosts.addresses[0], directory=hidden)
    assert server.control.memory()["content"] == "failed"
    assert server.post(PROMPT).status_code == 503
    update(server, models[1], hosts, hidden)
    assert server.generate(PROMPT) == greedy(models[1])
