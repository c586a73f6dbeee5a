"""Updates that a relay passes on to the engines of its host."""

import contextlib
import threading
from itertools import product

import pytest
import torch
from silent_engine import SilentEngine
from test_push_from_all import assert_loaded, fail_once
from toy_engine import ToyEngine
from toys import Tracked, checkpoint

from integration.waiting import wait_until
from rl_memory_plugins.client import TRANSITION_S
from rl_memory_plugins.errors import (
    EngineFaultError,
    InvalidRequestError,
    ManifestError,
    NoAnswerError,
    PermissionDeniedError,
    RLMemoryError,
    StateConflictError,
    UnsupportedError,
    WeightUpdateError,
)
from rl_memory_plugins.tags import Content
from rl_memory_plugins.timing import LONGEST_S
from rl_memory_plugins.trainer import Adapter, RolloutHandoff, StreamSource, push_from_all, relay
from rl_memory_plugins.trainer.relay import Relay
from rl_memory_plugins.weights import wire
from rl_memory_plugins.weights.source import spec_of

OPTIONS = {"bucket_bytes": 256, "timeout_s": 60.0, "transport": "tcp"}


def host(count=3):
    """The engines of one host, and their relay."""
    engines = [ToyEngine(2, first_device=2 * number) for number in range(count)]
    return engines, Relay(engines, bucket_bytes=512)


@pytest.fixture
def link(monkeypatch):
    """The bytes of buckets that connections carry: engines of the trainer's own host read theirs from shared memory."""
    sent = []
    send = wire.Connection.send_bytes

    def counted(self, data, timeout_s):
        sent.append(len(data))
        send(self, data, timeout_s)

    monkeypatch.setattr(wire.Connection, "send_bytes", counted)
    return sent


@pytest.mark.parametrize("on_failure", ["abort", "continue"])
def test_the_link_carries_the_weights_once_for_all_engines_of_a_host(link, on_failure):
    engines, one = host()
    tensors = checkpoint(1)
    report = push_from_all(one, Tracked(tensors), weight_version="4", on_failure=on_failure, **OPTIONS)
    assert_loaded(engines, tensors)
    assert all(engine.open and engine.version == "4" for engine in engines)
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    assert nbytes <= sum(link) < 1.25 * nbytes  # tensors are aligned in a bucket
    assert [received["bytes"] for received in report["receivers"]] == [nbytes]
    assert len(report["receivers"][0]["relayed"]) == 6
    [answer] = report["engines"]
    assert len(answer["engines"]) == 3 and answer["failed"] == []

    link.clear()
    push_from_all(engines, Tracked(tensors), on_failure=on_failure, **OPTIONS)
    assert sum(link) > 2.5 * nbytes


def test_a_relay_that_sees_the_trainers_socket_takes_shared_memory(link):
    engines, one = host(2)
    options = {**OPTIONS, "transport": "auto", "advertise": "127.0.0.1"}
    report = push_from_all(one, checkpoint(2), **options)
    assert_loaded(engines, checkpoint(2))
    assert report["transport"] == "shm" and not link


def test_tensors_that_come_in_several_buckets_are_passed_on_whole():
    engines, one = host(1)
    tensors = checkpoint(2)
    push_from_all(one, tensors, **{**OPTIONS, "bucket_bytes": 64})
    assert_loaded(engines, tensors)


@pytest.mark.parametrize("point", ["devices", "post", "accept", "bucket", "commit"])
def test_an_engine_that_fails_behind_the_relay_is_named_and_the_others_go_on(point):
    engines, _ = host(2)
    one = Relay([engines[0], SilentEngine(point), engines[1]], bucket_bytes=512)
    tensors = checkpoint(3)
    report = push_from_all(one, tensors, weight_version="5", on_failure="continue", **OPTIONS)
    [answer] = report["engines"]
    [failure] = report["failed"]
    assert (failure.engine, failure.behind, failure.state) == (0, (1,), None)
    assert_loaded(engines, tensors)
    assert [(failure["engine"], failure["state"]) for failure in answer["failed"]] == [(1, None)]
    assert answer["engines"][1] is None and answer["engines"][0]["ranks"]


def test_an_engine_behind_a_relay_that_missed_an_update_stays_closed_until_the_next():
    engines, one = host(2)
    handoff = RolloutHandoff(one, checkpoint(3), level=1, **OPTIONS)
    engines[1].fail["post_update"] = StateConflictError("busy")
    with handoff.training("1") as report:
        pass
    assert [engine.open for engine in engines] == [True, False]
    [answer] = report.update["engines"]
    [failure] = answer["failed"]
    assert failure["error"]["message"] == "busy" and not failure["state"]["admitting"]
    with handoff.training("2"):
        pass
    assert [engine.open for engine in engines] == [True, True]
    assert_loaded(engines, checkpoint(3))


@pytest.mark.parametrize("call", ["post_update", "wake_up"])
def test_a_handoff_names_an_engine_that_fails_behind_a_relay(call):
    engines, one = host(2)
    well = ToyEngine(1, first_device=9)
    handoff = RolloutHandoff([well, one], checkpoint(3), level=1, on_failure="continue", **OPTIONS)
    engines[1].fail[call] = StateConflictError("busy")
    with handoff.training("1") as report:
        pass
    [failure] = report.failed
    assert (failure.trainer_rank, failure.engine, failure.behind) == (0, 1, (1,)) and str(failure.error) == "busy"
    assert_loaded([well, engines[0]], checkpoint(3))
    assert well.open and engines[0].open
    engines[1].fail.clear()
    with handoff.training("2") as report:
        pass
    assert report.failed == [] and all(engine.open for engine in engines)
    assert_loaded(engines, checkpoint(3))


def test_a_relay_fails_with_its_last_engine_and_the_trainers_other_engines_go_on():
    engines, one = host(2)
    well, tensors = ToyEngine(1, first_device=9), checkpoint(3)
    for engine in engines:
        del engine.ranks[0].model.packed
    report = push_from_all([one, well], tensors, on_failure="continue", **OPTIONS)
    [failure] = report["failed"]
    assert failure.engine == 0 and isinstance(failure.error, ManifestError)
    assert [mismatch["name"] for mismatch in failure.error.details["mismatches"]] == ["packed.weight"]
    assert failure.state["content"] == "valid"
    assert_loaded([well], tensors)


def test_a_relay_whose_engines_die_in_the_stream_ends_the_update_as_one_engine_would():
    """The rest of the model crosses the link for nobody, and the trainer's other engine must not commit."""
    one = Relay([SilentEngine("bucket"), SilentEngine("bucket", device="fake:8")], bucket_bytes=64)
    well, source = ToyEngine(1, first_device=9), Tracked(checkpoint(3))
    well.version = "former"
    with pytest.raises(EngineFaultError, match="died after bucket"):
        push_from_all([well, one], source, weight_version="5", **{**OPTIONS, "bucket_bytes": 64})
    assert source.given < len(checkpoint(3))
    assert well.version == "former" and not well.open


def test_a_source_that_fails_leaves_all_engines_closed_and_the_next_update_opens_them():
    class Broken(Tracked):
        def tensors(self):
            for number, item in enumerate(super().tensors()):
                if number == 5:
                    raise ValueError("the shard is gone")
                yield item

    engines, one = host(2)
    with pytest.raises(WeightUpdateError, match="the shard is gone") as caught:
        push_from_all(one, Broken(checkpoint(4)), **OPTIONS)
    assert [outcome["state"]["content"] for outcome in caught.value.details["engines"]] == ["failed"]
    assert not any(engine.open for engine in engines)
    push_from_all(one, checkpoint(4), **OPTIONS)
    assert_loaded(engines, checkpoint(4))
    assert all(engine.open for engine in engines)


def test_a_trainer_that_dies_before_the_commit_leaves_no_engine_with_new_weights(monkeypatch):
    """All bytes have arrived, and the engines must not commit for the trainer."""
    engines, one = host(2)
    receive = wire.Connection.receive

    def lost(self, *types, **options):
        message = receive(self, *types, **options)
        if isinstance(message, wire.Commit) and isinstance(self.peer, str) and self.details == {}:
            raise WeightUpdateError("the trainer closed the connection", reason="lost")
        return message

    monkeypatch.setattr(wire.Connection, "receive", lost)
    with pytest.raises(RLMemoryError):
        push_from_all(one, checkpoint(4), **OPTIONS)
    assert not any(engine.open for engine in engines)


def test_a_relay_that_dies_is_one_failure_for_the_trainer(monkeypatch):
    engines, one = host(2)
    well = ToyEngine(1, first_device=9)
    monkeypatch.setattr(
        relay.Incoming, "done", lambda self, report: (_ for _ in ()).throw(EngineFaultError("the relay died"))
    )
    report = push_from_all([one, well], checkpoint(4), on_failure="continue", **OPTIONS)
    assert [(failure.engine, str(failure.error)) for failure in report["failed"]] == [(0, "the relay died")]
    assert_loaded([well], checkpoint(4))


class Died(BaseException):
    """The end of the relay's process: nothing handles it."""


class Mortal:
    """The relay for the trainer: once it has died, no call gets an answer."""

    def __init__(self, relay):
        self._relay = relay
        self._dead = False

    def __getattr__(self, name):
        method = getattr(self._relay, name)

        def call(*args, **given):
            if not self._dead:
                try:
                    return method(*args, **given)
                except Died:
                    self._dead = True
            raise NoAnswerError("no answer")

        return call


def dies(monkeypatch, phase):
    """Have a relay die in a phase of the next update."""

    def die(*_, **__):
        raise Died

    take = relay.Incoming.tensors

    def tensors(self):
        for number, item in enumerate(take(self)):
            if (phase == "accepted" and number == 0) or (phase == "bucket" and number == 3):
                raise Died
            yield item
        if phase == "committed":
            raise Died

    monkeypatch.setattr(relay.Incoming, "tensors", tensors)
    if phase == "offered":
        monkeypatch.setattr(relay, "push_from_all", die)
    if phase == "updated":
        monkeypatch.setattr(Relay, "_resume", die)


PHASES = {
    "offered": Content.VALID,
    "accepted": Content.VALID,
    "bucket": Content.FAILED,
    "committed": Content.FAILED,
    "updated": Content.VALID,
}


@pytest.mark.parametrize("on_failure", ["abort", "continue"])
@pytest.mark.parametrize("phase", PHASES)
def test_no_engine_behind_a_relay_that_dies_is_open_and_the_next_update_opens_them(monkeypatch, phase, on_failure):
    engines, one = host(2)
    well, tensors = ToyEngine(1, first_device=9), checkpoint(4)
    push_from_all([one, well], checkpoint(1), weight_version="1", on_failure=on_failure, **OPTIONS)
    assert all(engine.open for engine in [*engines, well])
    dies(monkeypatch, phase)
    update = lambda: push_from_all([Mortal(one), well], tensors, weight_version="2", on_failure=on_failure, **OPTIONS)  # noqa: E731
    if on_failure == "continue":
        [failure] = update()["failed"]
        assert (failure.engine, failure.behind, failure.state) == (0, (), None)
        assert well.open and well.version == "2"
    else:
        with pytest.raises(RLMemoryError) as caught:
            update()
        [failed, other] = caught.value.details["engines"]
        assert failed["error"] is not None and failed["state"] is None
        assert other["state"] is None or other["state"]["content"] in ("valid", "failed")
    wait_until(lambda: not any(one.name == "rl-memory-update-weights" for one in threading.enumerate()), "all noticed")
    assert not any(engine.open for engine in engines)
    contents = {rank.manager.content for engine in engines for rank in engine.ranks}
    assert contents == {PHASES[phase]}
    assert {engine.version for engine in engines} == {"2" if phase == "updated" else "1"}

    monkeypatch.undo()
    again = Relay(engines, bucket_bytes=512)
    if phase in ("offered", "accepted"):  # their former weights are whole, and others have newer ones
        with pytest.raises(StateConflictError, match="has not reached"):
            again.wake_up()
    assert not any(engine.open for engine in engines)
    push_from_all([again, well], tensors, weight_version="3", on_failure=on_failure, **OPTIONS)
    again.wake_up()
    assert all(engine.open and engine.version == "3" for engine in engines)
    assert_loaded(engines, tensors)


@pytest.mark.parametrize(
    ("phase", "on_failure", "hangs"),
    [
        *product(["asked", "called", "connected", "greeted"], ["abort", "continue"], [False]),
        ("asked", "abort", True),
        ("called", "abort", True),
        ("greeted", "continue", True),
    ],
)
def test_a_relay_that_dies_before_the_offer_leaves_its_engines_as_they_were(monkeypatch, phase, on_failure, hangs):
    """The trainer names it, and cannot close engines that it does not know."""
    engines, one = host(2)
    well, options = ToyEngine(1, first_device=9), {**OPTIONS, "on_failure": on_failure}
    push_from_all([one, well], checkpoint(1), weight_version="1", **options)
    woken = threading.Event()

    def die(*_, **__):
        woken.wait(60 if hangs else 0)
        raise Died

    def greet(self):
        self._connection.send(wire.Hello(wire.PROTOCOL, self._device, self._token, 0), 5.0)
        die()

    if phase == "asked":
        monkeypatch.setattr(one, "devices", die)
    elif phase == "called":
        monkeypatch.setattr(relay, "dial", die)
    elif phase == "connected":
        monkeypatch.setattr(relay.Incoming, "open", die)
    else:
        monkeypatch.setattr(relay.Incoming, "open", greet)
    update = lambda: push_from_all(  # noqa: E731
        [Mortal(one), well], checkpoint(2), weight_version="2", **{**options, "timeout_s": 6.0 if hangs else 60.0}
    )
    try:
        if on_failure == "continue":
            [failure] = update()["failed"]
            assert (failure.engine, failure.behind) == (0, ())
        else:
            with pytest.raises(RLMemoryError) as caught:
                update()
            details = caught.value.details
            assert details["engine"] == 0 if phase == "asked" else details["engines"][0]["error"] is not None
    finally:
        woken.set()
    wait_until(lambda: not any(one.name == "rl-memory-update-weights" for one in threading.enumerate()), "all noticed")
    assert all(engine.open and engine.version == "1" for engine in engines)
    assert_loaded(engines, checkpoint(1))
    assert well.open and well.version == ("2" if on_failure == "continue" else "1")

    monkeypatch.undo()
    again = Relay(engines, bucket_bytes=512)
    assert again.wake_up() == {"failed": []}
    push_from_all([again, well], checkpoint(3), weight_version="3", **options)
    assert all(engine.open and engine.version == "3" for engine in [*engines, well])
    assert_loaded(engines, checkpoint(3))


def test_engines_that_a_caller_has_paused_stay_paused_over_an_update():
    engines, one = host(2)
    one.sleep(0)
    push_from_all(one, checkpoint(1), **OPTIONS)
    assert not any(engine.open for engine in engines)
    assert_loaded(engines, checkpoint(1))
    one.wake_up()
    assert all(engine.open for engine in engines)


@pytest.mark.parametrize("mode", ["keep", "freeze"])
def test_engines_are_paused_in_the_mode_of_the_update_and_opened_behind_it(mode):
    engines, one = host(1)
    push_from_all(one, checkpoint(1), weight_version="1", mode=mode, **OPTIONS)
    assert engines[0].log == [("sleep", 0, mode), ("post_update", "1"), ("wake_up", ["weights"])]


def test_an_update_that_no_engine_takes_leaves_those_open_that_were():
    engines, one = host(2)
    for engine in engines:
        engine.fail["post_update"] = StateConflictError("busy")
    with pytest.raises(StateConflictError, match="busy"):
        push_from_all(one, checkpoint(1), **OPTIONS)
    assert all(engine.open for engine in engines)


def test_an_engine_that_cannot_be_opened_behind_an_update_is_named():
    engines, one = host(2)
    engines[1].fail["wake_up"] = EngineFaultError("cannot")
    [failure] = push_from_all(one, checkpoint(1), on_failure="continue", **OPTIONS)["failed"]
    assert (failure.engine, failure.behind, str(failure.error)) == (0, (1,), "cannot")
    assert [engine.open for engine in engines] == [True, False]
    assert push_from_all(one, checkpoint(2), on_failure="continue", **OPTIONS)["failed"] == []
    assert all(engine.open for engine in engines)


class Waiting(ToyEngine):
    """Its pauses wait for a request that `ends`. Meanwhile it refuses all other calls."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.ends = threading.Event()
        self.ends.set()
        self.busy = False

    def sleep(self, level=1, tags=None, mode="abort", **keep):
        self._require_free()
        self.busy = True
        self.ends.wait(120)
        self.busy = False
        super().sleep(level, tags, mode, **keep)

    def wake_up(self, tags=None):
        self._require_free()
        super().wake_up(tags)

    def post_update(self, body):
        self._require_free()
        return super().post_update(body)

    def weights_state(self):
        return super().weights_state() | ({"admitting": False, "reason": "asleep"} if self.busy else {})

    def _require_free(self):
        if self.busy:
            raise StateConflictError("another transition is under way")


@pytest.mark.parametrize(("others", "wakes"), [(0, False), (0, True), (1, False)])
def test_an_engine_whose_pause_ends_too_late_is_opened_behind_the_next_update(others, wakes):
    late = Waiting(1)
    engines = [late, *(ToyEngine(1, first_device=1 + number) for number in range(others))]
    one, options = Relay(engines, bucket_bytes=512), {**OPTIONS, "timeout_s": 12.0, "mode": "wait"}
    push_from_all(one, checkpoint(1), weight_version="1", **options)
    late.ends.clear()
    if others:
        [failure] = push_from_all(one, checkpoint(2), weight_version="2", on_failure="continue", **options)["failed"]
        assert failure.behind == (0,) and "under way" in str(failure.error)
    else:
        with pytest.raises(StateConflictError, match="under way"):
            push_from_all(one, checkpoint(2), weight_version="2", **options)
    assert late.busy
    late.ends.set()
    wait_until(lambda: late.paused, "its pause has ended")
    assert not late.open and late.version == "1"
    if wakes:  # no engine has newer weights
        one.wake_up()
        assert late.open
    report = push_from_all(one, checkpoint(3), weight_version="3", on_failure="continue", **options)
    assert report["failed"] == [] and all(engine.open and engine.version == "3" for engine in engines)
    assert_loaded(engines, checkpoint(3))


def test_updates_that_no_engine_takes_leave_those_open_that_were_each_time():
    engines, one = host(2)
    for _ in range(2):
        for engine in engines:
            engine.fail["post_update"] = StateConflictError("busy")
        with pytest.raises(StateConflictError, match="busy"):
            push_from_all(one, checkpoint(1), **OPTIONS)
        assert all(engine.open for engine in engines)


def test_a_pause_of_the_callers_outlasts_updates_that_an_engine_misses():
    engines, one = host(2)
    one.sleep(0)
    engines[1].fail["post_update"] = StateConflictError("busy")
    push_from_all(one, checkpoint(1), **OPTIONS)
    push_from_all(one, checkpoint(2), **OPTIONS)
    assert not any(engine.open for engine in engines)
    one.wake_up()
    assert all(engine.open for engine in engines)
    assert_loaded(engines, checkpoint(2))


def behind(level=None):
    """A host with an engine that an update has not reached; after a sleep of this level of all engines."""
    engines, one = host(2)
    push_from_all(one, checkpoint(1), weight_version="1", **OPTIONS)
    engines[1].fail["post_update"] = StateConflictError("busy")
    push_from_all(one, checkpoint(2), weight_version="2", **OPTIONS)
    if level is not None:
        one.sleep(level)
    assert [engine.version for engine in engines] == ["2", "1"] and not engines[1].open
    return engines, one


def test_a_wake_that_a_pause_left_out_is_made_up_for_behind_the_next_update():
    engines, one = behind(level=0)
    assert [failure["engine"] for failure in one.wake_up()["failed"]] == [1]
    push_from_all(one, checkpoint(3), **OPTIONS)
    assert all(engine.open for engine in engines)


@pytest.mark.parametrize("slept", [None, ["weights"]])
def test_no_wake_opens_an_engine_that_is_behind(slept):
    engines, one = behind()
    if slept:
        one.sleep(1, slept)
    assert one.wake_up(["weights"]) == {"failed": []}
    assert [engine.open for engine in engines] == [True, False]
    push_from_all(one, checkpoint(3), **OPTIONS)
    assert all(engine.open for engine in engines)


def test_an_engine_that_is_behind_and_asleep_gets_its_weights_awake_for_the_next_update():
    engines, one = behind(level=1)
    assert one.wake_up(["weights"]) == {"failed": []}
    push_from_all(one, checkpoint(3), **OPTIONS)
    assert not any(engine.open for engine in engines)
    one.wake_up()
    assert all(engine.open for engine in engines)


@pytest.mark.parametrize("tags", [None, ["weights"]])
def test_an_engine_that_opens_late_under_former_weights_is_closed_at_the_next_call(tags):
    engines, one = behind()
    engines[1].paused = False  # what kept it from being paused has ended
    assert engines[1].open
    one.wake_up(tags)
    assert [engine.open for engine in engines] == [True, False]
    engines[1].paused = False
    for engine in engines:
        engine.fail["post_update"] = StateConflictError("busy")
    with pytest.raises(StateConflictError, match="busy"):
        push_from_all(one, checkpoint(3), **OPTIONS)
    assert [engine.open for engine in engines] == [True, False]
    push_from_all(one, checkpoint(3), **OPTIONS)
    assert all(engine.open for engine in engines)


@pytest.mark.parametrize("tags", [None, ["weights"]])
@pytest.mark.parametrize("first", ["silent", "updating"])
def test_a_new_relay_opens_no_engine_that_tells_its_state_late(first, tags):
    engines, _ = behind()
    tell, times = engines[1].weights_state, [1, 2]

    def late():
        if not times:
            return tell()
        times.pop()
        if first == "silent":
            raise NoAnswerError("no answer")
        return tell() | {"reason": "updating"}

    engines[1].weights_state = late
    again = Relay(engines, bucket_bytes=512)
    for _ in range(2):
        again.wake_up(tags)
        assert [engine.open for engine in engines] == [True, False]
    push_from_all(again, checkpoint(3), **OPTIONS)
    assert all(engine.open for engine in engines)


def test_a_new_relay_opens_no_engine_that_has_missed_an_update_and_sleeps():
    engines, _ = behind(level=1)
    again = Relay(engines, bucket_bytes=512)
    with pytest.raises(StateConflictError, match="has not reached"):  # which version is the newer one?
        again.wake_up()
    again.wake_up(["weights"])
    push_from_all(again, checkpoint(3), **OPTIONS)
    again.wake_up()
    assert all(engine.open for engine in engines)


def silent_once(engine):
    """It tells its state late: not at the first call."""
    tell = engine.weights_state

    def late():
        engine.weights_state = tell
        raise NoAnswerError("no answer")

    engine.weights_state = late


def test_a_new_relay_opens_no_sleeping_engine_beside_one_that_is_silent_and_may_be_newer():
    engines, _ = behind(level=1)
    silent_once(engines[0])
    again = Relay(engines, bucket_bytes=512)
    for _ in range(2):
        with pytest.raises(StateConflictError, match="has not reached"):
            again.wake_up()
        assert not any(engine.open for engine in engines)
    again.wake_up(["weights"])
    push_from_all(again, checkpoint(3), **OPTIONS)
    again.wake_up()
    assert all(engine.open for engine in engines)


def test_a_new_relay_wakes_engines_that_sleep_with_the_same_weights_once_all_have_told():
    engines, one = host(3)
    push_from_all(one, checkpoint(1), weight_version="1", **OPTIONS)
    one.sleep(1)
    silent_once(engines[0])
    again = Relay(engines)
    with pytest.raises(StateConflictError, match="has not reached"):
        again.wake_up()
    silent_once(engines[1])  # it has told its version before
    assert [failure["engine"] for failure in again.wake_up()["failed"]] == [1]
    assert again.wake_up() == {"failed": []}
    assert all(engine.open for engine in engines)


def test_a_wake_opens_no_engine_that_an_update_beside_it_has_not_reached(monkeypatch):
    engines, one = behind()
    kept_closed, updates = relay.kept_closed, [checkpoint(3)]

    def beside(engine):
        if updates:
            engines[0].fail["post_update"] = StateConflictError("busy")
            push_from_all(one, updates.pop(), weight_version="3", **OPTIONS)
        return kept_closed(engine)

    monkeypatch.setattr(relay, "kept_closed", beside)
    with pytest.raises(StateConflictError, match="has not reached"):
        one.wake_up()
    assert [engine.version for engine in engines] == ["2", "3"] and not engines[0].open
    assert [failure["engine"] for failure in one.wake_up()["failed"]] == [0]
    assert [engine.open for engine in engines] == [False, True]


def test_a_new_relay_wakes_engines_that_sleep_with_the_same_weights():
    engines, one = host(2)
    push_from_all(one, checkpoint(1), weight_version="1", **OPTIONS)
    one.sleep(1)
    assert Relay(engines).wake_up() == {"failed": []}
    assert all(engine.open for engine in engines)


def test_a_wake_names_the_engines_that_it_leaves_out():
    engines, one = host(2)
    engines[0].fail["post_update"] = StateConflictError("busy")
    push_from_all(one, checkpoint(1), **OPTIONS)
    one.sleep(1)
    [failure] = one.wake_up()["failed"]
    assert failure["engine"] == 0 and "has not reached" in failure["error"]["message"]
    assert [engine.open for engine in engines] == [False, True]


def test_a_partial_update_through_a_relay_changes_one_version():
    engines, one = host(2)
    push_from_all(one, checkpoint(1), weight_version="1", **OPTIONS)
    engines[1].version = "0"
    part = {"norm.weight": torch.full((8,), 3.0)}
    with pytest.raises(InvalidRequestError, match="base_version"):
        push_from_all(one, part, partial=True, **OPTIONS)
    [answer] = push_from_all(one, part, partial=True, base_version="1", weight_version="2", **OPTIONS)["engines"]
    assert [failure["engine"] for failure in answer["failed"]] == [1]
    assert_loaded(engines[:1], {**checkpoint(1), **part})


def test_a_source_that_follows_dtypes_learns_none_from_a_relay():
    engines, one = host(1)
    tensors = checkpoint(4)
    specs = [spec_of(name, tensor.double()) for name, tensor in tensors.items()]
    source = StreamSource(specs, lambda: ((name, tensor.double()) for name, tensor in tensors.items()), dtype="engine")
    with pytest.raises(ManifestError):
        push_from_all(one, source, **OPTIONS)
    assert all(rank.manager.content is Content.VALID for rank in engines[0].ranks)


def test_a_relay_takes_no_adapters():
    _, one = host(1)
    with pytest.raises(UnsupportedError, match="post_adapter"):
        push_from_all(one, {"a": torch.zeros(1)}, adapter=Adapter("policy", {"r": 4}), **OPTIONS)


def test_a_relay_connects_only_where_it_may():
    _, one = host(1)
    body = {"endpoints": {"*": "tcp://192.0.2.1:5000"}, "token": "", "timeout_s": 1.0}
    with pytest.raises(PermissionDeniedError):
        one.post_update(body)
    with pytest.raises(InvalidRequestError, match="endpoints"):
        one.post_update({"endpoints": {"other": "x"}, "token": "", "timeout_s": 1.0})


def test_a_relay_passes_one_update_on_at_a_time():
    engines, one = host(1)
    refused = []

    class Twice(Tracked):
        def tensors(self):
            with pytest.raises(StateConflictError, match="another update"):
                one.post_update({})
            refused.append(True)
            return super().tensors()

    push_from_all(one, Twice(checkpoint(2)), **OPTIONS)
    assert refused
    assert_loaded(engines, checkpoint(2))


def test_engines_of_the_trainers_that_fall_silent_do_not_make_those_behind_a_relay_give_up():
    """The trainer waits for one and then for the other, and the relay has nothing to pass on meanwhile."""
    silent = [SilentEngine("offer", True, "fake:7"), SilentEngine("bucket", True, "fake:8")]
    well, tensors = ToyEngine(), checkpoint(2)
    one = Relay(well)
    push_from_all(one, checkpoint(1), **OPTIONS)  # a first update may take an engine seconds
    options = {**OPTIONS, "bucket_bytes": 64, "timeout_s": 8.0, "on_failure": "continue"}
    with contextlib.ExitStack() as end:
        for engine in silent:
            end.callback(engine.wake)
        report = push_from_all([*silent, one], Tracked(tensors), **options)
    assert [(failure.engine, failure.behind) for failure in report["failed"]] == [(0, ()), (1, ())]
    assert_loaded([well], tensors)


@pytest.mark.parametrize(("timeout_s", "patience_s"), [(60.0, 2 * 60.0 + 3 * 30.0), (LONGEST_S, LONGEST_S)])
def test_engines_behind_a_relay_wait_for_the_trainer_and_for_each_other(timeout_s, patience_s):
    engines, one = host(2)
    told = []
    for engine in engines:
        engine.post_update = lambda body, post=engine.post_update: told.append(body["timeout_s"]) or post(body)
    push_from_all(one, checkpoint(2), on_failure="continue", **{**OPTIONS, "timeout_s": timeout_s})
    assert told == [patience_s] * 2


@pytest.mark.parametrize("tls", [True])
def test_over_tls(tls):
    pytest.importorskip("cryptography")
    engines, one = host(2)
    push_from_all(one, checkpoint(6), advertise="127.0.0.1", tls=tls, **OPTIONS)
    assert_loaded(engines, checkpoint(6))


def test_the_state_of_a_host_is_the_worst_of_its_engines():
    engines, one = host(2)
    push_from_all(one, checkpoint(1), weight_version="1", **OPTIONS)
    assert one.weights_state() == {"content": "valid", "weight_version": "1", "admitting": True, "reason": None}
    one.sleep(2)
    one.wake_up(["weights"])
    engines[0].devices = fail_once(engines[0].devices, RLMemoryError("cannot reach the engine"))
    push_from_all(one, checkpoint(2), weight_version="2", **OPTIONS)
    state = one.weights_state()
    assert (state["admitting"], state["weight_version"]) == (False, "1, 2")
    one.wake_up()
    assert [engine.open for engine in engines] == [False, True]


def test_an_engine_that_cannot_sleep_is_named_and_keeps_no_other_awake():
    engines, one = host(2)
    engines[0].fail["sleep"] = StateConflictError("busy")
    [failure] = one.sleep(2)["failed"]
    assert (failure["engine"], failure["error"]["message"]) == (0, "busy")
    assert [engine.open for engine in engines] == [True, False]
    for engine in engines:
        engine.fail["sleep"] = StateConflictError("busy")
    with pytest.raises(StateConflictError):
        one.sleep(2)


def test_a_relay_needs_an_engine():
    with pytest.raises(InvalidRequestError, match="needs an engine"):
        Relay([])
    with pytest.raises(InvalidRequestError, match="unknown options"):
        Relay(ToyEngine(), bucket_byte=1)


@pytest.mark.parametrize("call", ["sleep", "wake_up"])
def test_an_engine_that_hangs_behind_a_relay_does_not_keep_the_answer_of_the_others(call, monkeypatch):
    """The caller would give up first, and take the engines that have obeyed for failed too."""
    assert relay.ANSWER_S < TRANSITION_S
    monkeypatch.setattr(relay, "ANSWER_S", 0.5)
    engines, one = host(2)
    hangs = threading.Event()
    monkeypatch.setattr(engines[1], call, lambda *args, **options: hangs.wait(60))
    answer = getattr(one, call)()
    hangs.set()
    assert [failure["engine"] for failure in answer["failed"]] == [1]
