"""Attention data parallelism: each rank has requests of its own, and all ranks step together and are one engine."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Semaphore
from typing import Any

import pytest

from integration.engines.base import Server, events_of
from rl_memory_plugins.weights.checksums import tensor_checksum
from tests.sglang.test_weight_kinds import OTHER_SEED, PROMPT, ROUTING, SEED, start
from tests.weight_kinds import checkpoint, renew, write_moe

REQUESTS = 4  # two to a rank
LONG = 150
WHILE_UPDATED = 300  # tokens: as many as a busy machine makes before an update begins, and some

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
def asked(server: Server, tokens: int) -> Iterator[list[Future[dict[str, Any]]]]:
    """Answers that have begun when the body of `with` begins. SGLang counts what runs on one rank only."""
    begun = Semaphore(0)

    def ask(prompt: list[int]) -> dict[str, Any]:
        body = server.kind.request(prompt, tokens, stream=True)
        answer: dict[str, Any] = {}
        with server.http.stream("POST", server.kind.generation_route, json=body) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                for event in events_of(line):
                    if not answer:
                        begun.release()
                    answer = event  # it has all tokens so far
        return answer

    prompts = [[token + number for token in PROMPT] for number in range(REQUESTS)]
    with ThreadPoolExecutor(REQUESTS) as pool:
        answers = [pool.submit(ask, prompt) for prompt in prompts]
        for _ in prompts:
            assert begun.acquire(timeout=60)
        yield answers


def answers(server: Server) -> list[list[int]]:
    with asked(server, 8) as asking:
        return [server.kind.tokens(answer.result(60)) for answer in asking]


def test_all_ranks_are_one_engine_that_sleeps_and_wakes(server: Server, first: list[list[int]]) -> None:
    (engine,) = server.control.memory()["engines"]
    assert len(engine["ranks"]) == 2
    for _ in range(2):
        server.control.sleep(1)
        assert server.post(PROMPT).status_code == 503
        server.control.wake_up()
        assert answers(server) == first


@pytest.mark.parametrize(
    "mode",
    [pytest.param("abort", marks=pytest.mark.long), pytest.param("wait", marks=pytest.mark.long), "keep", "freeze"],
)
def test_sleeping_while_both_ranks_have_requests(server: Server, first: list[list[int]], mode: str) -> None:
    with asked(server, LONG) as asking:
        server.control.sleep(1, ["weights"] if mode == "freeze" else None, mode=mode)
        if mode in ("keep", "freeze"):
            assert not any(answer.done() for answer in asking)
        server.control.wake_up()
        ended = [answer.result(60) for answer in asking]
    whole = [len(server.kind.tokens(answer)) == LONG for answer in ended]
    assert not any(whole) if mode == "abort" else all(whole)
    assert answers(server) == first


@pytest.mark.long
def test_frozen_requests_of_both_ranks_go_on_under_new_weights(
    server: Server, folders: list[Path], first: list[list[int]]
) -> None:
    weights = checkpoint(folders[1])
    with asked(server, WHILE_UPDATED) as asking:
        server.control.update_weights(weights, mode="freeze")
        assert not any(answer.done() for answer in asking)
        ended = [answer.result(60) for answer in asking]
    assert {len(server.kind.tokens(answer)) for answer in ended} == {WHILE_UPDATED}
    assert {server.kind.recomputations(server.http, answer) for answer in ended} == {0}
    other = answers(server)
    renew(server, folders[1])
    assert answers(server) == other != first
    renew(server, folders[0])


@pytest.mark.long
def test_an_update_reaches_all_ranks(server: Server, folders: list[Path], first: list[list[int]]) -> None:
    renew(server, folders[1])
    assert answers(server) != first
    own = {name: tensor_checksum(tensor) for name, tensor in checkpoint(folders[1]).items()}
    assert server.control.checksums()["tensors"] == own
    renew(server, folders[0])
    assert answers(server) == first
