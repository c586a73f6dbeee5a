"""Attention data parallelism: each rank has requests of its own, and all ranks step together and are one engine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from integration.engines.base import Server
from rl_memory_plugins.weights.checksums import tensor_checksum
from tests.sglang.test_weight_kinds import OTHER_SEED, PROMPT, ROUTING, SEED, start
from tests.weight_kinds import checkpoint, renew, write_moe

REQUESTS = 4  # two to a rank
LONG = 150

#: Beside the routing, what SGLang's CPU backend lacks for the batch of a rank that has no request.
PLUGIN = (
    ROUTING
    + """
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

        TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda self: 1
"""
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [write_moe(folder / name, seed, "float32") for name, seed in (("first", SEED), ("other", OTHER_SEED))]


@pytest.fixture(scope="module")
def server(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "server.log"
    with start(folders[0], log, PLUGIN, "--attn-dp-size", "2", tp=2) as server:
        yield server


@pytest.fixture(scope="module")
def first(server: Server) -> list[list[int]]:
    return answers(server)


@contextmanager
def asked(server: Server, tokens: int) -> Iterator[list[Future[httpx.Response]]]:
    prompts = [[token + number for token in PROMPT] for number in range(REQUESTS)]
    with ThreadPoolExecutor(REQUESTS) as pool:
        yield [pool.submit(server.post, prompt, tokens) for prompt in prompts]


def answers(server: Server) -> list[list[int]]:
    with asked(server, 8) as responses:
        return [server.kind.tokens(response.result().json()) for response in responses]


def test_all_ranks_are_one_engine_that_sleeps_and_wakes(server: Server, first: list[list[int]]) -> None:
    (engine,) = server.control.memory()["engines"]
    assert len(engine["ranks"]) == 2
    for _ in range(2):
        server.control.sleep(1)
        assert server.post(PROMPT).status_code == 503
        server.control.wake_up()
        assert answers(server) == first


@pytest.mark.parametrize("mode", ["abort", "wait", "keep", "freeze"])
def test_sleeping_while_both_ranks_have_requests(server: Server, first: list[list[int]], mode: str) -> None:
    with asked(server, LONG) as responses:
        time.sleep(1)  # SGLang counts what runs on one rank only
        assert not any(response.done() for response in responses)
        server.control.sleep(1, ["weights"] if mode == "freeze" else None, mode=mode)
        if mode in ("keep", "freeze"):
            assert not any(response.done() for response in responses)
        server.control.wake_up()
        ended = [response.result(60) for response in responses]
    assert {response.status_code for response in ended} == {200}
    whole = [len(server.kind.tokens(response.json())) == LONG for response in ended]
    assert not any(whole) if mode == "abort" else all(whole)
    assert answers(server) == first


def test_frozen_requests_of_both_ranks_go_on_under_new_weights(
    server: Server, folders: list[Path], first: list[list[int]]
) -> None:
    with asked(server, LONG) as responses:
        time.sleep(1)
        server.control.update_weights(checkpoint(folders[1]), mode="freeze")
        assert not any(response.done() for response in responses)
        ended = [response.result(60).json() for response in responses]
    assert {len(server.kind.tokens(answer)) for answer in ended} == {LONG}
    assert {server.kind.recomputations(server.http, answer) for answer in ended} == {0}
    other = answers(server)
    renew(server, folders[1])
    assert answers(server) == other != first
    renew(server, folders[0])


def test_an_update_reaches_all_ranks(server: Server, folders: list[Path], first: list[list[int]]) -> None:
    renew(server, folders[1])
    assert answers(server) != first
    own = {name: tensor_checksum(tensor) for name, tensor in checkpoint(folders[1]).items()}
    assert server.control.checksums()["tensors"] == own
    renew(server, folders[0])
    assert answers(server) == first
