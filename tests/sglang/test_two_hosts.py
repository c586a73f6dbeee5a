"""An engine of two ranks, each on a host of its own: `--nnodes 2` with `--pp-size 2`, or with `--tp-size 2`.

The second host is a network namespace, which only root can make. Elsewhere both nodes are on this host.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from integration.engines.base import REPOSITORY, Launch, Server
from integration.engines.ports import reserve_port
from integration.engines.sglang import Sglang
from integration.models import SHAPES, new_model, write_model
from integration.two_hosts import TwoHosts, namespaces_work
from rl_memory_plugins.errors import DeviceMemoryError, ManifestError, WeightUpdateError
from rl_memory_plugins.weights.checksums import tensor_checksum
from tests.conformance.conftest import greedy
from tests.conformance.trainers import BreakingSource
from tests.sglang.conftest import OTHER_SEED, PROMPT, SEED

SHAPE = SHAPES["tiny"]._replace(tied=True)  # the embedding is on the first stage, and once more on the last
LONG = 300


class Node(Sglang):
    """One node of the engine. The first one has the server."""

    def __init__(
        self,
        rank: int,
        address: str,
        interface: str,
        hosts: TwoHosts | None,
        hidden: Path,
        extra: Sequence[str],
        sites: Sequence[Path],
    ) -> None:
        self._flags = ["--nnodes", "2", "--node-rank", str(rank), "--dist-init-addr", address, *extra]
        self._sites = sites
        self._interface = interface
        self._own = address.rpartition(":")[0] if hosts is None else hosts.engine
        self._hosts, self._hidden = hosts, hidden

    def command(self, launch: Launch, port: int) -> list[str]:
        command = [*super().command(launch, port), *self._flags, "--chunked-prefill-size", "64"]
        return command if self._hosts is None else self._hosts.command(command, self._hidden)

    def environment(self, launch: Launch) -> dict[str, str]:
        # Tensor-parallel ranks tell each other an address, which SGLang takes from an interface that it chooses.
        own = super().environment(launch)
        path = os.pathsep.join([own["PYTHONPATH"], *map(str, self._sites)])
        return {**own, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": self._interface, "SGLANG_HOST_IP": self._own}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[torch.nn.Module]]:
    folder = write_model(tmp_path_factory.mktemp("model") / "tied", SHAPE, dtype="float32", seed=SEED)
    return folder, [new_model(folder, seed, "float32") for seed in (SEED, OTHER_SEED)]


@pytest.fixture(scope="module")
def fault_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the trainer has its Unix sockets."""
    return tmp_path_factory.mktemp("trainer")


@pytest.fixture(scope="module")
def hosts() -> Iterator[TwoHosts | None]:
    with ExitStack() as stack:
        yield stack.enter_context(TwoHosts()) if namespaces_work() else None


@contextmanager
def on_two_hosts(
    hosts: TwoHosts | None, hidden: Path, launch: Launch, log: Path, *extra: str, sites: Sequence[Path] = ()
) -> Iterator[Server]:
    """An engine of two nodes.

    Args:
        hidden: A folder that the second host does not see.
        log: The folder for the logs.
        extra, sites: Further arguments of both nodes, and folders from which they import.
    """
    here = hosts.addresses[0] if hosts else "127.0.0.1"
    reserved, port = reserve_port()
    first = Node(0, f"{here}:{port}", hosts.interface if hosts else "lo", None, hidden, extra, sites)
    second = Node(1, f"{here}:{port}", "eth0" if hosts else "lo", hosts, hidden, extra, sites)
    environment = {**os.environ, **second.environment(launch)}
    environment["PYTHONPATH"] = os.pathsep.join([environment["PYTHONPATH"], str(REPOSITORY)])
    own_port, other_port = reserve_port()
    with (log / "node1.log").open("wb") as output:
        other = subprocess.Popen(
            second.command(launch, other_port), env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        with Server(first, launch, log / "node0.log") as running:
            yield running
    finally:
        processes = [psutil.Process(other.pid), *psutil.Process(other.pid).children(recursive=True)]
        other.send_signal(signal.SIGTERM)
        for process in psutil.wait_procs(processes, timeout=20)[1]:
            process.kill()
        other.wait()
        reserved.close()
        own_port.close()


@pytest.fixture(scope="module", params=["pp", pytest.param("tp", marks=pytest.mark.long)])
def server(
    request: pytest.FixtureRequest,
    hosts: TwoHosts | None,
    models: tuple[Path, list[torch.nn.Module]],
    fault_dir: Path,
    folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Server]:
    allowed = hosts.networks if hosts else ""
    options = {"fault_dir": str(fault_dir), "drain_timeout_s": 60, "update_hosts": allowed, "update_timeout_s": 30}
    launch = Launch(models[0], **{request.param: 2}, options=options, forked=True)
    with on_two_hosts(hosts, folder, launch, tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture
def update(server: Server, hosts: TwoHosts | None, folder: Path) -> Any:
    options = {"advertise": hosts.addresses[0]} if hosts else {}

    def update(source: Any, **others: Any) -> Any:
        return server.control.update_weights(source, directory=folder, **options, **others)

    return update


def test_the_ranks_sleep_wake_in_steps_and_take_a_whole_update(
    server: Server, models: tuple[Path, list[torch.nn.Module]], hosts: TwoHosts | None, update: Any
) -> None:
    first, other = models[1]
    assert server.generate(PROMPT) == greedy(first, PROMPT)
    [engine] = server.control.memory()["engines"]
    assert [rank["rank"] for rank in engine["ranks"]] == [0, 1]
    server.control.sleep(1)
    assert server.control.is_sleeping()
    assert server.post(PROMPT).status_code == 503
    server.control.wake_up()
    assert server.generate(PROMPT) == greedy(first, PROMPT)

    server.control.sleep(2)
    server.control.wake_up(["weights"])
    report = update(other)
    assert server.post(PROMPT).status_code == 503
    server.control.wake_up()
    assert server.generate(PROMPT) == greedy(other, PROMPT)
    assert sorted(one["transport"] for one in report["receivers"]) == ["shm", "tcp" if hosts else "shm"]
    own = {name: tensor_checksum(tensor) for name, tensor in other.named_parameters()}
    assert server.control.checksums()["tensors"] == own


def test_a_partial_update_writes_the_ranks_that_have_the_layer(
    server: Server, models: tuple[Path, list[torch.nn.Module]], update: Any
) -> None:
    first, other = models[1]
    update(first)
    mixed = new_model(models[0], SEED, "float32")
    changed = {
        name: tensor
        for name, tensor in other.named_parameters()
        if name.startswith("model.layers.3.") or "embed_tokens" in name
    }
    with torch.no_grad():
        for name, tensor in changed.items():
            mixed.get_parameter(name).copy_(tensor)
    update(changed, partial=True)
    assert server.generate(PROMPT) == greedy(mixed, PROMPT) != greedy(first, PROMPT)
    update(first)


def test_a_name_that_no_rank_knows_is_an_error(
    server: Server, models: tuple[Path, list[torch.nn.Module]], update: Any
) -> None:
    first = models[1][0]
    before = server.generate(PROMPT)
    strange = "model.layers.9.mlp.up_proj.weight"
    with pytest.raises(ManifestError) as caught:
        update({**dict(first.named_parameters()), strange: torch.zeros(512, 256)})
    assert [found["name"] for found in caught.value.details["mismatches"]] == [strange]
    assert server.generate(PROMPT) == before


def test_a_rank_without_memory_makes_all_stay_asleep(server: Server, fault_dir: Path) -> None:
    before = server.generate(PROMPT)
    server.control.sleep(1)
    (fault_dir / "reserve.1").touch()
    with pytest.raises(DeviceMemoryError) as caught:
        server.control.wake_up()
    assert caught.value.details["rank"] == 1
    [engine] = server.control.memory()["engines"]
    assert {tag["state"] for rank in engine["ranks"] for tag in rank["tags"].values()} == {"preserved", "discarded"}
    server.control.wake_up()
    assert server.generate(PROMPT) == before


def test_an_update_that_breaks_off_closes_the_engine_until_a_complete_one(
    server: Server, models: tuple[Path, list[torch.nn.Module]], update: Any
) -> None:
    first, other = models[1]
    with pytest.raises((WeightUpdateError, RuntimeError)):
        update(BreakingSource(other, after=20), bucket_bytes=1 << 20)
    [engine] = server.control.memory()["engines"]
    assert {rank["content"] for rank in engine["ranks"]} == {"failed"}
    assert server.post(PROMPT).status_code == 503
    update(first)
    assert server.generate(PROMPT) == greedy(first, PROMPT)


@pytest.mark.parametrize(
    "mode", [*(pytest.param(one, marks=pytest.mark.long) for one in ("abort", "wait", "keep")), "freeze"]
)
def test_requests_that_run_on_both_hosts(server: Server, models: tuple[Path, list[torch.nn.Module]], mode: str) -> None:
    """A prompt of several chunks is in more than one of the batches in flight."""
    prompt = [token % 4000 + 2 for token in range(300)]
    before = server.generate(prompt)
    with server.generating(prompt, LONG) as request:
        server.control.sleep(1, ["weights"] if mode == "freeze" else None, mode=mode)
        if mode in ("keep", "freeze"):
            request.assert_running()
        server.control.wake_up()
        answer = server.kind.tokens(request.answer())
    assert (len(answer) < LONG) if mode == "abort" else (len(answer) == LONG)
    assert server.generate(prompt) == before


@pytest.mark.long
def test_a_client_ends_a_frozen_request(server: Server) -> None:
    with server.generating(PROMPT, LONG) as request:
        server.control.sleep(0, mode="freeze")
        server.http.post("/abort_request", json={"abort_all": True})
        server.control.wake_up()
        assert server.kind.was_aborted(request.answer())
    assert server.generate(PROMPT)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_sglangs_own_pause_holds_all_batches(server: Server, mode: str) -> None:
    """Stock: the loop of a pipeline ignores a pause."""
    with server.generating(PROMPT, LONG) as request:
        assert server.http.post("/pause_generation", json={"mode": mode}).status_code == 200
        request.join(3)
        request.assert_running()
        assert server.http.post("/continue_generation", json={}).status_code == 200
        assert len(server.kind.tokens(request.answer())) == LONG
