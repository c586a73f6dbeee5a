"""Handoffs over several engines that go on without those that fail."""

import asyncio

import pytest
from silent_engine import SilentEngine
from test_handoff import AsyncObject, BrokenOnce, Part, Setup
from toy_engine import ToyEngine
from toys import checkpoint, loaded

from rl_memory_plugins.errors import (
    DeviceMemoryError,
    EngineFaultError,
    EngineLostError,
    InvalidRequestError,
    RLMemoryError,
    StateConflictError,
    WeightUpdateError,
)
from rl_memory_plugins.trainer import AsyncRolloutHandoff, EngineFailure, RolloutHandoff, participants
from rl_memory_plugins.trainer.outcomes import state_of
from rl_memory_plugins.trainer.relay import Relay


def goes_on(engines=3, **options):
    return Setup(engines=engines, on_failure="continue", **options)


def assert_updated(setup, *numbers):
    for number in numbers:
        engine = setup.engines[number]
        assert engine.open and engine.version == "7"
        engine.ranks[0].model.assert_unchanged(loaded(setup.tensors))


def wake_fails_once(engine, tags, error):
    wake = engine.wake_up

    def wake_up(given=None):
        if given == tags:
            engine.wake_up = wake
            raise error
        wake(given)

    engine.wake_up = wake_up


STEPS = {
    "sleep": lambda engine: engine.fail.update(sleep=StateConflictError("busy")),
    "wake_weights": lambda engine: wake_fails_once(engine, ["weights"], DeviceMemoryError("full")),
    "sync": lambda engine: engine.fail.update(post_update=StateConflictError("busy")),
}


@pytest.mark.parametrize("step", STEPS)
def test_an_engine_that_fails_is_named_and_closed_and_the_others_go_on(step):
    setup = goes_on()
    failing = setup.engines[1]
    STEPS[step](failing)
    with setup.handoff.training("6") as report:
        # What fails in `sync` is what a later half asks again: the failure of `sleep` has ended there.
        expected = [(0, 1, step)] if step == "sleep" else []
        assert [(one.trainer_rank, one.engine, one.error.details["step"]) for one in report.failed] == expected
        if step == "sleep":
            STEPS["sync"](failing)
    [failure] = report.failed
    assert isinstance(failure, EngineFailure) and (failure.trainer_rank, failure.engine) == (0, 1)
    assert failure.error.details["step"] == ("sync" if step == "sleep" else step)
    assert failure.state["admitting"] is False and not failing.open
    assert failing.version is None
    assert [engine.open for engine in setup.engines] == [True, False, True]
    assert [engine.version for engine in setup.engines] == ["6", None, "6"]

    with setup.handoff.training("7") as report:
        pass
    assert report.failed == []
    assert_updated(setup, 0, 1, 2)


def test_an_engine_that_would_answer_under_former_weights_is_closed_before_the_others_open():
    setup = goes_on(engines=2)
    away = setup.engines[1]
    away.fail["sleep"] = StateConflictError("busy")
    setup.handoff.release()
    assert away.open  # it answers while the other sleeps
    away.fail["post_update"] = StateConflictError("busy")
    setup.handoff.sync("7")
    assert_updated(setup, 0)
    assert not away.open
    order = [call[:2] for call in setup.log if call[0] in ("sleep", "wake_up")]
    assert order.index(("sleep", 0)) < order.index(("wake_up", None))


def test_the_others_stay_closed_beside_an_engine_that_cannot_be_closed(monkeypatch):
    monkeypatch.setattr(participants, "CLOSE_S", 0.3)
    setup = goes_on(engines=2)
    away = setup.engines[1]

    def refuse(*args, **options):
        raise StateConflictError("busy")

    sleep, away.sleep = away.sleep, refuse
    away.fail["post_update"] = StateConflictError("busy")
    with pytest.raises(StateConflictError, match="cannot be closed") as caught, setup.handoff.training("6"):
        pass
    assert caught.value.details["step"] == "wake_kv_cache" and caught.value.details["state"]["admitting"]
    assert away.open and not setup.engines[0].open
    away.sleep = sleep
    setup.handoff.sync("7")
    assert_updated(setup, 0, 1)


@pytest.mark.parametrize("reason", ["updating", "asleep"])
def test_a_call_that_breaks_off_late_does_not_open_an_engine_behind_the_handoffs_back(reason):
    """While an update runs, or a sleep waits for requests, the engine refuses to sleep. It opens when that ends."""
    engine = ToyEngine()
    answers = [(reason, False), (reason, False), (None, True)]

    def sleep(level=1, tags=None, mode="abort"):
        if answers:
            raise StateConflictError("another call runs")
        engine.awake.clear()

    engine.sleep = sleep
    engine.weights_state = lambda: (
        {"content": "valid", "reason": answers[0][0], "admitting": answers.pop(0)[1]} if answers else {}
    )
    participants.closed(engine)
    assert not answers and not engine.open


def test_a_call_that_hangs_at_an_engine_that_was_left_out_does_not_hold_up_the_others():
    engine = ToyEngine()
    engine.sleep(1)

    def refuse(**_):
        raise StateConflictError("another call runs")

    engine.sleep = refuse
    assert participants.closed(engine, 0.3)["reason"] == "asleep"


def refuses_to_sleep(engine, times, error):
    sleep, left = engine.sleep, list(range(times))

    def refuse(*args, **options):
        if left:
            left.pop()
            raise error
        sleep(*args, **options)

    engine.sleep = refuse


def test_a_relay_that_is_left_out_is_closed_once_all_of_its_engines_are():
    engines = [ToyEngine(), ToyEngine(first_device=1)]
    refuses_to_sleep(engines[1], 3, StateConflictError("another call runs"))
    participants.closed(Relay(engines))
    assert not any(engine.open for engine in engines)


def test_a_relay_of_an_engine_that_cannot_be_closed_is_an_error_as_that_engine_would_be():
    engines = [ToyEngine(), ToyEngine(first_device=1)]
    refuses_to_sleep(engines[1], 1000, EngineFaultError("no"))
    with pytest.raises(StateConflictError, match="cannot be closed"):
        participants.closed(Relay(engines), 0.3)


def test_a_dead_engine_behind_a_relay_whose_others_sleep_holds_nothing_up():
    engines = [ToyEngine(), ToyEngine(first_device=1)]
    engines[0].sleep(1)
    refuses_to_sleep(engines[1], 2, EngineLostError("has died"))
    engines[1].awake.clear()
    assert not participants.closed(Relay(engines))["admitting"]
    with pytest.raises(EngineLostError):  # it was asked once
        engines[1].sleep(0)


def test_an_engine_that_fails_in_its_last_wake_has_the_new_weights():
    setup = goes_on(engines=2)
    wake_fails_once(setup.engines[1], None, DeviceMemoryError("full"))
    report = setup.handoff.sync("7")
    [failure] = report.failed
    assert (failure.engine, failure.error.details["step"]) == (1, "wake_kv_cache")
    assert failure.state["weight_version"] == "7"
    assert ("sleep", 0, "abort") not in setup.log
    assert_updated(setup, 0)
    assert setup.handoff.sync("7").failed == []
    assert_updated(setup, 1)


@pytest.mark.parametrize("point", ["devices", "bucket", "done"])
def test_an_engine_that_dies_in_the_update(point):
    tensors, well, dying = checkpoint(5), ToyEngine(), SilentEngine(point)
    handoff = RolloutHandoff([dying, well], tensors, bucket_bytes=256, timeout_s=30.0, on_failure="continue")
    with handoff.training("7") as report:
        pass
    assert [(one.engine, one.state) for one in report.failed] == [(0, None)]
    assert well.open and well.version == "7"
    well.ranks[0].model.assert_unchanged(loaded(tensors))


def test_a_dead_engine_is_asked_no_more_in_the_same_half():
    class Dead(SilentEngine):
        def __init__(self):
            super().__init__("devices")
            self.asked = []

        def sleep(self, *args, level=1, **options):
            self.asked.append(("sleep", level))
            raise RLMemoryError("cannot reach it")

        def wake_up(self, tags=None):
            self.asked.append(("wake_up", tags))
            raise RLMemoryError("cannot reach it")

        def devices(self):
            raise AssertionError("it was left out")

        def asleep_bytes(self, tag):
            raise RLMemoryError("cannot reach it")

    well, dead = ToyEngine(), Dead()
    handoff = RolloutHandoff([well, dead], checkpoint(5), bucket_bytes=256, timeout_s=30.0, on_failure="continue")
    with handoff.training("7") as report:
        pass
    assert [one.engine for one in report.failed] == [1]
    assert dead.asked == [("sleep", 2), ("wake_up", ["weights"]), ("sleep", 0)]
    assert well.open


def test_without_an_engine_left_the_handoff_fails_and_names_each():
    setup = goes_on(engines=2)
    for engine in setup.engines:
        engine.fail["sleep"] = StateConflictError("busy")
    with pytest.raises(StateConflictError, match="busy") as caught, setup.handoff.training():
        pass
    assert caught.value.details["step"] == "sleep"
    assert [one["error"]["error"] for one in caught.value.details["engines"]] == ["StateConflictError"] * 2
    setup.handoff.sync("7")
    assert_updated(setup, 0, 1)


def test_a_source_that_fails_opens_no_engine():
    setup = goes_on(source=BrokenOnce(checkpoint(5)))
    with pytest.raises(WeightUpdateError, match="the disk is gone"), setup.handoff.training("6"):
        pass
    assert not any(engine.open for engine in setup.engines)
    setup.handoff.sync("7")
    assert_updated(setup, 0, 1, 2)


def test_partial_updates_leave_no_engine_out():
    with pytest.raises(InvalidRequestError, match="partial") as caught:
        goes_on(partial=True)
    assert caught.value.details["field"] == "on_failure"
    with pytest.raises(InvalidRequestError, match="on_failure"):
        Setup(on_failure="ignore")


def engine_of_one_process_fails(rank, step):
    log = []
    engine = ToyEngine(first_device=rank)
    handoff = RolloutHandoff(
        engine, checkpoint(5), weights=[Part("model", log)], bucket_bytes=256, timeout_s=30.0, on_failure="continue"
    )
    if rank == 1:
        STEPS[step](engine)
    if step == "sleep":
        failed = handoff.release().failed
        assert [(one.trainer_rank, one.engine) for one in failed] == [(1, 0)]
        if rank == 1:
            STEPS["sync"](engine)
    report = handoff.sync("6")
    assert engine.open == (rank == 0)
    found = [(one.trainer_rank, one.engine, type(one.error).__name__, one.state["admitting"]) for one in report.failed]
    assert handoff.sync("7").failed == [] and engine.open and engine.version == "7"
    return found


@pytest.mark.parametrize("step", STEPS)
def test_every_process_learns_of_an_engine_that_was_left_out(pair, step):
    kind = "DeviceMemoryError" if step == "wake_weights" else "StateConflictError"
    assert pair.run(engine_of_one_process_fails, step) == [[(1, 0, kind, False)]] * 2


def test_asynchronous_engine_objects_are_left_out_and_taken_back():
    tensors, engines = checkpoint(8), [ToyEngine(), ToyEngine(first_device=1)]
    engines[1].fail["post_update"] = StateConflictError("busy")

    async def main():
        objects = [AsyncObject(engine) for engine in engines]
        handoff = AsyncRolloutHandoff(objects, tensors, bucket_bytes=256, on_failure="continue")
        async with handoff.training("6") as report:
            pass
        found = [(one.engine, one.error.message) for one in report.failed]
        return found, [engine.open for engine in engines], (await handoff.sync("7")).failed

    assert asyncio.run(main()) == ([(1, "busy")], [True, False], [])
    assert all(engine.open and engine.version == "7" for engine in engines)


def test_a_handle_that_does_not_tell_its_state():
    assert state_of(object()) is None
