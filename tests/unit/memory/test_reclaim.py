"""What a sleep leaves for later, in a thread: a wake gives it up or waits for it, and its failure costs nothing."""

from __future__ import annotations

import threading

import pytest
from helpers import FakeRank, sleep, wake

from rl_memory_plugins.errors import EngineFaultError, RLMemoryError
from rl_memory_plugins.memory import reclaim
from rl_memory_plugins.tags import PUBLIC_TAGS, Level, Tag

TIMEOUT_S = 60  # of what would else hang


@pytest.fixture
def rank() -> FakeRank:
    wait_for_reclaim()  # of other tests
    return FakeRank()


def reclaims():
    return [thread for thread in threading.enumerate() if thread.name == "rl-memory-reclaim"]


def wait_for_reclaim():
    for thread in reclaims():
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()


def test_it_follows_a_sleep(rank, monkeypatch):
    monkeypatch.setattr(reclaim, "DELAY_S", 0)
    sleep(rank)
    wait_for_reclaim()
    assert rank.device.calls["reclaim"] == 1
    assert rank.device.calls["trim"] == 2  # the sleep itself, if that is worth its time


def test_the_cache_of_a_trainer_in_this_process_is_left_alone(rank, monkeypatch):
    """A trainer that allocates while the engine sleeps may be in the middle of anything."""
    monkeypatch.setattr(reclaim, "DELAY_S", 2.0)
    sleep(rank)
    rank.device.allocated += 1
    wait_for_reclaim()
    assert rank.device.calls["trim"] == 1  # the sleep's own
    assert rank.device.calls["reclaim"] == 1


def test_a_wake_gives_it_up(rank, monkeypatch):
    monkeypatch.setattr(reclaim, "DELAY_S", TIMEOUT_S)
    before = rank.contents()
    sleep(rank)
    assert reclaims()
    wake(rank)
    assert not reclaims()
    assert rank.device.calls["reclaim"] == 0
    assert rank.contents()["parameter"] == before["parameter"]


def test_a_second_sleep_takes_its_place(rank, monkeypatch):
    monkeypatch.setattr(reclaim, "DELAY_S", TIMEOUT_S)
    for tag in PUBLIC_TAGS:
        sleep(rank, tags=[tag])
        assert len(reclaims()) == 1
    wake(rank)


def test_a_sleep_that_releases_nothing_has_none(rank):
    sleep(rank)
    wait_for_reclaim()
    sleep(rank)
    assert not reclaims()


def test_a_wake_waits_for_one_that_has_begun(rank, monkeypatch):
    began, go_on = threading.Event(), threading.Event()

    def reclaim_slowly():
        began.set()
        assert go_on.wait(TIMEOUT_S)

    monkeypatch.setattr(reclaim, "DELAY_S", 0)
    monkeypatch.setattr(rank.allocator, "reclaim", reclaim_slowly)
    sleep(rank)
    assert began.wait(TIMEOUT_S)
    waking = threading.Thread(target=wake, args=(rank,))
    waking.start()
    waking.join(0.1)
    assert waking.is_alive()
    assert rank.device.calls["reserve"] == 0
    go_on.set()
    waking.join(TIMEOUT_S)
    assert rank.device.calls["reserve"] == len(PUBLIC_TAGS)


@pytest.mark.parametrize("operation", ["trim", "reclaim"])
def test_a_failure_costs_nothing(rank, monkeypatch, caplog, operation):
    monkeypatch.setattr(reclaim, "DELAY_S", 0)
    before = rank.contents()
    rank.device.fail(operation, nth=2 if operation == "trim" else 1, error=EngineFaultError("no"))
    sleep(rank)
    wait_for_reclaim()
    assert "not reclaimed early" in caplog.text
    wake(rank)
    assert rank.contents()["parameter"] == before["parameter"]


def asleep_again(rank):
    sleep(rank)


def paused(rank):
    sleep(rank, Level.PAUSE)


def no_memory(rank):
    rank.device.fail("reserve")
    with pytest.raises(RLMemoryError):
        wake(rank)


def not_agreed(rank):
    rank.manager.prepare_wake(PUBLIC_TAGS)
    rank.manager.abort_wake()


def half_awake(rank):
    wake(rank, [Tag.WEIGHTS])


@pytest.mark.parametrize("then", [asleep_again, paused, no_memory, not_agreed, half_awake])
def test_what_was_given_up_is_done_later(rank, then):
    sleep(rank)
    then(rank)
    wait_for_reclaim()
    assert rank.device.calls["reclaim"] == 1


def test_a_sleep_that_broke_off_has_one(rank):
    rank.device.fail("release", nth=2)
    with pytest.raises(RLMemoryError):
        sleep(rank)
    wait_for_reclaim()
    assert rank.device.calls["reclaim"] == 1


def test_a_thread_that_cannot_be_had_costs_nothing(rank, monkeypatch, caplog):
    def refuse(timer):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Timer, "start", refuse)
    sleep(rank)
    assert "not reclaimed early" in caplog.text
    wake(rank)
