from __future__ import annotations

import pytest
from helpers import FakeRank, LocalRanks

from rl_memory_plugins.coordination import call_or_undo, commit, prepare
from rl_memory_plugins.errors import DeviceMemoryError, EngineFaultError, HostMemoryError, WeightUpdateError
from rl_memory_plugins.records import Reply
from rl_memory_plugins.tags import Content, Tag

ALL = ["kv_cache", "weights", "cuda_graph"]


def two_phase(ranks, operation, **arguments):
    prepare(ranks, operation, **arguments)
    return commit(ranks, operation)


class NotingRanks:
    """Notes calls; answers a method with the errors it is given, by rank."""

    def __init__(self, **errors):
        self.errors = errors
        self.calls = []

    def call(self, method, **arguments):
        self.calls.append((method, arguments))
        failing = self.errors.get(method, {})
        return [Reply(rank=rank, error=failing[rank].to_record() if rank in failing else None) for rank in range(3)]


def test_all_prepare_before_any_commits():
    ranks = NotingRanks()
    assert [reply.rank for reply in two_phase(ranks, "wake", tags=ALL)] == [0, 1, 2]
    assert ranks.calls == [("prepare_wake", {"tags": ALL}), ("commit_wake", {})]


def test_one_that_cannot_makes_all_undo():
    error = DeviceMemoryError("no", needed_bytes=7)
    ranks = NotingRanks(prepare_wake={1: error, 2: error})
    with pytest.raises(DeviceMemoryError) as caught:
        two_phase(ranks, "wake", tags=ALL)
    assert [method for method, _ in ranks.calls] == ["prepare_wake", "abort_wake"]
    assert caught.value.details == {"needed_bytes": 7, "rank": 1, "failed_ranks": [1, 2]}


def test_a_failing_commit_is_reported_and_not_aborted():
    ranks = NotingRanks(commit_sleep={2: EngineFaultError("x")})
    with pytest.raises(EngineFaultError) as caught:
        two_phase(ranks, "sleep", level=1, tags=ALL)
    assert [method for method, _ in ranks.calls] == ["prepare_sleep", "commit_sleep"]
    assert caught.value.details["failed_ranks"] == [2]


@pytest.fixture
def ranks() -> list[FakeRank]:
    return [FakeRank(0), FakeRank(1)]


def test_out_of_memory_on_one_rank_leaves_both_asleep_and_a_retry_works(ranks):
    group = LocalRanks([rank.agent for rank in ranks])
    before = [rank.contents() for rank in ranks]
    two_phase(group, "sleep", level=1, tags=ALL)
    capacity, ranks[1].device.capacity = ranks[1].device.capacity, 100
    with pytest.raises(DeviceMemoryError) as caught:
        two_phase(group, "wake", tags=ALL)
    assert caught.value.details["failed_ranks"] == [1]
    assert caught.value.details["needed_bytes"] > caught.value.details["free_bytes"]
    assert [rank.device.used for rank in ranks] == [0, 0]
    ranks[1].device.capacity = capacity
    two_phase(group, "wake", tags=ALL)
    after = [{**rank.contents(), "kv_cache": old["kv_cache"]} for rank, old in zip(ranks, before, strict=True)]
    assert after == before


def test_no_host_memory_on_one_rank_leaves_both_resident():
    ranks = [FakeRank(0), FakeRank(1, arena_bytes=100)]
    used = [rank.device.used for rank in ranks]
    with pytest.raises(HostMemoryError) as caught:
        two_phase(LocalRanks([rank.agent for rank in ranks]), "sleep", level=1, tags=ALL)
    assert caught.value.details["rank"] == 1
    assert [rank.device.used for rank in ranks] == used


def test_agents_answer_every_call_with_a_record(ranks):
    agent = ranks[0].agent
    assert agent.reply(b"not msgpack").error["error"] == "EngineFaultError"
    group = LocalRanks([agent])
    for method, arguments in (
        ("no_such_method", {}),
        ("prepare_sleep", {"level": 9, "tags": ALL}),
        ("prepare_sleep", {}),
        ("prepare_wake", {"tags": ["nonsense"]}),
        ("__init__", {}),
    ):
        assert group.call(method, **arguments)[0].error["error"] == "EngineFaultError"
    assert group.call("commit_wake")[0].error["error"] == "StateConflictError"
    two_phase(group, "sleep", level=1, tags=ALL)
    reply = group.call("receive_weights", endpoints={}, token="", timeout_s=1.0)[0]
    assert reply.error["error"] == "StateConflictError"


def test_replies_carry_changes_seconds_and_status(ranks):
    group = LocalRanks([rank.agent for rank in ranks])
    result = two_phase(group, "sleep", level=1, tags=["weights"])[1].result
    assert result["changes"][0] == {
        "rank": 1,
        "tag": "weights",
        "state": "preserved",
        "bytes_released": 8292,
        "bytes_restored": 0,
        "bytes_copied": 8292,
    }
    assert result["seconds"]["release"] >= 0
    assert group.call("status")[0].result["tags"]["weights"]["state"] == "preserved"


def test_the_engines_own_work_runs_after_wakes_and_before_updates():
    rank, done = FakeRank(), []
    agent = rank.agent
    agent._after_wake, agent._before_update = done.append, lambda: done.append("update")
    group = LocalRanks([agent])
    two_phase(group, "sleep", level=2, tags=ALL)
    group.call("receive_weights", endpoints={}, token="", timeout_s=1.0)  # refused
    two_phase(group, "wake", tags=["weights"])
    assert done == [[Tag.WEIGHTS]]
    group.call("receive_weights", endpoints={}, token="", timeout_s=1.0)
    group.call("finish_update", complete=True)
    assert done[1:] == ["update"]
    assert rank.manager.content is Content.VALID


def test_the_engines_own_work_is_tried_again_by_the_next_wake():
    """It is what makes the engine use its memory again, so it must not be forgotten after a failure."""
    rank, done = FakeRank(), []

    def fail_once(tags):
        done.append(tags)
        if len(done) == 1:
            raise RuntimeError("not yet")

    rank.agent._after_wake = fail_once
    group = LocalRanks([rank.agent])
    two_phase(group, "sleep", level=1, tags=["kv_cache"])
    with pytest.raises(EngineFaultError):
        two_phase(group, "wake", tags=["kv_cache"])
    two_phase(group, "wake", tags=["kv_cache"])
    two_phase(group, "wake", tags=["kv_cache"])
    assert done == [[Tag.KV_CACHE], [Tag.KV_CACHE], []]


def test_a_rank_that_cannot_reach_the_trainer_is_named_before_those_that_saw_it_give_up():
    gone = WeightUpdateError("the trainer has closed the connection", reason="disconnected")
    elsewhere = WeightUpdateError("cannot connect", reason="unreachable")
    ranks = NotingRanks(receive_weights={0: gone, 1: elsewhere})
    with pytest.raises(WeightUpdateError, match="cannot connect") as caught:
        call_or_undo(ranks, "receive_weights", lambda: None)
    assert (caught.value.details["rank"], caught.value.details["failed_ranks"]) == (1, [0, 1])


@pytest.mark.parametrize("detail", ["\udcff", 1 << 70, {"\udcff": 1}], ids=["text", "number", "key"])
def test_a_failure_that_cannot_be_encoded_still_answers(detail):
    """The name of a file need not be valid text. A rank that raised would break the engine's RPC."""
    rank = FakeRank(0)

    def fail(**_):
        raise DeviceMemoryError("no memory for \udcff", path=detail)

    rank.agent._methods["prepare_sleep"] = fail
    (reply,) = LocalRanks([rank.agent]).call("prepare_sleep")
    assert reply.error == {"error": "DeviceMemoryError", "message": "no memory for ?", "details": {}}
    rank.agent._methods["prepare_sleep"] = lambda **_: detail
    (reply,) = LocalRanks([rank.agent]).call("prepare_sleep")
    assert reply.error["error"] == "EngineFaultError"
