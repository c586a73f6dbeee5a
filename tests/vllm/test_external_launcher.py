"""Ranks that are processes of the caller, as torchrun starts them and as TRL colocates vLLM. On two ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from integration.engines.ports import reserve_port
from integration.models import new_model
from rl_memory_plugins import DeviceMemoryError, StateConflictError
from tests.vllm.calls import generate, push, refused
from tests.vllm.child import Child
from tests.vllm.conftest import OTHER_SEED, SEED, engine_options, environment
from tests.vllm.test_python import load_here

RANKS = 2
JOIN_S = 3.0  # of a rank that is alone
PATIENCE_S = 60.0


def make(folder: Path, faults: Path) -> Any:
    from rl_memory_plugins.engines.vllm import external
    from rl_memory_plugins.vllm import LLM

    external.JOIN_TIMEOUT_S = PATIENCE_S
    name_shared_memory_by_port()
    options = {"tensor_parallel_size": RANKS, "distributed_executor_backend": "external_launcher", "seed": 0}
    return LLM(**engine_options(folder, **options), rl_memory={"poison": True, "fault_dir": str(faults)})


def name_shared_memory_by_port() -> None:
    """On CPUs vLLM names the memory that its ranks share by the port of their rendezvous. `env://` has none, and all
    launchers of a machine would share one name."""
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    original = ExecutorWithExternalLauncher._distributed_args
    rendezvous = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    ExecutorWithExternalLauncher._distributed_args = lambda self: (rendezvous, *original(self)[1:])


class Ranks:
    """The processes, which make each call side by side."""

    def __init__(self, children: list[Child], faults: Path) -> None:
        self.children = children
        self._faults = faults

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The answer that all ranks give."""
        with ThreadPoolExecutor(RANKS) as pool:
            answers = list(pool.map(lambda child: child(function, *arguments), self.children))
        assert all(answer == answers[0] for answer in answers), answers
        return answers[0]

    def fail(self, operation: str, rank: int) -> None:
        (self._faults / f"{operation}.{rank}").touch()


@pytest.fixture(scope="module")
def started(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    faults = tmp_path_factory.mktemp("faults")
    reservation, port = reserve_port()
    world = {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1"}
    variables = {**environment(model_folder, tp=RANKS), **world, "MASTER_PORT": str(port)}
    children: list[Child] = []
    try:
        for rank in range(RANKS):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
            children.append(Child(make, model_folder, faults, environment={**variables, **own}, wait=False))
        for child in children:
            child.wait_ready()
        yield Ranks(children, faults)
    finally:
        for child in children:
            child.stop()
        reservation.close()
        for left in Path("/dev/shm").glob(f"{port}-*-cpushm_*"):
            left.unlink()


@pytest.fixture
def ranks(started: Ranks, model_folder: Path, first_tokens: list[int]) -> Iterator[Ranks]:
    yield started
    assert started(restore, model_folder) == first_tokens


def restore(llm: Any, folder: Path) -> list[int]:
    llm.wake_up()
    push(llm, new_model(folder, SEED))
    return generate(llm)


def states(llm: Any) -> list[tuple[int, list[str]]]:
    """Of each rank its number and the tags that are not resident."""
    (engine,) = llm.memory_status()
    return [
        (rank.rank, sorted(name for name, tag in rank.tags.items() if tag.state != "resident")) for rank in engine.ranks
    ]


def sleep_and_wake(llm: Any, first: list[int]) -> Any:
    assert generate(llm) == first
    report = llm.sleep(1)
    assert {change.rank for change in report.changes} == set(range(RANKS))
    assert refused(lambda: generate(llm)) == "asleep"
    asleep = states(llm)
    assert llm.wake_up() is True
    assert generate(llm) == first
    return asleep


def test_they_sleep_and_wake_in_step(ranks: Ranks, first_tokens: list[int]) -> None:
    everything = ["cuda_graph", "kv_cache", "weights"]
    assert ranks(sleep_and_wake, first_tokens) == [(0, everything), (1, everything)]


def wake_without_memory(llm: Any) -> Any:
    llm.sleep(1)
    with pytest.raises(DeviceMemoryError) as caught:
        llm.wake_up()
    assert refused(lambda: generate(llm)) == "asleep"
    return caught.value.details["failed_ranks"], [bool(tags) for _, tags in states(llm)]


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_wake_without_memory_on_one_of_them_wakes_none(ranks: Ranks, rank: int) -> None:
    """Each rank alone would wake where it can, and the next all-reduce wait for the one that could not."""
    ranks.fail("reserve", rank)
    assert ranks(wake_without_memory) == ([rank], [True, True])


def trl(llm: Any, folder: Path) -> list[int]:
    """TRL's step, colocated: it loads into the model of its process, on every rank. The adapter names the version."""
    llm.sleep(2)
    llm.wake_up(tags=["weights"])
    api = llm.llm_engine.rl_memory
    api.notice_loads("early")
    assert llm.weight_version() != "early"  # the weights are stale
    load_here(llm, folder, OTHER_SEED)
    api.notice_loads("41")
    assert llm.weight_version() == "41"
    llm.wake_up(tags=["kv_cache"])
    return generate(llm)


def test_trl_s_cycle(ranks: Ranks, model_folder: Path, other_tokens: list[int]) -> None:
    assert ranks(trl, model_folder) == other_tokens


def update(llm: Any, folder: Path) -> list[int]:
    llm.sleep(2)
    llm.wake_up(tags=["weights"])
    push(llm, new_model(folder, OTHER_SEED))
    llm.wake_up()
    return generate(llm)


def test_an_update(ranks: Ranks, model_folder: Path, other_tokens: list[int]) -> None:
    assert ranks(update, model_folder) == other_tokens


def alone(llm: Any) -> tuple[str, Any]:
    from rl_memory_plugins.engines.vllm import external

    external.JOIN_TIMEOUT_S = JOIN_S
    try:
        with pytest.raises(StateConflictError) as caught:
            llm.sleep(1)
    finally:
        external.JOIN_TIMEOUT_S = PATIENCE_S
    time.sleep(2 * external._AFTER_A_FAILURE_S)  # the next call is no part of this sleep
    return str(caught.value), caught.value.details["absent_ranks"]


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_rank_that_is_called_alone_says_who_is_missing(ranks: Ranks, rank: int, first_tokens: list[int]) -> None:
    message, absent = ranks.children[rank](alone)
    assert absent == [1 - rank] and f"within {JOIN_S:g} s" in message
    ranks(wake)
    assert ranks(generate) == first_tokens


def wake(llm: Any) -> Any:
    return llm.wake_up()


def by_number(llm: Any) -> str:
    """One rank sleeps while the other wakes."""
    rank = llm.llm_engine.model_executor.driver_worker.worker.rank
    with pytest.raises(StateConflictError) as caught:
        llm.sleep(1) if rank == 0 else llm.wake_up()
    return str(caught.value)


def test_ranks_that_are_asked_for_different_things_do_neither(ranks: Ranks, first_tokens: list[int]) -> None:
    message = ranks(by_number)
    assert "prepare_sleep" in message and "prepare_wake" in message
    assert [tags for _, tags in ranks(states)] == [[], []]
    ranks(wake)
    assert ranks(generate) == first_tokens


def ask_here(llm: Any) -> Any:
    return llm.collective_rpc("get_model")[0] is not None


def test_a_question_to_one_worker_concerns_no_other_rank(ranks: Ranks) -> None:
    assert ranks.children[0](ask_here)
