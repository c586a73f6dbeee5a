"""A wake whose content comes later: what waits for it, and what a copy that fails leaves."""

from __future__ import annotations

import pytest
from helpers import FakeRank, sleep, wake

from rl_memory_plugins.errors import EngineFaultError
from rl_memory_plugins.tags import PUBLIC_TAGS, Level, Tag, TagState

RESIDENT, PRESERVED = TagState.RESIDENT, TagState.PRESERVED


@pytest.fixture
def rank() -> FakeRank:
    return FakeRank()


def states(rank):
    return {tag: rank.manager.state(tag) for tag in PUBLIC_TAGS}


def wake_later(rank, *later):
    rank.manager.prepare_wake(PUBLIC_TAGS)
    return rank.manager.commit_wake(later)


def test_content_that_comes_later_is_there_after_the_wait(rank):
    before = rank.contents()
    sleep(rank)
    changes = {change.tag: change for change in wake_later(rank, Tag.CUDA_GRAPH)}
    assert changes[Tag.CUDA_GRAPH].bytes_copied == rank.graph.nbytes
    assert states(rank) == {Tag.KV_CACHE: RESIDENT, Tag.WEIGHTS: RESIDENT, Tag.CUDA_GRAPH: RESIDENT}
    assert rank.manager.unfinished == [Tag.CUDA_GRAPH]
    assert rank.contents()["graph"] != before["graph"]
    assert rank.contents()["parameter"] == before["parameter"]
    rank.manager.finish_wake()
    assert rank.manager.unfinished == []
    assert {**rank.contents(), "kv_cache": before["kv_cache"]} == before
    rank.manager.finish_wake()


def test_a_tag_without_content_has_nothing_to_wait_for(rank):
    sleep(rank, Level.DISCARD, [Tag.KV_CACHE])
    rank.manager.prepare_wake([Tag.KV_CACHE])
    rank.manager.commit_wake([Tag.KV_CACHE])
    rank.manager.finish_wake()
    assert rank.manager.unfinished == []


@pytest.mark.parametrize(
    "begin",
    [
        lambda manager: manager.prepare_sleep(Level.PRESERVE, PUBLIC_TAGS),
        lambda manager: manager.prepare_wake(PUBLIC_TAGS),
        lambda manager: manager.free_host_memory(),
    ],
    ids=["prepare_sleep", "prepare_wake", "free_host_memory"],
)
def test_every_transition_waits_first(rank, begin):
    before = rank.contents()
    sleep(rank)
    wake_later(rank, Tag.CUDA_GRAPH, Tag.WEIGHTS)
    begin(rank.manager)
    assert rank.manager.unfinished == []
    assert {**rank.contents(), "kv_cache": before["kv_cache"]} == before


@pytest.mark.parametrize("nth", [1, 2])
def test_a_copy_that_fails_later_leaves_its_tag_asleep_with_its_content(rank, nth):
    before = rank.contents()
    sleep(rank)
    wake_later(rank, Tag.CUDA_GRAPH, Tag.WEIGHTS)
    first, second = rank.manager.unfinished
    rank.device.fail("end_copy_from_host", nth, RuntimeError("an uncorrectable error"))
    with pytest.raises(EngineFaultError, match="an uncorrectable error") as caught:
        rank.manager.finish_wake()
    asleep = {first, second} if nth == 1 else {second}
    assert caught.value.details["changed"] == {str(tag): "preserved" for tag in asleep}
    assert rank.manager.unfinished == []
    assert {tag for tag, state in states(rank).items() if state is PRESERVED} == asleep
    assert rank.device.used == rank.mapped_bytes()
    wake(rank)
    assert {**rank.contents(), "kv_cache": before["kv_cache"]} == before


@pytest.mark.parametrize(("operation", "nth"), [("begin_copy_from_host", 3), ("map", 5), ("end_copy_from_host", 1)])
def test_a_commit_that_fails_while_content_is_on_its_way_undoes_all(rank, operation, nth):
    before = rank.contents()
    sleep(rank)
    rank.manager.prepare_wake(PUBLIC_TAGS)
    rank.device.fail(operation, nth)
    with pytest.raises(EngineFaultError):
        rank.manager.commit_wake([Tag.CUDA_GRAPH, Tag.WEIGHTS])
    assert rank.manager.unfinished == [] and rank.device.used == 0
    wake(rank)
    assert {**rank.contents(), "kv_cache": before["kv_cache"]} == before
