"""A relay that has a relay of another host behind it."""

import threading

import pytest
from silent_engine import SilentEngine
from test_push_from_all import assert_loaded
from test_relay import OPTIONS, Died, Mortal
from toy_engine import ToyEngine
from toys import Tracked, checkpoint

from integration.waiting import wait_until
from rl_memory_plugins.errors import EngineFaultError, RLMemoryError, StateConflictError
from rl_memory_plugins.tags import Content
from rl_memory_plugins.trainer import RolloutHandoff, push_from_all, relay
from rl_memory_plugins.trainer.incoming import Incoming
from rl_memory_plugins.trainer.relay import Relay

CONTINUE = {**OPTIONS, "on_failure": "continue"}


def chain(inner=2, *, further=(), wrap=lambda one: one):
    """An engine and a further host behind the outer relay. Returns the engine, those of the further host, both relays.

    Args:
        further: Engines besides, of the further host.
        wrap: What the outer relay has of the inner one.
    """
    near = ToyEngine(2)
    far = [ToyEngine(2, first_device=2 * number) for number in range(1, inner + 1)]
    second = Relay([*far, *further], bucket_bytes=512)
    return near, far, Relay([near, wrap(second)], bucket_bytes=512), second


def named(report):
    return [(failure.engine, *failure.behind) for failure in report["failed"]]


@pytest.mark.parametrize("on_failure", ["abort", "continue"])
def test_all_engines_of_both_hosts_have_the_weights(on_failure):
    near, far, outer, _ = chain()
    report = push_from_all(outer, checkpoint(1), weight_version="4", **{**OPTIONS, "on_failure": on_failure})
    assert_loaded([near, *far], checkpoint(1))
    assert all(engine.open and engine.version == "4" for engine in [near, *far])
    assert report["engines"][0]["failed"] == []
    ranks, [_, _, inner] = report["receivers"][0]["relayed"][:2], report["receivers"][0]["relayed"]
    assert len(ranks) == 2 and len(inner["relayed"]) == 4
    state = {"content": "valid", "weight_version": "4", "admitting": True, "reason": None}
    assert outer.memory()["behind"] == [state, state]


@pytest.mark.parametrize("point", ["devices", "post", "accept", "bucket", "commit"])
def test_an_engine_that_fails_behind_the_second_relay_is_named_and_all_others_go_on(point):
    near, far, outer, second = chain(further=[SilentEngine(point)])
    for version in "45":
        report = push_from_all(outer, checkpoint(3), weight_version=version, **CONTINUE)
        assert named(report) == [(0, 1, 2)]
        assert_loaded([near, *far], checkpoint(3))
        assert all(engine.open and engine.version == version for engine in [near, *far])
    [failure] = report["engines"][0]["failed"]
    assert (failure["engine"], failure["behind"]) == (1, [2])


def test_engines_of_both_hosts_that_fail_are_named():
    near, far, outer, _ = chain()
    well = ToyEngine(1, first_device=9)
    near.fail["post_update"] = StateConflictError("near")
    far[1].fail["post_update"] = StateConflictError("far")
    report = push_from_all([well, outer], checkpoint(1), **CONTINUE)
    assert {(failure.engine, *failure.behind): str(failure.error) for failure in report["failed"]} == {
        (1, 0): "near",
        (1, 1, 1): "far",
    }
    assert [engine.open for engine in [well, near, *far]] == [True, False, True, False]
    assert push_from_all([well, outer], checkpoint(2), **CONTINUE)["failed"] == []
    assert all(engine.open for engine in [well, near, *far])
    assert_loaded([well, near, *far], checkpoint(2))


@pytest.mark.parametrize("call", ["post_update", "wake_up"])
def test_a_handoff_names_an_engine_that_fails_behind_the_second_relay(call):
    near, far, outer, _ = chain()
    handoff = RolloutHandoff(outer, checkpoint(3), level=1, **CONTINUE)
    far[1].fail[call] = StateConflictError("busy")
    with handoff.training("1") as report:
        pass
    assert [(failure.engine, failure.behind, str(failure.error)) for failure in report.failed] == [(0, (1, 1), "busy")]
    assert_loaded([near, far[0]], checkpoint(3))
    assert near.open and far[0].open
    far[1].fail.clear()
    with handoff.training("2") as report:
        pass
    assert report.failed == [] and all(engine.open for engine in [near, *far])
    assert_loaded([near, *far], checkpoint(3))


def test_an_engine_behind_the_second_relay_that_cannot_be_opened_is_named():
    near, far, outer, _ = chain()
    far[0].fail["wake_up"] = EngineFaultError("cannot")
    report = push_from_all(outer, checkpoint(1), **CONTINUE)
    assert [(failure.behind, str(failure.error)) for failure in report["failed"]] == [((1, 0), "cannot")]
    assert [engine.open for engine in [near, *far]] == [True, False, True]


@pytest.mark.parametrize("failed", [0, 1])
def test_engines_beside_one_that_is_behind_open_after_an_update(failed):
    """The reason of one that is not valid must not hide that others are paused."""
    near, far, outer, second = chain()
    push_from_all(outer, checkpoint(1), **CONTINUE)
    far[failed].valid = False
    far[failed].fail["post_update"] = StateConflictError("busy")
    assert named(push_from_all(outer, checkpoint(2), **CONTINUE)) == [(0, 1, failed)]
    assert near.open and far[1 - failed].open and not far[failed].open


def test_an_update_opens_no_engine_behind_the_second_relay_whose_cache_sleeps():
    near, far, outer, second = chain()
    far[0].sleep(1, ["kv_cache"])
    push_from_all(outer, checkpoint(1), **CONTINUE)
    assert far[0].awake == {"weights"} and near.open and far[1].open


def test_nobody_opens_a_second_relay_in_the_middle_of_an_update():
    """A first relay that has given it up does not know what its engines have."""
    near, far, outer, second = chain()
    tell, found = far[0].weights_state, []
    done = {"content": "valid", "weight_version": "2", "admitting": False, "reason": "paused"}

    class Asks(Tracked):
        def tensors(self):
            far[0].weights_state = lambda: done
            found.extend([second.weights_state()["reason"], relay.resumed(second)])
            far[0].weights_state = tell
            return super().tensors()

    push_from_all(outer, Asks(checkpoint(1)), **CONTINUE)
    assert found == ["updating", None] and all(engine.open for engine in [near, *far])
    assert second.weights_state()["reason"] is None


def test_a_partial_update_changes_one_version_of_all_hosts():
    near, far, outer, _ = chain()
    push_from_all(outer, checkpoint(1), weight_version="1", **CONTINUE)
    far[1].version = "0"
    part = {"norm.weight": checkpoint(7)["norm.weight"]}
    report = push_from_all(outer, part, partial=True, base_version="1", weight_version="2", **CONTINUE)
    assert named(report) == [(0, 1, 1)]
    assert_loaded([near, far[0]], {**checkpoint(1), **part})
    assert outer.weights_state()["weight_version"] == "0, 2"


PHASES = {"offered": Content.VALID, "bucket": Content.FAILED, "committed": Content.FAILED, "updated": Content.VALID}


@pytest.mark.parametrize("phase", PHASES)
def test_a_second_relay_that_dies_is_named_and_its_engines_stay_closed_until_the_next_update(monkeypatch, phase):
    near, far, outer, second = chain(wrap=Mortal)
    well = ToyEngine(1, first_device=9)
    push_from_all([outer, well], checkpoint(1), weight_version="1", **CONTINUE)
    take, pause, resume = Incoming.tensors, Relay._pause, Relay._resume

    def tensors(self):
        inner = self._device in second.devices()
        for number, item in enumerate(take(self)):
            if inner and phase == "bucket" and number == 3:
                raise Died
            yield item
        if inner and phase == "committed":
            raise Died

    def dies_in(name, method):
        def call(self, *args):
            if self is second and phase == name:
                raise Died
            return method(self, *args)

        return call

    monkeypatch.setattr(Incoming, "tensors", tensors)
    monkeypatch.setattr(Relay, "_pause", dies_in("offered", pause))
    monkeypatch.setattr(Relay, "_resume", dies_in("updated", resume))
    report = push_from_all([outer, well], checkpoint(2), weight_version="2", **CONTINUE)
    [failure] = report["failed"]
    assert (failure.engine, failure.behind, failure.state) == (0, (1,), None)
    assert_loaded([near, well], checkpoint(2))
    assert near.open and well.open
    wait_until(lambda: not any(one.name == "rl-memory-update-weights" for one in threading.enumerate()), "all noticed")
    assert not any(engine.open for engine in far)
    assert {rank.manager.content for engine in far for rank in engine.ranks} == {PHASES[phase]}

    monkeypatch.undo()
    outer._engines[1] = Relay(far, bucket_bytes=512)  # started again at the same address
    assert [one["engine"] for one in outer.wake_up()["failed"]] == [1]
    assert not any(engine.open for engine in far)
    assert push_from_all([outer, well], checkpoint(3), weight_version="3", **CONTINUE)["failed"] == []
    assert all(engine.open and engine.version == "3" for engine in [near, *far, well])
    assert_loaded([near, *far, well], checkpoint(3))


def test_the_first_relay_that_dies_leaves_no_engine_open_that_the_update_has_not_reached(monkeypatch):
    near, far, outer, second = chain()
    push_from_all(outer, checkpoint(1), weight_version="1", **CONTINUE)
    take = Incoming.tensors

    def tensors(self):
        for number, item in enumerate(take(self)):
            if self._device in outer.devices() and number == 3:
                raise Died
            yield item

    monkeypatch.setattr(Incoming, "tensors", tensors)
    with pytest.raises(RLMemoryError):
        push_from_all(Mortal(outer), checkpoint(2), weight_version="2", **CONTINUE)
    wait_until(lambda: not any(one.name == "rl-memory-update-weights" for one in threading.enumerate()), "all noticed")
    assert not any(engine.open for engine in [near, *far])
    monkeypatch.undo()
    again = Relay([near, second], bucket_bytes=512)
    assert push_from_all(again, checkpoint(3), weight_version="3", **CONTINUE)["failed"] == []
    again.wake_up()  # it does not know who has closed them
    assert all(engine.open and engine.version == "3" for engine in [near, *far])
    assert_loaded([near, *far], checkpoint(3))


class Hung(SilentEngine):
    """Answers nothing from a point of an update on."""

    def __init__(self, until):
        super().__init__("devices" if until == "start" else until, True)
        self._is_hung = until == "start"

    def _reach(self, point):
        self._is_hung |= point == self._until
        super()._reach(point)

    def _answer(self):
        if self._is_hung:
            self._awake.wait(60)

    def sleep(self, *args, **options):
        self._answer()

    def weights_state(self):
        self._answer()
        return {"content": "valid", "weight_version": "3", "admitting": True, "reason": None}


@pytest.mark.parametrize("point", ["start", "bucket", "commit"])
def test_an_engine_that_is_silent_behind_the_second_relay_keeps_no_other_from_the_weights(monkeypatch, point):
    """Both relays give up before their callers do."""
    monkeypatch.setattr(relay, "STATE_S", 0.5)
    silent = Hung(point)
    near, far, outer, _ = chain(1, further=[silent])
    well = ToyEngine(1, first_device=9)
    try:
        report = push_from_all([outer, well], checkpoint(3), weight_version="4", **{**CONTINUE, "timeout_s": 10.0})
    finally:
        silent.wake()
    assert named(report) == [(0, 1, 1)]
    assert_loaded([near, *far, well], checkpoint(3))
    assert all(engine.open and engine.version == "4" for engine in [near, *far, well])


def test_engines_behind_two_relays_wait_while_the_trainer_waits_for_another_engine():
    """The fewer engines a relay has, and the shorter its own waits, the sooner they would give up."""
    near, far, outer, _ = chain(1)
    silent = [SilentEngine("accept", True, "fake:7"), SilentEngine("bucket", True, "fake:8")]
    try:
        report = push_from_all([*silent, outer], checkpoint(2), **{**CONTINUE, "timeout_s": 4.0})
    finally:
        for one in silent:
            one.wake()
    assert named(report) == [(0,), (1,)]
    assert_loaded([near, *far], checkpoint(2))


@pytest.mark.parametrize("call", ["sleep", "wake_up"])
def test_an_engine_that_hangs_behind_the_second_relay_does_not_keep_the_answer_of_the_others(call, monkeypatch):
    monkeypatch.setattr(relay, "ANSWER_S", 2.0)
    near, far, outer, _ = chain()
    hangs = threading.Event()
    monkeypatch.setattr(far[1], call, lambda *args, **options: hangs.wait(60))
    answer = getattr(outer, call)()
    hangs.set()
    assert [(one["engine"], one["behind"]) for one in answer["failed"]] == [(1, [1])]


def test_a_host_whose_engine_hangs_still_tells_its_state(monkeypatch):
    monkeypatch.setattr(relay, "STATE_S", 1.0)
    near, far, outer, _ = chain()
    push_from_all(outer, checkpoint(1), weight_version="1", **CONTINUE)
    hangs = threading.Event()
    monkeypatch.setattr(far[1], "weights_state", lambda: hangs.wait(60))
    behind = outer.memory()["behind"]
    hangs.set()
    assert behind == [near.weights_state(), far[0].weights_state()]
