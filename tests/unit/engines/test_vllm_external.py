"""Ranks of an external launcher meet in a store. Here they are threads of one process."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import HashStore

from rl_memory_plugins.engines.vllm import external
from rl_memory_plugins.engines.vllm.external import ExternalRanks
from rl_memory_plugins.memory.arena import PagedArena
from rl_memory_plugins.memory.host import HostAllocator
from rl_memory_plugins.memory.manager import MemoryManager
from rl_memory_plugins.rank import RankAgent
from rl_memory_plugins.tags import Content

RANKS = range(2, 4)  # the second engine of a world of four


class Rank:
    def __init__(self, store: Any, number: int) -> None:
        self.manager = MemoryManager(number, HostAllocator(), PagedArena(), lambda tag: [])
        agent = RankAgent(self.manager, None, None)  # type: ignore[arg-type]
        self.ranks = ExternalRanks(agent, store, number, RANKS)

    def call(self, method: str, **arguments: Any) -> list[Any]:
        """Of each reply the rank, and whether it is an error."""
        self.replies = self.ranks.call(method, **arguments)
        return [(reply.rank, reply.error is not None) for reply in self.replies]


@pytest.fixture
def store() -> Any:
    return HashStore()


@pytest.fixture
def ranks(store: Any, monkeypatch: pytest.MonkeyPatch) -> list[Rank]:
    patient(monkeypatch)
    return [Rank(store, number) for number in RANKS]


def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external, "JOIN_TIMEOUT_S", 20.0)
    monkeypatch.setattr(external, "_AFTER_A_FAILURE_S", 20.0)


def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external, "JOIN_TIMEOUT_S", 0.5)
    monkeypatch.setattr(external, "_AFTER_A_FAILURE_S", 0.1)


def together(ranks: list[Rank], call: Callable[[Rank], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(call, ranks))


def test_all_see_the_replies_of_all(ranks: list[Rank]) -> None:
    assert together(ranks, lambda rank: rank.call("status")) == [[(2, False), (3, False)]] * 2
    tags = {"level": 1, "tags": ["weights"]}
    assert together(ranks, lambda rank: rank.call("prepare_sleep", **tags)) == [[(2, False), (3, False)]] * 2


def test_one_that_fails_fails_for_all(ranks: list[Rank]) -> None:
    """The second rank has prepared nothing."""
    tags = {"level": 1, "tags": ["weights"]}
    ranks[0].manager.prepare_sleep(1, [])  # type: ignore[arg-type]
    assert together(ranks, lambda rank: rank.call("commit_sleep")) == [[(2, False), (3, True)]] * 2
    assert together(ranks, lambda rank: rank.call("prepare_sleep", **tags)) == [[(2, False), (3, False)]] * 2


def test_one_that_comes_alone_names_the_absent_and_the_next_call_works(
    ranks: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    impatient(monkeypatch)
    for method in ("prepare_sleep", "status"):  # the second one is part of the same operation
        arguments = {"level": 1, "tags": ["weights"]} if method == "prepare_sleep" else {}
        assert ranks[0].call(method, **arguments) == [(2, True)]
        error = ranks[0].replies[0].error
        assert error is not None and error["details"] == {"absent_ranks": [3]}
        assert error["message"].startswith("prepare_sleep: ")
    patient(monkeypatch)
    assert together(ranks, lambda rank: rank.call("status")) == [[(2, False), (3, False)]] * 2


def test_different_calls_are_refused_on_all(ranks: list[Rank]) -> None:
    calls = {2: "prepare_sleep", 3: "prepare_wake"}

    def call(rank: Rank) -> Any:
        method = calls[rank.manager.rank]
        arguments = {"tags": ["weights"], "level": 1} if method == "prepare_sleep" else {"tags": ["weights"]}
        return rank.call(method, **arguments)

    assert together(ranks, call) == [[(2, True)], [(3, True)]]
    assert together(ranks, lambda rank: rank.call("status")) == [[(2, False), (3, False)]] * 2


def test_what_a_rank_has_begun_is_undone_whoever_comes(ranks: list[Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    impatient(monkeypatch)
    manager = ranks[0].manager
    manager.begin_writing()
    assert ranks[0].call("finish_update", complete=False) == [(2, True)]
    assert manager.content is Content.FAILED
    manager.prepare_sleep(1, [])  # type: ignore[arg-type]
    ranks[0].call("abort_sleep")
    manager.require_writable()  # nothing is prepared any more


def test_the_store_does_not_grow(ranks: list[Rank], store: Any) -> None:
    sizes = set()
    for _ in range(5):
        together(ranks, lambda rank: rank.call("status"))
        sizes.add(store.num_keys())
    assert len(sizes) <= 2


def test_after_a_missed_call_the_ranks_are_patient_again(ranks: list[Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer may work on one rank for seconds before the next call, too."""
    monkeypatch.setattr(external, "JOIN_TIMEOUT_S", 0.3)
    monkeypatch.setattr(external, "_AFTER_A_FAILURE_S", 0.1)
    assert ranks[0].call("status") == [(2, True)]
    monkeypatch.setattr(external, "JOIN_TIMEOUT_S", 60.0)
    time.sleep(0.2)

    def call(rank: Rank) -> Any:
        if rank.manager.rank == 3:
            time.sleep(0.5)
        return rank.call("status")

    assert together(ranks, call) == [[(2, False), (3, False)]] * 2
