from __future__ import annotations

import pytest

from rl_memory_plugins import admission
from rl_memory_plugins.records import UNKNOWN, EngineStatus, RankStatus, TagStatus
from rl_memory_plugins.tags import PUBLIC_TAGS, Content, TagState


def rank(content: Content = Content.VALID, **states: TagState) -> RankStatus:
    return RankStatus(
        rank=0,
        device="fake:0",
        allocator="fake",
        tags={tag.value: TagStatus(states.get(tag.value, TagState.RESIDENT), 1) for tag in PUBLIC_TAGS},
        content=content,
        content_epoch=0,
        device_free_bytes=0,
        device_total_bytes=0,
        host_arena_bytes=0,
    )


def engine(*ranks: RankStatus, **fields) -> EngineStatus:
    return EngineStatus(ranks=[rank(), *ranks], **fields)


REFUSED = {
    "weights asleep": (engine(rank(weights=TagState.PRESERVED)), "asleep"),
    "kv cache asleep": (engine(rank(kv_cache=TagState.DISCARDED)), "asleep"),
    "graph asleep": (engine(rank(cuda_graph=TagState.PRESERVED)), "asleep"),
    "sleep under way": (engine(busy="sleep"), "asleep"),
    "wake under way": (engine(busy="wake_up"), "asleep"),
    "update under way": (engine(busy="update_weights"), "updating"),
    "stale": (engine(rank(Content.STALE)), "stale"),
    "updating": (engine(rank(Content.UPDATING)), "updating"),
    "failed": (engine(rank(Content.FAILED)), "failed"),
    "paused": (engine(paused=True), "paused"),
    "the worst rank counts": (engine(rank(Content.FAILED), rank(Content.STALE)), "failed"),
}


@pytest.mark.parametrize(("status", "reason"), REFUSED.values(), ids=REFUSED)
def test_refused_with_a_reason(status, reason):
    error = admission.refusal(status)
    assert error is not None
    assert error.status == 503
    assert error.details["reason"] == reason
    assert error.details["retry_after_s"] > 0
    assert admission.first_refusal([engine(), status]).details == error.details


def test_ranks_that_did_not_say_how_they_are_are_not_waited_for():
    error = admission.refusal(engine(busy=UNKNOWN))
    assert error is not None
    assert error.details["reason"] == "asleep"
    assert "under way" not in error.message and "wake_up()" in error.message


def test_admitted_only_when_nothing_is_amiss():
    assert admission.refusal(engine()) is None
    assert admission.first_refusal([engine(), engine()]) is None


@pytest.mark.parametrize("status, reason", REFUSED.values(), ids=REFUSED)
def test_a_request_that_the_engine_s_own_pause_holds_back_may_wait_for_an_update(status, reason):
    held = admission.first_refusal([status], held=True)
    assert (held is None) == (reason == "updating")
    assert admission.first_refusal([status]).details["reason"] == reason


def test_a_held_request_is_refused_by_the_other_engine():
    engines = [engine(busy="update_weights"), engine(rank(Content.FAILED))]
    assert admission.first_refusal(engines, held=True).details["reason"] == "failed"


def test_is_sleeping_means_released_or_paused():
    assert not admission.is_sleeping([engine(), engine(rank(Content.FAILED)), engine(busy="sleep")])
    assert admission.is_sleeping([engine(), engine(paused=True)])
    assert admission.is_sleeping([engine(rank(kv_cache=TagState.DISCARDED))])


def test_asleep_tags_are_named_once():
    status = engine(rank(weights=TagState.PRESERVED), rank(weights=TagState.PRESERVED, kv_cache=TagState.DISCARDED))
    assert admission.refusal(status).details["tags"] == ["kv_cache", "weights"]
