"""Sleeping and waking: what leaves memory, what comes back, and what repeated calls do."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from integration.engines.base import Server
from rl_memory_plugins.errors import StateConflictError
from tests.conformance.conftest import PROMPT, Weights
from tests.conformance.trainers import push

TAGS = ["weights", "kv_cache", "cuda_graph"]
SUBSETS = [list(subset) for size in (1, 2, 3) for subset in itertools.combinations(TAGS, size)]


def states(server: Server) -> dict[str, set[str]]:
    """Per tag, the states over all ranks."""
    found: dict[str, set[str]] = {}
    for engine in server.control.memory()["engines"]:
        for rank in engine["ranks"]:
            for tag, status in rank["tags"].items():
                found.setdefault(tag, set()).add(status["state"])
    return found


def arena_bytes(server: Server) -> list[int]:
    return [rank["host_arena_bytes"] for engine in server.control.memory()["engines"] for rank in engine["ranks"]]


def tag_bytes(server: Server, tag: str) -> int:
    engines = server.control.memory()["engines"]
    return sum(rank["tags"][tag]["bytes"] for engine in engines for rank in engine["ranks"])


def copied_bytes(answer: dict[str, Any], tag: str) -> int:
    """What a sleep or wake copied of a tag, over all ranks."""
    return sum(change["bytes_copied"] for change in answer["report"]["changes"] if change["tag"] == tag)


def test_level_0_releases_nothing_and_closes(server: Server) -> None:
    answer = server.control.sleep(0)
    assert answer["report"]["changes"] == []
    assert set().union(*states(server).values()) == {"resident"}
    assert server.control.is_sleeping()
    assert server.post(PROMPT).status_code == 503
    assert server.control.wake_up()["status"] == "awake"


def test_level_1_preserves_the_weights(server: Server, first_tokens: list[int]) -> None:
    report = server.control.sleep(1)["report"]
    assert states(server)["weights"] == {"preserved"}
    assert states(server)["kv_cache"] == {"discarded"}
    released = {tag: sum(c["bytes_released"] for c in report["changes"] if c["tag"] == tag) for tag in TAGS}
    assert released["weights"] == tag_bytes(server, "weights") > 0
    assert released["kv_cache"] == tag_bytes(server, "kv_cache") > 0
    server.control.wake_up()
    assert server.control.memory()["content"] == "valid"
    assert server.generate(PROMPT) == first_tokens


def test_a_second_sleep_copies_no_weights_whatever_was_asked_meanwhile(
    server: Server, weights: Weights, first_tokens: list[int]
) -> None:
    """What an engine keeps beside its parameters in their region, and writes to with each request, it copies."""
    parameters = sum(tensor.nbytes for tensor in weights.first.parameters())
    beside = copied_bytes(server.control.sleep(2), "weights")
    server.control.wake_up()
    push(server, weights.first)
    copied = copied_bytes(server.control.sleep(1), "weights")
    if server.launch.dp > 1:  # one replica copies at most, and none if the copy still holds these bytes
        assert beside <= copied <= beside + 0.55 * tag_bytes(server, "weights")
    elif server.launch.device == "cpu":
        assert copied == tag_bytes(server, "weights")
    else:  # nothing of what lies unused between tensors
        assert beside + 0.99 * parameters < copied <= tag_bytes(server, "weights")
    for _ in range(2):
        server.control.wake_up()
        assert server.generate(PROMPT) == first_tokens
        assert copied_bytes(server.control.sleep(1), "weights") == beside


def test_level_2_frees_the_memory_it_reports(server: Server) -> None:
    server.generate(PROMPT)
    before = server.occupied_bytes()
    report = server.control.sleep(2)["report"]
    freed = before - server.occupied_bytes()
    released = sum(change["bytes_released"] for change in report["changes"])
    assert released >= 0.95 * (tag_bytes(server, "weights") + tag_bytes(server, "kv_cache"))
    assert freed >= 0.9 * released, f"{freed} of {released} bytes are free"


def test_level_2_needs_an_update(server: Server, weights: Weights, first_tokens: list[int]) -> None:
    server.control.sleep(2)
    assert server.control.wake_up()["status"] == "awake"
    memory = server.control.memory()
    assert (memory["content"], memory["admitting"], memory["reason"]) == ("stale", False, "stale")
    server.control.update_weights(weights.first)
    assert server.control.memory()["admitting"]
    assert server.generate(PROMPT) == first_tokens


@pytest.mark.parametrize("tags", SUBSETS, ids="+".join)
def test_a_subset_sleeps_and_wakes_alone(server: Server, tags: list[str], first_tokens: list[int]) -> None:
    server.control.sleep(1, tags)
    for tag in TAGS:
        assert (states(server)[tag] != {"resident"}) == (tag in tags)
    assert server.post(PROMPT).status_code == 503
    for tag in tags:
        server.control.wake_up([tag])
        assert states(server)[tag] == {"resident"}
    assert server.generate(PROMPT) == first_tokens


@pytest.mark.parametrize("order", list(itertools.permutations(TAGS)), ids="-".join)
def test_tags_wake_in_any_order(server: Server, order: tuple[str, ...], first_tokens: list[int]) -> None:
    server.control.sleep(1)
    for position, tag in enumerate(order):
        assert not server.control.memory()["admitting"]
        answer = server.control.wake_up([tag])
        assert answer["status"] == ("awake" if position == len(order) - 1 else "sleeping")
    assert server.generate(PROMPT) == first_tokens


def test_sleeping_twice_is_a_no_op(server: Server, first_tokens: list[int]) -> None:
    server.control.sleep(1)
    assert server.control.sleep(1)["report"]["changes"] == []
    assert server.control.sleep(2)["report"]["changes"] == []  # what sleeps keeps what it preserved
    server.control.wake_up()
    assert server.generate(PROMPT) == first_tokens


def test_sleeping_what_sleeps_still_acts_on_the_others(server: Server, first_tokens: list[int]) -> None:
    server.control.sleep(1, ["weights"])
    changed = {change["tag"] for change in server.control.sleep(1)["report"]["changes"]}
    assert changed == {"kv_cache", "cuda_graph"}
    server.control.wake_up()
    assert server.generate(PROMPT) == first_tokens


def test_waking_twice_and_waking_what_never_slept(server: Server, first_tokens: list[int]) -> None:
    assert server.control.wake_up()["report"]["changes"] == []
    server.control.sleep(1)
    server.control.wake_up(["weights"])
    woken = {change["tag"] for change in server.control.wake_up(["weights", "kv_cache"])["report"]["changes"]}
    assert woken == {"kv_cache"}
    server.control.wake_up()
    assert server.control.wake_up()["report"]["changes"] == []
    assert server.generate(PROMPT) == first_tokens


def test_the_report_times_only_steps_that_ran(server: Server) -> None:
    seconds = server.control.sleep(2, ["kv_cache"])["report"]["seconds"]
    assert seconds["total"] >= seconds["release"] > 0.0
    again = server.control.sleep(1, ["kv_cache"])["report"]["seconds"]
    assert set(again) == set(seconds)
    woken = server.control.wake_up()["report"]["seconds"]
    assert woken["map"] > 0.0
    assert server.control.wake_up()["report"]["seconds"]["map"] == 0.0


def test_many_cycles_end_where_they_began(server: Server, first_tokens: list[int]) -> None:
    server.control.sleep(1)
    server.control.wake_up()
    before, arena = server.occupied_bytes(), arena_bytes(server)
    for _ in range(10):
        server.control.sleep(1)
        server.control.wake_up()
    assert server.generate(PROMPT) == first_tokens
    assert arena_bytes(server) == arena
    # Leftovers of an allocator come and go by 40 MiB a rank; a tenth of the KV cache, lost in each cycle, is more.
    assert server.occupied_bytes() - before < (64 << 20) * len(arena)


def test_an_update_needs_resident_weights(server: Server, weights: Weights) -> None:
    server.control.sleep(2)
    with pytest.raises(StateConflictError):
        server.control.update_weights(weights.first)
    server.control.wake_up()
    server.control.update_weights(weights.first)
