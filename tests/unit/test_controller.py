"""The controller over ranks in this process: order, replies, and what is left after errors."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import msgspec
import pytest
from helpers import FakeRank, LocalRanks

from rl_memory_plugins import admission, commands, operations
from rl_memory_plugins.board import BoardReader, StatusBoard
from rl_memory_plugins.capabilities import EVERYTHING, Capabilities
from rl_memory_plugins.commands import decode_reply, encode_command
from rl_memory_plugins.controller import Controller
from rl_memory_plugins.errors import (
    DrainTimeoutError,
    EngineFaultError,
    HostMemoryError,
    InvalidRequestError,
    StateConflictError,
    UnsupportedError,
    WeightUpdateError,
    from_record,
)
from rl_memory_plugins.records import Report, StepTime
from rl_memory_plugins.tags import PUBLIC_TAGS, Content, PauseMode
from rl_memory_plugins.transition import STEPS


class Engine:
    """Records what the controller asks for; drains when the test says so."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.hold_drain = False
        self.later: list[Any] = []
        self.drains: list[Future[None]] = []
        self.for_update: list[bool] = []
        self.used_adapters: set[int] = set()
        self.idle_for = 60.0

    def drain(self, mode: PauseMode, *, for_update: bool = False) -> Future[None]:
        self.calls.append(f"drain:{mode}")
        self.for_update.append(for_update)
        done: Future[None] = Future()
        if not self.hold_drain:
            done.set_result(None)
        self.drains.append(done)
        return done

    def resume(self, *, lift_pause: bool) -> None:
        self.calls.append("resume")

    def is_idle(self, seconds: float) -> bool:
        return seconds <= self.idle_for

    def has_requests(self) -> bool:
        return True

    def reset_caches(self, *, frozen: bool = False, released: bool = False) -> None:
        self.calls.append("reset_caches:frozen" if frozen else "reset_caches")

    def adapters_in_use(self) -> set[int]:
        return self.used_adapters

    def call_after_reply(self, act: Any) -> None:
        self.later.append(act)

    def show(self, asleep_tags: list[str], weight_version: str) -> None:
        self.shown = (asleep_tags, weight_version)


class World:
    def __init__(self, *declared: Capabilities, keep: Sequence[str] = (), engine: Capabilities = EVERYTHING) -> None:
        self.ranks = [FakeRank(0), FakeRank(1)]
        for rank, capabilities in zip(self.ranks, declared, strict=False):
            rank.receiver.declared = capabilities
        self.engine = Engine()
        self.board = StatusBoard()
        ranks = LocalRanks([rank.agent for rank in self.ranks])
        self.controller = Controller(
            ranks, self.engine, self.board, update_timeout_s=7.5, keep=keep, capabilities=engine
        )
        self.reader = BoardReader(self.board.path)

    def run(self, command: commands.AnyCommand) -> Any:
        reply = decode_reply(self.controller.execute(encode_command(command)).result(timeout=1))
        if reply.error is not None:
            raise from_record(reply.error)
        return reply.result


@pytest.fixture
def world():
    world = World()
    yield world
    world.board.close()


def test_a_sleep_drains_resets_and_releases(world: World) -> None:
    report = world.run(commands.Sleep(level=2))
    assert world.engine.calls == ["drain:abort", "reset_caches"]
    assert {change["rank"] for change in report["changes"]} == {0, 1}
    assert set(report["seconds"]) == set(STEPS["sleep"])
    assert world.reader.read().asleep_tags() == ["cuda_graph", "kv_cache", "weights"]
    assert world.engine.shown[0] == ["cuda_graph", "kv_cache", "weights"]


def test_a_report_tells_when_each_rank_took_each_step(world: World) -> None:
    before = time.time_ns()
    report = msgspec.convert(world.run(commands.Sleep(level=1)), Report)
    by_rank: dict[int | None, dict[str, StepTime]] = {}
    for step in report.steps:
        by_rank.setdefault(step.rank, {})[step.step] = step
    assert by_rank[None].keys() == {"drain", "total"}
    assert by_rank[0].keys() == by_rank[1].keys() == {"synchronize", "backup", "release"}
    total = by_rank[None]["total"]
    assert before <= total.start_ns and total.end_ns <= time.time_ns()
    for step in report.steps:
        assert total.start_ns <= step.start_ns <= step.end_ns <= total.end_ns
    for name in ("synchronize", "backup", "release"):
        assert report.seconds[name] == max(by_rank[rank][name].seconds for rank in (0, 1))
    again = msgspec.convert(world.run(commands.Sleep(level=1)), Report)
    assert "release" not in {step.step for step in again.steps}, "what sleeps already is not released again"


def test_the_engine_resumes_only_when_all_is_resident_and_valid(world: World) -> None:
    world.run(commands.Sleep(level=1))
    world.run(commands.WakeUp(tags=["weights"]))
    assert "resume" not in world.engine.calls
    world.run(commands.WakeUp())
    assert world.engine.calls[-1] == "resume"


def test_an_idle_engine_sleeps_and_says_why(world: World) -> None:
    world.run(commands.Sleep(idle_s=60))
    assert world.reader.read().idle
    world.run(commands.WakeUp())
    assert not world.reader.read().idle
    assert world.controller.refusal() is None


def test_an_idle_engine_that_wakes_is_idle_until_it_admits_requests(world: World, monkeypatch: Any) -> None:
    """A server that meets it in between waits for it, and refuses nobody."""
    world.run(commands.Sleep(idle_s=60))
    published: list[tuple[bool, bool]] = []
    publish = world.board.publish

    def note(status: Any) -> None:
        published.append((status.idle, admission.refusal(status) is None))
        publish(status)

    monkeypatch.setattr(world.board, "publish", note)
    world.run(commands.WakeUp())
    assert published[0] == (True, False) and published[-1] == (False, True)
    assert all(idle or open for idle, open in published)


@pytest.mark.parametrize("closed", [None, commands.Sleep(level=0), commands.Sleep(level=1)])
def test_an_engine_that_is_not_idle_or_that_a_caller_has_closed_does_not_sleep(world: World, closed: Any) -> None:
    if closed is None:
        world.engine.idle_for = 59.0
    else:
        world.run(closed)
    before = msgspec.to_builtins(world.reader.read())
    with pytest.raises(StateConflictError, match="not idle"):
        world.run(commands.Sleep(idle_s=60))
    assert msgspec.to_builtins(world.reader.read()) == before


@pytest.mark.parametrize(
    "by_hand", [commands.Sleep(level=2), commands.Sleep(level=0), commands.WakeUp(tags=["weights"])]
)
def test_a_caller_takes_an_idle_engine_over(world: World, by_hand: Any) -> None:
    world.run(commands.Sleep(idle_s=60))
    world.run(by_hand)
    assert world.reader.read().asleep_tags()
    assert not world.reader.read().idle


@pytest.mark.parametrize("where", ["drain", "prepare"])
def test_an_idle_sleep_that_fails_leaves_no_trace(world: World, monkeypatch: Any, where: str) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise HostMemoryError("full")

    if where == "drain":
        monkeypatch.setattr(world.engine, "drain", fail)
    else:
        monkeypatch.setattr(world.ranks[1].agent.manager, "prepare_sleep", fail)
    with pytest.raises(HostMemoryError):
        world.run(commands.Sleep(idle_s=60))
    assert world.controller.refusal() is None
    assert not world.controller.status.idle


def test_stale_weights_keep_the_engine_closed(world: World) -> None:
    world.run(commands.Sleep(level=2))
    world.run(commands.WakeUp())
    assert "resume" not in world.engine.calls
    assert world.controller.refusal().details["reason"] == "stale"


def test_the_board_shows_the_state_before_the_reply_is_sent(world: World) -> None:
    seen = []
    reply = world.controller.execute(encode_command(commands.Sleep(level=1)))
    reply.add_done_callback(lambda _: seen.append(world.reader.read().busy))
    assert seen == [""]


def test_what_is_left_on_the_devices_is_shown_after_the_reply(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in world.ranks:
        monkeypatch.setattr(rank.allocator, "residual_memory", lambda: {"context": 5})
    world.run(commands.Sleep(level=1))
    assert [rank.left for rank in world.reader.read().ranks] == [{}, {}]
    world.engine.later.pop()()
    assert [rank.left for rank in world.reader.read().ranks] == [{"context": 5}] * 2
    world.run(commands.WakeUp())
    assert world.engine.later == []
    assert [rank.left for rank in world.reader.read().ranks] == [{}, {}]


def test_what_is_left_may_stay_unknown(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> dict[str, int]:
        raise RuntimeError("no account")

    monkeypatch.setattr(world.ranks[1].allocator, "residual_memory", fail)
    world.run(commands.Sleep(level=1))
    world.engine.later.pop()()
    world.run(commands.WakeUp())
    assert world.controller.refusal() is None


def test_admission_is_closed_before_the_drain_ends_requests(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    drain, shown = world.engine.drain, []

    def looked_at(mode: PauseMode, **options: bool) -> Future[None]:
        shown.append(world.reader.read().busy)
        return drain(mode, **options)

    monkeypatch.setattr(world.engine, "drain", looked_at)
    world.run(commands.Sleep(level=1))
    assert shown == ["sleep"]


def test_a_drain_that_cannot_begin_is_an_error_and_leaves_it_open(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(mode: PauseMode, **options: bool) -> Future[None]:
        raise UnsupportedError("this engine cannot wait")

    monkeypatch.setattr(world.engine, "drain", refuse)
    with pytest.raises(UnsupportedError):
        world.run(commands.Sleep(mode="wait"))
    assert world.controller.refusal() is None
    assert world.reader.read().busy == ""


def test_admission_is_closed_while_a_sleep_waits(world: World) -> None:
    world.engine.hold_drain = True
    reply = world.controller.execute(encode_command(commands.Sleep(mode="wait")))
    assert not reply.done()
    assert world.controller.refusal().details["reason"] == "asleep"
    with pytest.raises(StateConflictError):
        world.run(commands.WakeUp())
    world.engine.drains[0].set_result(None)
    assert reply.done()


@pytest.mark.parametrize("waits", [commands.Sleep(mode="wait"), commands.Drain("sleep", "of a peer")])
@pytest.mark.parametrize(
    "comes",
    [
        commands.Sleep(mode="keep"),
        commands.Sleep(level=0, mode="freeze"),
        commands.UpdateWeights({"*": "/x"}, "token"),
        commands.UpdateWeights({"*": "/x"}, "token", mode="freeze"),
    ],
)
def test_nothing_stops_the_requests_that_a_sleep_waits_for(
    world: World, waits: commands.AnyCommand, comes: commands.AnyCommand
) -> None:
    world.engine.hold_drain = isinstance(waits, commands.Sleep)
    reply = world.controller.execute(encode_command(waits))
    drains = list(world.engine.calls)
    with pytest.raises(StateConflictError, match="still waits"):
        world.run(comes)
    assert world.engine.calls == drains
    if not reply.done():
        world.engine.drains[0].set_result(None)
    assert decode_reply(reply.result(timeout=1)).error is None


def test_what_an_update_has_waited_for_does_not_hold_it_up(world: World) -> None:
    world.run(commands.Drain("update_weights", "mine"))
    assert world.run(commands.UpdateWeights({"*": "/x"}, "token", hold="mine")) == {"held": True}


def test_an_abort_overtakes_a_wait(world: World) -> None:
    world.engine.hold_drain = True
    waiting = world.controller.execute(encode_command(commands.Sleep(mode="wait")))
    aborting = world.controller.execute(encode_command(commands.Sleep(mode="abort")))
    for drain in world.engine.drains:
        drain.set_result(None)
    assert decode_reply(waiting.result()).error is None
    assert decode_reply(aborting.result()).result["changes"] == []
    assert world.reader.read().busy == ""


def test_a_cancelled_drain_reopens(world: World) -> None:
    world.engine.hold_drain = True
    waiting = world.controller.execute(encode_command(commands.Sleep(mode="wait")))
    assert world.run(commands.CancelDrain()) == {"cancelled": ["sleep"]}
    assert decode_reply(waiting.result()).error["error"] == DrainTimeoutError.__name__
    assert world.engine.calls[-1] == "resume"
    world.engine.drains[0].set_result(None)  # the engine becomes idle later; nothing happens any more
    assert world.controller.refusal() is None


def test_a_drain_that_fails_is_an_error_and_reopens(world: World) -> None:
    world.engine.hold_drain = True
    reply = world.controller.execute(encode_command(commands.Sleep()))
    world.engine.drains[0].set_exception(RuntimeError("the scheduler broke"))
    assert decode_reply(reply.result()).error["error"] == EngineFaultError.__name__
    assert world.engine.calls[-1] == "resume"


def test_level_0_pauses_until_all_is_awake(world: World) -> None:
    world.run(commands.Sleep(level=0))
    assert world.reader.read().paused
    assert world.controller.refusal().details["reason"] == "paused"
    world.run(commands.Sleep(level=1, tags=["kv_cache"]))
    world.run(commands.WakeUp(tags=["weights"]))
    assert world.reader.read().paused
    world.run(commands.WakeUp(tags=["kv_cache"]))
    assert not world.reader.read().paused


def test_held_operations_wait_for_a_decision(world: World) -> None:
    assert world.run(commands.Sleep(level=1, hold="ticket")) == {"held": True}
    assert world.reader.read().asleep_tags() == []
    assert world.controller.refusal() is not None
    with pytest.raises(StateConflictError):
        world.run(commands.WakeUp())
    assert world.run(commands.Decide("ticket", commit=True))["changes"]
    assert world.reader.read().asleep_tags() == ["cuda_graph", "kv_cache", "weights"]


def test_a_held_operation_that_is_not_agreed_on_is_undone(world: World) -> None:
    world.run(commands.Sleep(level=1, hold="ticket"))
    world.run(commands.Decide("ticket", commit=False))
    assert world.reader.read().asleep_tags() == []
    assert world.controller.refusal() is None
    with pytest.raises(StateConflictError):
        world.run(commands.Decide("ticket", commit=True))


def test_a_decision_of_another_caller_leaves_what_is_held(world: World) -> None:
    """A caller that this engine refused still tells all engines to undo."""
    world.run(commands.Sleep(level=1, hold="ticket"))
    with pytest.raises(StateConflictError):
        world.run(commands.Sleep(level=1, hold="other"))
    with pytest.raises(StateConflictError):
        world.run(commands.Decide("other", commit=False))
    assert world.run(commands.Decide("ticket", commit=True))["changes"]


def drained(world: World, ticket: str) -> None:
    """Have the engine wait for its requests, and let them end."""
    world.engine.hold_drain = True
    reply = world.controller.execute(encode_command(commands.Drain("sleep", ticket)))
    assert not reply.done()
    assert world.controller.refusal() is not None
    world.engine.drains[-1].set_result(None)
    assert decode_reply(reply.result(timeout=1)).error is None
    world.engine.hold_drain = False


def test_a_drained_engine_stays_closed_until_its_peers_have_drained_too(world: World) -> None:
    drained(world, "ticket")
    assert world.controller.refusal() is not None
    assert world.reader.read().busy == "sleep"
    assert "resume" not in world.engine.calls
    with pytest.raises(StateConflictError, match="waits for running requests"):
        world.run(commands.WakeUp())
    assert world.reader.read().asleep_tags() == []
    world.run(commands.Sleep(hold="ticket"))
    world.run(commands.Decide("ticket", commit=True))
    world.run(commands.WakeUp())
    assert world.controller.refusal() is None


def test_a_drain_that_another_operation_overtakes_ends_all_the_same(world: World) -> None:
    world.engine.hold_drain = True
    waiting = world.controller.execute(encode_command(commands.Drain("sleep", "waits")))
    aborting = world.controller.execute(encode_command(commands.Sleep(hold="aborts")))
    world.engine.drains[1].set_result(None)
    assert decode_reply(aborting.result(timeout=1)).result == {"held": True}
    world.engine.drains[0].set_result(None)
    assert decode_reply(waiting.result(timeout=1)).error is None
    world.engine.hold_drain = False
    world.run(commands.Decide("aborts", commit=True))
    assert world.run(commands.Sleep(hold="waits")) == {"held": True}
    world.run(commands.Decide("waits", commit=True))
    world.run(commands.WakeUp())
    assert world.controller.refusal() is None


def test_a_drained_engine_opens_if_its_peers_do_not_drain(world: World) -> None:
    drained(world, "ticket")
    drained(world, "other")
    with pytest.raises(StateConflictError):
        world.run(commands.Decide("ticket", commit=True))
    world.run(commands.Decide("ticket", commit=False))
    assert world.controller.refusal() is not None, "another waits still"
    world.run(commands.CancelDrain())
    assert world.controller.refusal() is not None, "what has drained is not given up with what has not"
    world.run(commands.Decide("other", commit=False))
    assert world.controller.refusal() is None


def test_an_update_of_sleeping_weights_is_refused_before_anything_happens(world: World) -> None:
    world.run(commands.Sleep(level=2))
    calls = list(world.engine.calls)
    with pytest.raises(StateConflictError):
        world.run(commands.UpdateWeights(endpoints={"*": "/x"}, token="t"))
    assert world.engine.calls == calls


def update(mode: str) -> commands.UpdateWeights:
    return commands.UpdateWeights({"*": "/x"}, "token", mode=PauseMode(mode))


def test_a_frozen_update_leaves_running_requests_their_kv_cache(world: World) -> None:
    world.run(update("freeze"))
    assert world.engine.calls == ["drain:freeze", "reset_caches:frozen", "resume"]


def test_a_frozen_sleep_of_the_weights_touches_no_cache(world: World) -> None:
    world.run(commands.Sleep(level=2, tags=["weights"], mode="freeze"))
    assert world.engine.calls == ["drain:freeze"]
    world.run(commands.WakeUp())
    assert world.engine.calls == ["drain:freeze"], "stale weights must not go on"


def test_frozen_requests_stand_still_after_a_failed_update(world: World) -> None:
    whole = world.ranks[1].receiver.script

    def break_off(manager: Any) -> None:
        whole(manager)
        raise WeightUpdateError("the trainer is gone")

    world.ranks[1].receiver.script = break_off
    with pytest.raises(WeightUpdateError):
        world.run(update("freeze"))
    assert world.engine.calls == ["drain:freeze"]
    assert world.controller.refusal().details["reason"] == "failed"
    world.ranks[1].receiver.script = whole
    world.run(update("freeze"))
    assert world.engine.calls[1:] == ["drain:freeze", "reset_caches:frozen", "resume"]


def test_an_update_cannot_freeze_while_the_kv_cache_sleeps(world: World) -> None:
    world.run(commands.Sleep(level=1, tags=["kv_cache"]))
    calls = list(world.engine.calls)
    with pytest.raises(StateConflictError, match="use mode='keep'") as caught:
        world.run(update("freeze"))
    assert caught.value.details == {"asleep": ["kv_cache"]}
    assert world.engine.calls == calls
    world.run(update("keep"))


def test_only_an_update_may_begin_beside_the_last_step(world: World) -> None:
    world.run(update("freeze"))
    world.run(commands.Sleep(level=0, mode=PauseMode.FREEZE))
    assert world.engine.for_update == [True, False]


def test_an_engine_that_cannot_freeze_says_why_before_anything_happens() -> None:
    modes = (PauseMode.ABORT, PauseMode.KEEP)
    world = World(engine=Capabilities(no_freeze="its tree keeps prefixes", modes=modes))
    try:
        for command in (update("freeze"), commands.Sleep(level=0, mode=PauseMode.FREEZE)):
            with pytest.raises(UnsupportedError, match="its tree keeps prefixes") as caught:
                world.run(command)
            assert caught.value.details == {"modes": ["abort", "keep"]}
        assert world.engine.calls == []
        world.run(update("keep"))
    finally:
        world.board.close()


@pytest.mark.parametrize(("named", "used"), [(None, 7.5), (2.0, 2.0)])
def test_the_option_decides_how_long_a_trainer_may_be_silent_unless_the_update_does(
    world: World, monkeypatch: pytest.MonkeyPatch, named: float | None, used: float
) -> None:
    given = []
    for rank in world.ranks:

        def receive(endpoints: Any, token: str, timeout_s: float, manager: Any = rank.manager) -> dict[str, Any]:
            given.append(timeout_s)
            manager.begin_writing()
            return {"bytes": 0, "seconds": {}}

        monkeypatch.setattr(rank.receiver, "receive", receive)
    world.run(commands.UpdateWeights(endpoints={"*": "/x"}, token="t", timeout_s=named))
    assert given == [used, used]


def test_an_update_for_other_weights_is_refused_before_anything_happens(world: World) -> None:
    update = commands.UpdateWeights({"*": "/x"}, "t", weight_version="2", base_version="1")
    with pytest.raises(StateConflictError, match="complete update") as refused:
        world.run(update)
    assert refused.value.details == {"base_version": "1", "weight_version": "default"}
    assert world.engine.calls == [] and world.ranks[0].manager.content is Content.VALID
    world.run(commands.UpdateWeights({"*": "/x"}, "t", weight_version="1", base_version="default"))
    world.run(update)
    assert world.controller.status.weight_version == "2"


def test_noise_is_answered(world: World) -> None:
    reply = decode_reply(world.controller.execute(b"\xc1noise").result())
    assert reply.error["error"] == InvalidRequestError.__name__


def test_new_weights_never_answer_from_an_old_cache(world: World) -> None:
    def refuse(*, frozen: bool = False) -> None:
        raise RuntimeError("the cache is in use")

    world.engine.reset_caches = refuse  # type: ignore[method-assign]
    with pytest.raises(EngineFaultError, match="the cache is in use"):
        world.run(commands.UpdateWeights({"*": "socket"}, "token"))
    assert world.controller.refusal() is not None
    assert {rank.manager.content for rank in world.ranks} == {Content.FAILED}
    assert world.reader.read().weight_version == "default"


def test_a_drain_that_cannot_be_reopened_is_answered(world: World) -> None:
    def refuse(*, lift_pause: bool) -> None:
        raise RuntimeError("not now")

    world.engine.hold_drain = True
    world.engine.resume = refuse  # type: ignore[method-assign]
    waiting = world.controller.execute(encode_command(commands.Sleep(mode="wait")))
    world.run(commands.CancelDrain())
    error = decode_reply(waiting.result(timeout=1)).error
    assert error is not None and "not now" in error["message"]


def test_a_cancelled_drain_opens_nothing_over_what_is_held(world: World) -> None:
    world.engine.hold_drain = True
    waiting = world.controller.execute(encode_command(commands.Sleep(mode="wait")))
    held = world.controller.execute(encode_command(commands.Sleep(hold="ticket")))
    world.engine.drains[1].set_result(None)
    assert decode_reply(held.result(timeout=1)).result == {"held": True}
    world.run(commands.CancelDrain())
    assert waiting.done()
    assert world.reader.read().busy == "sleep"
    assert "resume" not in world.engine.calls
    world.run(commands.Decide("ticket", commit=True))
    assert world.controller.status.asleep_tags()


def test_an_engine_with_peers_resumes_with_them(world: World) -> None:
    """vLLM's engines of one mixture-of-experts model resume in a collective: one that did it alone would wait."""
    world.ranks[1].device.fail("synchronize", error=HostMemoryError("full"))
    with pytest.raises(HostMemoryError):
        world.run(commands.Sleep(hold="ticket"))
    drained(world, "other")
    world.run(commands.Decide("other", commit=False))
    world.engine.hold_drain = True
    waiting = world.controller.execute(encode_command(commands.Drain("sleep", "third")))
    world.run(commands.CancelDrain())
    assert waiting.done()
    assert world.controller.refusal() is None
    assert "resume" not in world.engine.calls
    world.run(commands.Resume(lift_pause=False))
    assert world.engine.calls[-1] == "resume"


def test_an_engine_that_waited_for_a_peer_goes_on_when_others_repaired_that_one(world: World) -> None:
    world.run(commands.Sleep(hold="ticket"))
    world.run(commands.Decide("ticket", commit=False))
    assert "resume" not in world.engine.calls
    world.controller.note_foreign_changes()
    assert world.engine.calls[-1] == "resume"


def test_a_refusal_is_answered_before_the_engine_resumes(world: World) -> None:
    """It may resume in step with engines of other clients, which wait for this answer."""
    answers: list[Future[bytes]] = []
    answered: list[bool] = []
    world.engine.hold_drain = True
    world.engine.resume = lambda *, lift_pause: answered.append(answers[0].done())  # type: ignore[method-assign]
    world.ranks[1].device.fail("synchronize", error=HostMemoryError("full"))
    answers.append(world.controller.execute(encode_command(commands.Sleep())))
    world.engine.drains[0].set_result(None)
    assert answered == [True]
    assert decode_reply(answers[0].result()).error is not None


def test_a_closed_engine_does_not_resume(world: World) -> None:
    world.run(commands.Sleep(level=1))
    world.run(commands.Resume(lift_pause=True))
    assert "resume" not in world.engine.calls


def test_what_runs_ends_where_others_leave_a_mixture_of_weights(world: World) -> None:
    world.ranks[0].manager.mark_failed()
    world.controller.note_foreign_changes()
    assert world.engine.calls == ["drain:abort"]
    assert world.controller.refusal() is not None


def failing_status(world: World, monkeypatch: pytest.MonkeyPatch, times: float) -> list[None]:
    """Have a rank's status fail so many times; one entry for each that did."""
    failed: list[None] = []
    memory_info = world.ranks[1].device.memory_info

    def fail() -> tuple[int, int]:
        if len(failed) >= times:
            return memory_info()
        failed.append(None)
        raise OSError("too many open files")

    monkeypatch.setattr(world.ranks[1].device, "memory_info", fail)
    return failed


def test_a_status_that_fails_once_is_asked_for_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = failing_status(world, monkeypatch, times=1)
    world.run(commands.Sleep(level=2))
    assert failed
    assert world.reader.read().busy == ""
    assert world.reader.read().asleep_tags() == ["cuda_graph", "kv_cache", "weights"]


@pytest.mark.parametrize("command", [commands.Sleep(level=2), commands.UpdateWeights({"*": "/x"}, "token")])
def test_an_engine_whose_status_fails_is_closed_until_the_next_command(
    world: World, monkeypatch: pytest.MonkeyPatch, command: commands.AnyCommand
) -> None:
    with monkeypatch.context() as patch:
        failing_status(world, patch, times=float("inf"))
        with pytest.raises(EngineFaultError):
            world.run(command)
        assert world.reader.read().busy == "status"  # no client refuses commands for that
        assert world.controller.refusal() is not None
        assert "resume" not in world.engine.calls
    world.run(commands.WakeUp())
    assert world.reader.read().busy == ""
    stale = isinstance(command, commands.Sleep)
    assert (world.reader.read().content is Content.STALE) is stale
    assert (world.engine.calls[-1] == "resume") is not stale


def test_others_changes_open_an_engine_whose_status_failed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        failing_status(world, patch, times=float("inf"))
        with pytest.raises(EngineFaultError):
            world.run(commands.WakeUp())
    world.controller.note_foreign_changes()
    assert world.controller.refusal() is None


def test_what_the_engine_cannot_show_is_on_the_board(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(asleep_tags: list[str], weight_version: str) -> None:
        if weight_version == "7":
            raise RuntimeError("the engine does not know this version")

    monkeypatch.setattr(world.engine, "show", fail)
    with pytest.raises(EngineFaultError):
        world.run(commands.UpdateWeights({"*": "/x"}, "token", weight_version="7"))
    assert (world.reader.read().busy, world.reader.read().weight_version) == ("", "7")


def test_an_engine_whose_own_work_after_a_wake_failed_stays_closed(world: World) -> None:
    failures = [RuntimeError("it cannot use its memory again")]

    def work(tags: list[Any]) -> None:
        if failures:
            raise failures.pop()

    world.ranks[1].agent._after_wake = work
    world.run(commands.Sleep(level=1))
    with pytest.raises(EngineFaultError):
        world.run(commands.WakeUp())
    assert world.controller.refusal().details["reason"] == "paused"
    assert "resume" not in world.engine.calls
    world.run(commands.WakeUp())
    assert world.controller.refusal() is None
    assert world.engine.calls[-1] == "resume"


def test_a_call_that_waits_too_long_gives_up_no_other(world: World) -> None:
    world.engine.hold_drain = True
    waiting = world.controller.execute(encode_command(commands.Sleep(mode="wait", call="a")))
    aborting = world.controller.execute(encode_command(commands.Sleep(mode="abort", call="b")))
    assert world.run(commands.CancelDrain("a")) == {"cancelled": ["sleep"]}
    assert decode_reply(waiting.result()).error["error"] == DrainTimeoutError.__name__
    assert "resume" not in world.engine.calls
    world.engine.drains[1].set_result(None)
    assert decode_reply(aborting.result(timeout=1)).error is None
    assert world.reader.read().asleep_tags() == ["cuda_graph", "kv_cache", "weights"]


@pytest.mark.parametrize("name", ["v" * (2 << 20), "step \ud800"])
def test_whatever_others_call_the_weights_fits_the_board(world: World, name: str) -> None:
    world.controller.note_foreign_changes(name)
    shown = world.reader.read().weight_version
    assert shown == name[:1024].replace("\ud800", "?")


FIXED = Capabilities(fixed_weights="layer 3 is packed", fixed_layers={"layers.3": "Packed"})


@pytest.fixture
def fixed_world():
    """The weights of rank 1 can never be updated."""
    world = World(Capabilities(), FIXED)
    yield world
    world.board.close()


@pytest.mark.parametrize("tags", [None, ["weights"], ["weights", "kv_cache"]])
def test_level_2_is_refused_where_no_update_could_follow(fixed_world: World, tags: list[str] | None) -> None:
    with pytest.raises(UnsupportedError, match="layer 3 is packed") as caught:
        fixed_world.run(operations.sleep(2, tags))
    assert caught.value.details["layers"] == {"layers.3": "Packed"}
    assert fixed_world.engine.calls == []
    assert fixed_world.controller.refusal() is None
    assert fixed_world.reader.read().content is Content.VALID


@pytest.mark.parametrize("sleep", [commands.Sleep(level=1), commands.Sleep(level=2, tags=["kv_cache"])])
def test_what_keeps_such_weights_is_allowed(fixed_world: World, sleep: commands.Sleep) -> None:
    fixed_world.run(sleep)
    fixed_world.run(commands.WakeUp())
    assert fixed_world.controller.refusal() is None


def test_an_engine_that_no_update_could_open_does_not_start_stale(fixed_world: World) -> None:
    fixed_world.ranks[0].manager.withhold()
    ranks = LocalRanks([rank.agent for rank in fixed_world.ranks])
    with pytest.raises(UnsupportedError, match="start_stale is refused.* layer 3 is packed"):
        Controller(ranks, fixed_world.engine, None, update_timeout_s=1.0)


def test_an_update_of_such_weights_is_refused_before_requests_are_touched(fixed_world: World) -> None:
    with pytest.raises(UnsupportedError, match="layer 3 is packed"):
        fixed_world.run(commands.UpdateWeights(endpoints={"*": "/nowhere"}, token="t"))
    assert fixed_world.engine.calls == []


def test_the_status_declares_what_the_engine_can_do(fixed_world: World) -> None:
    shown = fixed_world.reader.read().capabilities
    assert (shown.ranks, shown.fixed_weights) == (2, "layer 3 is packed")
    assert shown.modes == tuple(PauseMode)


# -- weights that stay ------------------------------------------------------------------------------------------


def kept_bytes(world: World) -> set[int]:
    """Of each rank, the bytes of the weights in host memory."""
    return {rank.manager.status().tags["weights"].host_bytes for rank in world.ranks}


def test_level_2_keeps_what_its_caller_names(world: World) -> None:
    rank = world.ranks[0]
    world.run(operations.sleep(2, keep=["*.frozen"]))
    assert kept_bytes(world) == {rank.parameter.nbytes // 2 + rank.buffer.nbytes}
    world.run(commands.WakeUp())
    assert world.controller.status.content is Content.STALE
    world.run(operations.sleep(2, keep=[]))
    assert kept_bytes(world) == {rank.buffer.nbytes}


def test_level_2_that_keeps_all_weights_opens_at_the_wake(world: World) -> None:
    world.run(operations.sleep(2, keep="model.*"))
    world.run(commands.WakeUp())
    assert world.controller.refusal() is None


@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_glob_that_matches_nothing_is_refused_before_requests_end(world: World, level: int) -> None:
    with pytest.raises(InvalidRequestError, match="model.frozen") as caught:
        world.run(operations.sleep(level, keep=["model.*", "frozen"]))
    names = ["model.frozen", "model.trained"]
    assert caught.value.details == {"field": "keep", "got": ["frozen"], "nearest": {"frozen": names}}
    assert world.engine.calls == []


def test_a_glob_may_match_on_one_rank_alone(world: World) -> None:
    """A rank of a pipeline holds only some layers."""
    del world.ranks[0].names.blocks["model.frozen"]
    world.run(operations.sleep(2, keep=["model.frozen"]))
    assert len(kept_bytes(world)) == 2


@pytest.mark.parametrize("level", [0, 1])
def test_levels_that_keep_all_weights_take_globs_too(world: World, level: int) -> None:
    before = world.ranks[0].contents()["parameter"]
    world.run(operations.sleep(level, keep=["model.frozen"]))
    world.run(commands.WakeUp())
    assert world.ranks[0].contents()["parameter"] == before
    assert world.controller.refusal() is None


@pytest.mark.parametrize("transformed", [(True, True), (False, True), (False, False)])
def test_checksums_of_all_pipeline_stages_have_one_kind_of_names(world: World, transformed: tuple[bool, bool]) -> None:
    for rank, has_transformed in zip(world.ranks, transformed, strict=True):
        rank.receiver.has_transformed = has_transformed
    layouts = [rank["layout"] for rank in world.run(commands.Checksums())]
    assert layouts == ["engine" if any(transformed) else "checkpoint"] * 2


def test_the_engine_has_a_default_for_level_2() -> None:
    world = World(keep=["model.frozen"])
    try:
        rank = world.ranks[0]
        world.run(operations.sleep(2))
        assert kept_bytes(world) == {rank.parameter.nbytes // 2 + rank.buffer.nbytes}
        world.run(commands.WakeUp())
        world.run(operations.sleep(2, keep=[]))
        assert kept_bytes(world) == {rank.buffer.nbytes}
    finally:
        world.board.close()


def test_a_default_that_matches_nothing_is_refused_only_where_it_counts() -> None:
    world = World(keep=["model.unknown"])
    try:
        world.run(operations.sleep(1))
        world.run(commands.WakeUp())
        world.run(operations.sleep(2, ["kv_cache"]))
        world.run(commands.WakeUp())
        with pytest.raises(InvalidRequestError, match="model.unknown"):
            world.run(operations.sleep(2))
        assert world.controller.refusal() is None
    finally:
        world.board.close()


@pytest.mark.parametrize("wrote", [False, True])
def test_an_interrupted_update_leaves_no_engine_busy(world: World, wrote: bool) -> None:
    """As by Ctrl-C, where the engine runs in the process of its caller."""

    def interrupt(manager: Any) -> None:
        if wrote:
            manager.begin_writing()
        raise KeyboardInterrupt

    receiver = world.ranks[0].receiver
    former, receiver.script = receiver.script, interrupt
    update = commands.UpdateWeights(endpoints={"*": ["x"]}, token="t")
    with pytest.raises(KeyboardInterrupt):
        world.run(update)
    content = Content.FAILED if wrote else Content.VALID
    assert [rank.manager.content for rank in world.ranks] == [content] + [Content.VALID] * (len(world.ranks) - 1)
    assert (world.controller.status.busy, world.controller.status.content) == ("", content)
    assert (world.controller.refusal() is None) == (not wrote)
    receiver.script = former
    world.run(update)
    assert world.controller.refusal() is None


def test_an_interrupted_wake_opens_nothing_before_the_next_wake(world: World) -> None:
    """The engine's own work after a wake has not been done."""
    world.run(commands.Sleep(level=1))
    agent, done = world.ranks[1].agent, []

    def interrupt(tags: Any) -> None:
        agent._after_wake = done.extend
        raise KeyboardInterrupt

    agent._after_wake = interrupt
    with pytest.raises(KeyboardInterrupt):
        world.run(commands.WakeUp(tags=list(PUBLIC_TAGS)))
    assert world.controller.refusal() is not None
    world.run(commands.WakeUp(tags=list(PUBLIC_TAGS)))
    assert done == list(PUBLIC_TAGS)
    assert world.controller.refusal() is None
