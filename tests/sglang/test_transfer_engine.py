"""Peers that read and write the weights by Mooncake's TransferEngine, for which a stand-in does the transfers.

The stand-in reads and writes the memory of the scheduler's process from outside, so no code of the engine sees it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from integration.engines.base import REPOSITORY, Launch, Server
from integration.engines.sglang import Sglang
from integration.models import SHAPES, new_model, write_model
from rl_memory_plugins.errors import StateConflictError, from_record
from tests.sglang.conftest import OTHER_SEED, PROMPT, SEED
from tests.sglang.test_native import native_update, post

pytestmark = pytest.mark.long  # each engine is started for it

STAND_IN = REPOSITORY / "tests" / "aids" / "mooncake_stand_in"
LOADER = "tests.sglang.loaders.past_the_dispatcher"
INFO = "/remote_instance_transfer_engine_info"


class WithPeers(Sglang):
    """SGLang with the stand-in and more arguments. `{bootstrap}` is a port of the server's own."""

    def __init__(self, *extra: str) -> None:
        self._extra = extra

    def command(self, launch: Launch, port: int) -> list[str]:
        return [*super().command(launch, port), *(one.format(bootstrap=port + 245) for one in self._extra)]

    def environment(self, launch: Launch) -> dict[str, str]:
        variables = super().environment(launch)
        return {**variables, "PYTHONPATH": os.pathsep.join([str(STAND_IN), variables["PYTHONPATH"]])}


class Peer:
    """A process that reads and writes the weights of an engine.

    Attributes:
        weights: By the engine's name of a parameter: its address and its bytes.
    """

    def __init__(self, server: Server) -> None:
        sys.path.insert(0, str(STAND_IN))
        try:
            from mooncake.engine import TransferEngine
        finally:
            sys.path.remove(str(STAND_IN))
        self._engine = TransferEngine()
        self._session, info = server.http.get(INFO, params={"rank": 0}).json()["remote_instance_transfer_engine_info"]
        self.weights = {name: (address, numel * size) for name, (address, numel, size) in info.items()}

    def read(self, name: str) -> torch.Tensor | None:
        """The bytes of a parameter; `None` if the transfer fails."""
        address, nbytes = self.weights[name]
        here = torch.empty(nbytes, dtype=torch.uint8)
        failed = self._engine.batch_transfer_sync_read(self._session, [here.data_ptr()], [address], [nbytes])
        return None if failed else here

    def write(self, weights: dict[str, torch.Tensor]) -> bool:
        """Whether the transfer of these parameters succeeds."""
        ours = [tensor.data_ptr() for tensor in weights.values()]
        places = [self.weights[name] for name in weights]
        addresses, sizes = [address for address, _ in places], [nbytes for _, nbytes in places]
        return bool(self._engine.batch_transfer_sync_write(self._session, ours, addresses, sizes) == 0)


@pytest.fixture(scope="module", autouse=True)
def folder_of_engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOONCAKE_STAND_IN", str(tmp_path_factory.mktemp("mooncake")))
        yield


@contextmanager
def started(model: Path, log: Path, *extra: str) -> Iterator[Server]:
    launch = Launch(model, options={"poison": True, "implicit_update_session": True}, forked=True)
    with Server(WithPeers(*extra), launch, log) as server:
        yield server


@pytest.fixture(scope="module")
def running_seed(
    folder_of_engines: None, model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("seed") / "server.log"
    seed = (
        *("--remote-instance-weight-loader-start-seed-via-transfer-engine", "--engine-info-bootstrap-port"),
        *("{bootstrap}", "--custom-weight-loader", LOADER),
    )
    with started(model_folder, log, *seed) as server:
        yield server


@pytest.fixture(scope="module")
def tokens(running_seed: Server) -> list[int]:
    return running_seed.generate(PROMPT)


@pytest.fixture(scope="module")
def others(running_seed: Server, tokens: list[int], model_folder: Path) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Other weights in the engine's layout, and the engine's answer under them."""
    peer = Peer(running_seed)
    running_seed.control.update_weights(new_model(model_folder, OTHER_SEED))
    found = {name: peer.read(name) for name in peer.weights}
    assert all(tensor is not None for tensor in found.values())
    return found, running_seed.generate(PROMPT)


@pytest.fixture
def seed(running_seed: Server, tokens: list[int], others: Any, model_folder: Path) -> Iterator[Server]:
    running_seed.control.update_weights(new_model(model_folder, SEED))
    yield running_seed
    assert running_seed.is_running(), running_seed.tail()
    running_seed.control.wake_up()
    post(running_seed, "/end_weight_update")  # of a session that a test has left open
    running_seed.control.update_weights(new_model(model_folder, SEED))
    assert running_seed.generate(PROMPT) == tokens


def where(server: Server) -> Any:
    """The answer of the route that tells peers where the weights are.

    Raises:
        StateConflictError: it is refused.
    """
    response = server.http.get(INFO, params={"rank": 0})
    if response.status_code != 200:
        assert server.http.get("/get" + INFO.replace("/", "_"), params={"rank": 0}).json() == response.json()
        assert response.status_code == 409
        failure = response.json()["error"]
        raise from_record({**failure, "error": failure["code"]})
    return response.json()


def test_a_peer_reads_the_weights_and_fails_while_they_sleep(seed: Server, first_weights: Any) -> None:
    """Stock: with the memory saver there is no TransferEngine at all."""
    peer, before = Peer(seed), where(seed)
    norm = first_weights.state_dict()["model.norm.weight"].view(torch.uint8)
    assert torch.equal(peer.read("model.norm.weight"), norm)
    for tags in (None, ["weights"]):
        seed.control.sleep(1, tags)
        assert peer.read("model.norm.weight") is None
        assert not peer.write({"model.norm.weight": norm})
        with pytest.raises(StateConflictError, match="asleep"):
            where(seed)
        seed.control.wake_up()
        assert where(seed) == before
        assert torch.equal(peer.read("model.norm.weight"), norm)
    for level, tags in ((0, None), (1, ["kv_cache"])):
        seed.control.sleep(level, tags)
        assert where(seed) == before
        assert torch.equal(peer.read("model.norm.weight"), norm)
        seed.control.wake_up()


def test_weights_that_are_not_valid_are_given_to_nobody(seed: Server) -> None:
    """Stock: the new instance answers from them."""
    seed.control.sleep(2)
    for expected in ("asleep", "stale"):
        with pytest.raises(StateConflictError, match=expected):
            where(seed)
        group = {"master_address": "127.0.0.1", "ports": "1", "group_name": "g"}
        for route, body in (
            ("/init_weights_send_group_for_remote_instance", {**group, "group_rank": 0, "world_size": 2}),
            ("/send_weights_to_remote_instance", group),
        ):
            answer = post(seed, route, **body).json()
            assert answer["success"] is False
            assert expected in answer["message"]
        seed.control.wake_up()


@pytest.mark.parametrize("level", [0, 2], ids=["valid", "stale"])
def test_a_trainer_that_writes_from_outside(seed: Server, others: Any, level: int) -> None:
    """Within SGLang's session. Half of the weights never opens an engine without valid weights."""
    weights, other_tokens = others
    peer, half = Peer(seed), dict(list(others[0].items())[::2])
    seed.control.sleep(level)
    seed.control.wake_up()
    if level == 2:
        assert post(seed, "/begin_weight_update").json()["success"] is True
        assert peer.write(half)
        assert post(seed, "/end_weight_update").json()["success"] is True
        assert seed.control.memory()["content"] == "stale"
    assert post(seed, "/begin_weight_update").json()["success"] is True
    assert peer.write(half)
    assert seed.post(PROMPT).json()["error"]["details"]["reason"] == "updating"
    assert peer.write(weights)
    assert post(seed, "/end_weight_update").json()["success"] is True
    assert seed.control.memory()["content"] == "valid"
    assert seed.generate(PROMPT) == other_tokens


def test_a_trainer_that_dies_within_its_session(seed: Server, others: Any, model_folder: Path) -> None:
    """The engine stays closed until a complete update."""
    peer = Peer(seed)
    assert post(seed, "/begin_weight_update").json()["success"] is True
    assert peer.write(dict(list(others[0].items())[::2]))
    assert seed.control.memory()["content"] == "updating"
    seed.control.update_weights(new_model(model_folder, OTHER_SEED))
    assert seed.generate(PROMPT) == others[1]


@pytest.mark.parametrize("level", [0, 2], ids=["valid", "stale"])
def test_a_loader_of_the_user_whose_writes_nobody_sees(seed: Server, others: Any, level: int) -> None:
    """Stock: half of an update that failed answers requests."""
    items, other_tokens = list(others[0].items()), others[1]
    failing = ("raise", torch.zeros(1))
    seed.control.sleep(level)
    before = seed.control.wake_up() and seed.control.memory()["content"]
    assert native_update(seed, [failing], load_format=LOADER).json()["success"] is False
    assert seed.control.memory()["content"] == before
    assert native_update(seed, [*items[::2], failing], load_format=LOADER).json()["success"] is False
    assert seed.control.memory()["content"] == "failed"
    assert native_update(seed, items[::2], load_format=LOADER).json()["success"] is True
    assert seed.control.memory()["content"] == "failed"
    assert native_update(seed, items[1::2], load_format=LOADER).json()["success"] is True
    assert seed.control.memory()["content"] == "valid"
    assert seed.generate(PROMPT) == other_tokens


def test_a_new_instance_gets_the_weights_of_the_seed(
    seed: Server, others: Any, tmp_path: Path, tokens: list[int]
) -> None:
    other_folder = write_model(tmp_path / "other", SHAPES["tiny"], seed=OTHER_SEED)
    loads = (
        *("--load-format", "remote_instance", "--remote-instance-weight-loader-backend", "transfer_engine"),
        *("--remote-instance-weight-loader-seed-instance-ip", "127.0.0.1"),
        *("--remote-instance-weight-loader-seed-instance-service-port", str(seed.port)),
    )
    with started(other_folder, tmp_path / "server.log", *loads) as server:
        assert server.generate(PROMPT) == tokens
        server.control.sleep(1)
        server.control.wake_up()
        assert server.generate(PROMPT) == tokens
        server.control.sleep(2)
        server.control.wake_up()
        server.control.update_weights(new_model(other_folder, OTHER_SEED))
        assert server.generate(PROMPT) == others[1]
    seed.control.sleep(1)
    with (
        pytest.raises(RuntimeError, match=r"exited|Failed to load weights"),
        started(other_folder, tmp_path / "asleep.log", *loads),
    ):
        pass


def test_which_arguments_keep_the_transfer_engine(forked_python: Callable[..., str]) -> None:
    """Without the plugin SGLang's own decision stands."""
    path = os.pathsep.join([str(STAND_IN), Sglang().environment(Launch(Path()))["PYTHONPATH"], str(REPOSITORY)])
    script = """
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.server_args import prepare_server_args

    def kept(*arguments):
        seed = "--remote-instance-weight-loader-start-seed-via-transfer-engine"
        server_args = prepare_server_args(["--model-path", FOLDER, "--device", "cpu", seed, *arguments])
        try:
            server_args.resolve_once()
            fields = {name: value for _, fields in server_args._resolved_overrides for name, value in fields.items()}
            return fields["remote_instance_weight_loader_start_seed_via_transfer_engine"]
        except Exception as error:
            return str(error)

    print(kept("--rl-memory", ""))
    print(kept("--enable-memory-saver"))
    print(kept())
    print(kept("--rl-memory", "allocator=tms"))
    """
    lines = forked_python(script, PYTHONPATH=path).splitlines()[-4:]
    assert lines[:3] == ["True", "False", "True"]
    assert "allocator=tms" in lines[3]
