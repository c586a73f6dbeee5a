"""An engine on another host than its trainer: a real server in a network namespace of its own.

Only root may make namespaces. Elsewhere these tests do not run, and tests/conformance/test_network.py updates over TCP
on one host.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from integration.engines.base import Launch, Server
from integration.engines.vllm import Vllm
from integration.models import SHAPES, new_model, write_model
from integration.two_hosts import TwoHosts, namespaces_work
from integration.waiting import wait_until
from rl_memory_plugins.client import EngineClient, http_client
from rl_memory_plugins.errors import PermissionDeniedError, WeightUpdateError
from rl_memory_plugins.trainer import ModelSource, RolloutHandoff
from tests.conformance.trainers import BUCKET_BYTES
from tests.vllm.calls import OTHER_SEED, PROMPT, SEED
from tests.vllm.conftest import greedy

KEY = "secret"

pytestmark = pytest.mark.skipif(not namespaces_work(), reason="this machine makes no network namespaces")


class Elsewhere(Vllm):
    """vLLM on the engine's host."""

    def __init__(self, hosts: TwoHosts, hidden: Path) -> None:
        self._hosts = hosts
        self._hidden = hidden

    def command(self, launch: Launch, port: int) -> list[str]:
        return self._hosts.command(super().command(launch, port), self._hidden)


class RemoteServer(Server):
    def __init__(self, hosts: TwoHosts, hidden: Path, launch: Launch, log: Path) -> None:
        super().__init__(Elsewhere(hosts, hidden), launch, log)
        self.http.close()
        self.control.close()
        self.url = f"http://{hosts.engine}:{self.port}"
        self.http = http_client(self.url, launch.api_key, timeout=120)
        self.control = EngineClient(self.url, launch.api_key, timeout_s=120)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the trainer has its Unix sockets."""
    return tmp_path_factory.mktemp("trainer")


@pytest.fixture(scope="module")
def server(hosts: TwoHosts, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = write_model(tmp_path_factory.mktemp("model") / "small", SHAPES["small"], dtype="float32", seed=SEED)
    options = {"update_hosts": hosts.networks, "update_timeout_s": 20}
    launch = Launch(model, tp=2, options=options, api_key=KEY, host="0.0.0.0", forked=True)
    with RemoteServer(hosts, folder, launch, tmp_path_factory.mktemp("server") / "server.log") as running:
        yield running


@pytest.fixture(scope="module")
def models(server: Server) -> list[torch.nn.Module]:
    return [new_model(server.launch.model, seed, "float32") for seed in (SEED, OTHER_SEED)]


def test_without_an_address_the_error_asks_for_one(server: Server, folder: Path, models: list[torch.nn.Module]) -> None:
    before = server.generate(PROMPT)
    with pytest.raises(WeightUpdateError, match="needs advertise="):
        server.control.update_weights(models[1], directory=folder, timeout_s=10)
    assert server.generate(PROMPT) == before


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize(
    "which", ["IPv4", pytest.param("IPv6", marks=pytest.mark.long), pytest.param("interface", marks=pytest.mark.long)]
)
def test_the_engine_answers_with_the_trainers_weights(
    server: Server, hosts: TwoHosts, folder: Path, models: list[torch.nn.Module], which: str, tls: bool
) -> None:
    advertise = {"IPv4": hosts.addresses[0], "IPv6": hosts.addresses[1], "interface": hosts.interface}[which]
    for model in reversed(models):
        report = server.control.update_weights(
            model, advertise=advertise, tls=tls, directory=folder, bucket_bytes=BUCKET_BYTES
        )
        assert [rank["transport"] for rank in report["receivers"]] == ["tcp", "tcp"]
        assert max(rank["bytes"] for rank in report["receivers"]) <= 0.6 * report["bytes"]  # only what a rank needs
        assert server.generate(PROMPT) == greedy(model, PROMPT)


def test_a_handoff_between_hosts(server: Server, hosts: TwoHosts, folder: Path, models: list[torch.nn.Module]) -> None:
    for model in reversed(models):
        handoff = RolloutHandoff(server.control, model, advertise=hosts.addresses, tls=True, directory=folder)
        with handoff.training():
            assert server.control.is_sleeping()
        assert server.generate(PROMPT) == greedy(model, PROMPT)


def test_hosts_that_the_option_does_not_name_stay_refused(server: Server) -> None:
    with pytest.raises(PermissionDeniedError, match="update_hosts"):
        server.control.post_update({"endpoints": {"*": "tcp://198.51.100.1:5000"}, "token": "any"})


@pytest.mark.long
def test_a_cable_that_is_pulled_closes_the_engine(
    server: Server, hosts: TwoHosts, models: list[torch.nn.Module]
) -> None:
    class Source:
        def specs(self):  # type: ignore[no-untyped-def]
            return ModelSource(models[1]).specs()

        def tensors(self):  # type: ignore[no-untyped-def]
            for number, item in enumerate(ModelSource(models[1]).tensors()):
                if number == 30:
                    hosts.cut()
                yield item

    options = {"advertise": hosts.addresses[0], "tls": True, "bucket_bytes": BUCKET_BYTES, "transport": "tcp"}
    try:
        with pytest.raises(WeightUpdateError) as error:
            server.control.update_weights(Source(), timeout_s=20, **options)
    finally:
        hosts.mend()
    assert error.value.details["reason"] == "stalled"
    wait_until(lambda: server.control.memory()["reason"] == "failed", "the engine has given the update up", 60)
    assert server.post(PROMPT).status_code == 503
    server.control.update_weights(models[1], **options)
    assert server.generate(PROMPT) == greedy(models[1], PROMPT)
