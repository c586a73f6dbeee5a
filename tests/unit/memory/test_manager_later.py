"""Wakes whose content comes later, and sleeps whose copies begin early: who waits, and what a failure leaves."""

from __future__ import annotations

from collections import Counter

import pytest
from helpers import FakeRank, sleep, wake

from rl_memory_plugins.errors import DeviceMemoryError, EngineFaultError, StateConflictError
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


def test_a_tag_is_mapped_while_the_one_before_is_copied(rank):
    before = rank.contents()
    sleep(rank)
    began = []
    begin = rank.device.begin_copy_from_host

    def note(pairs):
        began.append((rank.device.calls["map"], rank.device.calls["end_copy_from_host"]))
        return begin(pairs)

    rank.device.begin_copy_from_host = note
    rank.device.calls.clear()
    wake(rank)
    maps = [mapped for mapped, _ in began]
    assert len(maps) > 1 and maps == sorted(set(maps)) and {ended for _, ended in began} == {0}
    assert rank.contents()["parameter"] == before["parameter"] and rank.contents()["graph"] == before["graph"]


def test_a_copy_that_fails_behind_another_leaves_both_asleep(rank):
    before = rank.contents()
    sleep(rank)
    rank.device.fail("end_copy_from_host", 2)
    with pytest.raises(EngineFaultError):
        wake(rank)
    assert RESIDENT not in states(rank).values() and rank.manager.unfinished == []
    wake(rank)
    assert {**rank.contents(), "kv_cache": before["kv_cache"]} == before


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


# -- a sleep whose copies begin early -----------------------------------------------------------------------


def copies(rank):
    return rank.device.calls["begin_copy_to_host"], rank.device.calls["end_copy_to_host"]


def test_copies_that_begin_early_end_with_the_commit(rank):
    before = rank.contents()
    rank.manager.prepare_sleep(Level.PRESERVE, PUBLIC_TAGS)
    rank.manager.begin_sleep()
    assert copies(rank) == (3, 0) and set(states(rank).values()) == {RESIDENT}
    rank.manager.commit_sleep()
    assert copies(rank) == (3, 3) and RESIDENT not in states(rank).values()
    wake(rank)
    assert {**rank.contents(), "kv_cache": before["kv_cache"]} == before


def test_an_abort_waits_for_copies_that_began_early(rank):
    before = rank.contents()
    rank.manager.prepare_sleep(Level.PRESERVE, PUBLIC_TAGS)
    rank.manager.begin_sleep()
    rank.manager.abort_sleep()
    assert copies(rank) == (3, 3)
    assert rank.contents() == before and set(states(rank).values()) == {RESIDENT}
    sleep(rank)
    wake(rank)
    assert {**rank.contents(), "kv_cache": before["kv_cache"]} == before


def test_what_was_written_after_an_early_begin_is_copied_again_where_a_clean_copy_was_used(rank):
    sleep(rank, tags=[Tag.WEIGHTS])
    wake(rank, [Tag.WEIGHTS])
    rank.manager.prepare_sleep(Level.PRESERVE, [Tag.WEIGHTS])
    rank.manager.begin_sleep()
    rank.allocator.write(rank.parameter, b"new" * 100)
    written = rank.contents()
    rank.manager.recheck_copies()
    rank.manager.commit_sleep()
    wake(rank, [Tag.WEIGHTS])
    assert rank.contents() == written


def test_a_clean_copy_is_compared_once_all_streams_have_written(rank, monkeypatch):
    sleep(rank, tags=[Tag.WEIGHTS])
    wake(rank, [Tag.WEIGHTS])
    rank.manager.prepare_sleep(Level.PRESERVE, [Tag.WEIGHTS])
    late = [lambda: rank.allocator.write(rank.parameter, b"late" * 100)]  # on a stream that nobody waits for
    synchronize = rank.device.synchronize

    def arrive():
        synchronize()
        while late:
            late.pop()()

    monkeypatch.setattr(rank.device, "synchronize", arrive)
    rank.manager.recheck_copies()
    rank.manager.commit_sleep()
    wake(rank, [Tag.WEIGHTS])
    assert not late and rank.allocator.read(rank.parameter).startswith(b"late" * 100)


@pytest.mark.parametrize("begun", [True, False])
def test_to_compare_copies_does_not_wait_for_the_device_where_others_copy(rank, begun):
    sleep(rank, tags=[Tag.WEIGHTS])
    wake(rank, [Tag.WEIGHTS])
    rank.manager.prepare_sleep(Level.PRESERVE, [Tag.WEIGHTS])
    if begun:
        rank.manager.begin_sleep()
    before = rank.device.calls["synchronize"]
    rank.manager.recheck_copies(synchronize=begun)  # before the begin its caller says so
    assert rank.device.calls["synchronize"] == before
    rank.manager.abort_sleep()


@pytest.mark.parametrize("end", ["abort_wake", "lacks memory"])
def test_no_copy_stands_for_memory_that_was_freed_asleep(rank, end):
    """A wake that comes to nothing has freed the addresses of tensors that ended: another one may lie there."""
    sleep(rank, tags=[Tag.WEIGHTS])
    gone, kept = rank.buffer, rank.parameter
    assert rank.manager.host_copies(gone) and rank.manager.host_copies(kept)
    rank.allocator.free(gone)
    if end == "lacks memory":
        rank.device.fail("reserve", error=DeviceMemoryError("full"))
        with pytest.raises(DeviceMemoryError):
            rank.manager.prepare_wake([Tag.WEIGHTS])
    else:
        rank.manager.prepare_wake([Tag.WEIGHTS])
        rank.manager.abort_wake()
    assert rank.manager.host_copies(gone) == []
    assert [block for block, _ in rank.manager.host_copies(kept)] == [kept]
    wake(rank, [Tag.WEIGHTS])
    rank.manager.check_integrity()


def test_memory_that_came_after_an_early_begin_is_not_released(rank):
    rank.manager.prepare_sleep(Level.PRESERVE, [Tag.WEIGHTS])
    rank.manager.begin_sleep()
    with rank.allocator.region(Tag.WEIGHTS):
        rank.allocator.allocate(4096)
    with pytest.raises(StateConflictError, match="has got memory"):
        rank.manager.commit_sleep()
    assert set(states(rank).values()) == {RESIDENT}


def test_an_early_begin_does_not_wait_for_the_device(rank):
    """It would wait for copies that another memory of the device has begun."""
    rank.manager.prepare_sleep(Level.PRESERVE, PUBLIC_TAGS)
    calls = Counter(rank.device.calls)
    rank.manager.begin_sleep()
    assert copies(rank) == (3, 0) and not (Counter(rank.device.calls) - calls)["synchronize"]
    rank.manager.abort_sleep()


def test_an_early_begin_that_fails_can_be_undone(rank):
    before = rank.contents()
    rank.manager.prepare_sleep(Level.PRESERVE, PUBLIC_TAGS)
    rank.device.fail("begin_copy_to_host", nth=2)
    with pytest.raises(EngineFaultError):
        rank.manager.begin_sleep()
    rank.manager.abort_sleep()
    sleep(rank)
    wake(rank)
    assert {**rank.contents(), "kv_cache": before["kv_cache"]} == before


def begun(rank):
    rank.manager.prepare_sleep(Level.PRESERVE, PUBLIC_TAGS)
    rank.manager.begin_sleep()


def test_tags_whose_copies_began_together_leave_one_after_the_other(rank):
    before = rank.contents()
    begun(rank)
    calls = Counter(rank.device.calls)
    [change] = rank.manager.commit_sleep([Tag.CUDA_GRAPH])
    assert change.tag == Tag.CUDA_GRAPH and change.bytes_copied == rank.graph.nbytes
    assert states(rank) == {Tag.KV_CACHE: RESIDENT, Tag.WEIGHTS: RESIDENT, Tag.CUDA_GRAPH: PRESERVED}
    since = Counter(rank.device.calls) - calls
    assert since["end_copy_to_host"] == 1 and not since["synchronize"] and not since["trim"]
    with pytest.raises(StateConflictError, match="already prepared"):
        rank.manager.prepare_wake([Tag.CUDA_GRAPH])
    assert [change.tag for change in rank.manager.commit_sleep()] == [Tag.KV_CACHE, Tag.WEIGHTS]
    assert (Counter(rank.device.calls) - calls)["synchronize"] == 1
    wake(rank)
    assert {**rank.contents(), "kv_cache": before["kv_cache"]} == before


def test_an_abort_leaves_awake_what_no_commit_has_released(rank):
    before = rank.contents()
    begun(rank)
    rank.manager.commit_sleep([Tag.CUDA_GRAPH])
    rank.manager.abort_sleep()
    assert states(rank) == {Tag.KV_CACHE: RESIDENT, Tag.WEIGHTS: RESIDENT, Tag.CUDA_GRAPH: PRESERVED}
    assert copies(rank) == (3, 3)
    sleep(rank)
    wake(rank)
    assert {**rank.contents(), "kv_cache": before["kv_cache"]} == before


def test_a_commit_of_some_tags_that_fails_ends_the_preparation_of_all(rank):
    before = rank.contents()
    begun(rank)
    rank.device.fail("end_copy_to_host")
    with pytest.raises(EngineFaultError):
        rank.manager.commit_sleep([Tag.CUDA_GRAPH])
    assert set(states(rank).values()) == {RESIDENT} and rank.manager.prepared_tags == []
    assert copies(rank) == (3, 3) and rank.contents() == before
    sleep(rank)
    wake(rank)
    assert {**rank.contents(), "kv_cache": before["kv_cache"]} == before


def test_a_commit_of_some_tags_before_their_copies_began_waits_for_the_device(rank):
    rank.manager.prepare_sleep(Level.PRESERVE, PUBLIC_TAGS)
    calls = Counter(rank.device.calls)
    rank.manager.commit_sleep([Tag.CUDA_GRAPH])
    assert (Counter(rank.device.calls) - calls)["synchronize"] == 1 and copies(rank) == (1, 1)
    rank.manager.commit_sleep()
    assert copies(rank) == (3, 3)


def test_the_seconds_are_those_of_one_commit(rank):
    begun(rank)
    rank.manager.commit_sleep([Tag.CUDA_GRAPH])
    assert rank.manager.seconds().keys() == {"synchronize", "backup", "release"}
    first = rank.manager.seconds()["backup"]
    rank.manager._seconds["backup"] += 100
    rank.manager.commit_sleep()
    assert first < 100 and rank.manager.seconds()["backup"] < 100


def test_only_a_prepared_sleep_begins(rank):
    with pytest.raises(StateConflictError, match="no sleep is prepared"):
        rank.manager.begin_sleep()
