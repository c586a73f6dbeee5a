"""Updates of several engines that go on without the engines that fail."""

import contextlib
import re
import socket
import threading
import time

import pytest
import torch
from helpers import interrupts, no_collection
from silent_engine import POINTS, SilentEngine
from test_network_update import Large
from test_push_from_all import OPTIONS, assert_loaded, break_once, fail_once, on_engines_gpus, sharded
from toy_engine import ToyEngine
from toys import Rank, ToyModel, Tracked, checkpoint

from integration.waiting import wait_until
from rl_memory_plugins.errors import (
    EngineFaultError,
    InvalidRequestError,
    ManifestError,
    RLMemoryError,
    StateConflictError,
    UnsupportedError,
    WeightUpdateError,
)
from rl_memory_plugins.tags import Content
from rl_memory_plugins.trainer import (
    Adapter,
    EngineFailure,
    ModelSource,
    Peers,
    StreamSource,
    lane,
    push,
    push_from_all,
    several,
    sites,
)
from rl_memory_plugins.trainer.lane import next_ports
from rl_memory_plugins.trainer.push import most_specific
from rl_memory_plugins.weights import dial, wire
from rl_memory_plugins.weights.communicators import over_gloo
from rl_memory_plugins.weights.source import spec_of

CONTINUE = {**OPTIONS, "on_failure": "continue"}
HANG_S = 3.0


def well_engines():
    return [ToyEngine(2), ToyEngine(1, first_device=2)]


def among(well, failing):
    """The failing engine between the others."""
    return [well[0], failing, *well[1:]]


def made(tensors):
    """A source whose tensors all senders must read in step."""
    return Tracked(tensors)


def resident(tensors):
    """A source whose tensors each sender reads by itself."""
    return tensors


SOURCES = pytest.mark.parametrize("form", [made, resident])


@SOURCES
def test_all_engines_that_are_well_get_the_weights(form):
    engines, tensors = [*well_engines(), ToyEngine(1, first_device=3)], checkpoint(1)
    report = push_from_all(engines, form(tensors), weight_version="4", **CONTINUE)
    assert_loaded(engines, tensors)
    assert all(engine.open and engine.version == "4" for engine in engines)
    assert report["failed"] == []
    assert report["tensors"] == len(tensors) and len(report["receivers"]) == 4 and len(report["engines"]) == 3
    assert report["bytes"] == sum(tensor.nbytes for tensor in tensors.values())


@SOURCES
@pytest.mark.parametrize("on_failure", ["abort", "continue"])
def test_engines_receive_at_the_same_time(monkeypatch, form, on_failure):
    """None acknowledges its first bucket before all ranks of all engines have theirs."""
    engines, tensors = [*well_engines(), ToyEngine(1, first_device=3)], checkpoint(1)
    met, deliver, acknowledged = threading.Barrier(4, timeout=10.0), wire.Connection.send, set()

    def after_all(connection, message, *arguments):
        if isinstance(message, wire.Ack) and connection not in acknowledged:
            acknowledged.add(connection)
            met.wait()
        deliver(connection, message, *arguments)

    monkeypatch.setattr(wire.Connection, "send", after_all)
    push_from_all(engines, form(tensors), **{**OPTIONS, "bucket_bytes": 256, "on_failure": on_failure})
    assert_loaded(engines, tensors)
    assert len(acknowledged) == 4


@SOURCES
@pytest.mark.parametrize("point", POINTS)
def test_an_engine_that_dies_is_named_and_the_others_go_on(point, form):
    well, dying, tensors = well_engines(), SilentEngine(point), checkpoint(2)
    source = form(tensors)
    start = time.monotonic()
    report = push_from_all(among(well, dying), source, weight_version="5", **CONTINUE)
    assert time.monotonic() - start < 20 < OPTIONS["timeout_s"]
    assert_loaded(well, tensors)
    assert all(engine.open and engine.version == "5" for engine in well)
    [failure] = report["failed"]
    assert isinstance(failure, EngineFailure) and (failure.trainer_rank, failure.engine) == (0, 1)
    assert isinstance(failure.error, RLMemoryError) and f"died after {point}" in failure.error.message
    assert report["engines"][1] is None and None not in (report["engines"][0], report["engines"][2])
    push_from_all(well, checkpoint(3), **CONTINUE)
    assert_loaded(well, checkpoint(3))


@pytest.mark.parametrize(
    ("point", "form"),
    [("devices", made), ("post", made), ("accept", resident), ("bucket", made), ("answer", made)],
)
def test_an_engine_that_falls_silent_holds_the_others_up_for_one_timeout(point, form):
    well, silent, tensors = well_engines(), SilentEngine(point, hangs=True), checkpoint(2)
    start = time.monotonic()
    with contextlib.ExitStack() as end:
        end.callback(silent.wake)
        report = push_from_all(among(well, silent), form(tensors), **{**CONTINUE, "timeout_s": HANG_S})
        took = time.monotonic() - start
    assert took < 2 * HANG_S + 4
    assert_loaded(well, tensors)
    assert all(engine.open for engine in well)
    [failure] = report["failed"]
    assert isinstance(failure.error, WeightUpdateError) and failure.error.details["reason"] == "stalled"


def test_several_silent_engines_do_not_make_the_others_give_up():
    """Each holds the others up for a timeout, one after the other: their patience is longer."""
    well, tensors = well_engines(), checkpoint(2)
    silent = [SilentEngine("accept", True, "fake:7"), SilentEngine("bucket", True, "fake:8")]
    with contextlib.ExitStack() as end:
        for one in silent:
            end.callback(one.wake)
        report = push_from_all([*silent, *well], made(tensors), **{**CONTINUE, "timeout_s": HANG_S})
    assert_loaded(well, tensors)
    assert [failure.engine for failure in report["failed"]] == [0, 1]


def test_engines_that_do_not_answer_are_waited_for_together(monkeypatch):
    """Their senders have failed: the time in which they may say why is the same for all."""
    monkeypatch.setattr(several, "GRACE_S", 4.0)
    silent = [SilentEngine("bucket", True, f"fake:{number}") for number in (6, 7, 8, 9)]
    with contextlib.ExitStack() as end:
        for one in silent:
            end.callback(one.wake)
        start = time.monotonic()
        with pytest.raises(WeightUpdateError, match="Ack"):
            push_from_all(silent, checkpoint(2), **{**CONTINUE, "timeout_s": 5.0})
        took = time.monotonic() - start
    assert took < 5.0 + 4.0 + 8.0  # one after the other they would take 21


@pytest.mark.parametrize("module", [lane, push], ids=["sender", "request"])
def test_an_engine_whose_thread_cannot_use_the_gpu_fails_alone(monkeypatch, module):
    started = []

    def broken_once(run):
        def broken():
            raise RuntimeError("CUDA error")

        started.append(run)
        return broken if len(started) == 1 else run

    monkeypatch.setattr(module, "on_this_gpu", broken_once)
    engines, tensors = well_engines(), checkpoint(2)
    report = push_from_all(engines, tensors, **CONTINUE)
    [failure] = report["failed"]
    assert failure.engine == 0 and "CUDA error" in failure.error.message
    assert_loaded(engines[1:], tensors)


@SOURCES
def test_an_engine_that_refuses_the_manifest_keeps_its_weights(form):
    well, other, tensors = well_engines(), ToyEngine(1, first_device=5), checkpoint(2)
    del other.ranks[0].model.packed
    other.version = "former"
    before = other.ranks[0].model.snapshot()
    report = push_from_all(among(well, other), form(tensors), weight_version="5", **CONTINUE)
    assert_loaded(well, tensors)
    [failure] = report["failed"]
    assert isinstance(failure.error, ManifestError)
    assert [one["name"] for one in failure.error.details["mismatches"]] == ["packed.weight"]
    assert failure.state["content"] == "valid" and failure.state["weight_version"] == "former"
    other.ranks[0].model.assert_unchanged(before)


class Larger(ToyModel):
    """Has a parameter that other engines ignore."""

    def __init__(self):
        super().__init__()
        self.ignored = torch.nn.Parameter(torch.zeros(2), requires_grad=False)

    def load_weights(self, weights):
        weights = dict(weights)
        if "ignored.weight" in weights:
            self.ignored.data.copy_(weights.pop("ignored.weight"))
        super().load_weights(weights.items())


def test_a_name_that_one_engine_uses_is_known():
    engines, tensors = well_engines(), {**checkpoint(2), "ignored.weight": torch.ones(2)}
    engines[1].ranks = [Rank(Larger(), 2)]
    assert push_from_all(engines, tensors, **CONTINUE)["failed"] == []
    assert_loaded(engines[:1], checkpoint(2))
    assert torch.equal(engines[1].ranks[0].model.ignored, torch.ones(2))


def test_a_name_that_no_engine_uses_is_refused():
    engines, tensors = well_engines(), {**checkpoint(2), "ignored.weight": torch.zeros(2)}
    with pytest.raises(ManifestError) as caught:
        push_from_all(engines, tensors, **CONTINUE)
    assert {one["name"] for one in caught.value.details["mismatches"]} == {"ignored.weight"}
    assert [one["error"]["error"] for one in caught.value.details["engines"]] == ["ManifestError"] * 2
    assert all(engine.ranks[0].manager.content is Content.VALID for engine in engines)


def test_a_rank_that_breaks_leaves_its_engine_closed():
    well, broken, tensors = well_engines(), ToyEngine(2, first_device=5), checkpoint(2)
    begin = broken.ranks[1].manager.begin_writing

    def break_off(*arguments):
        begin(*arguments)
        raise WeightUpdateError("the worker broke")

    broken.ranks[1].manager.begin_writing = break_off
    report = push_from_all(among(well, broken), tensors, **CONTINUE)
    assert_loaded(well, tensors)
    [failure] = report["failed"]
    assert "the worker broke" in failure.error.message
    assert failure.state["content"] == "failed" and not failure.state["admitting"] and not broken.open


def test_an_engine_that_comes_back_is_brought_up_to_date_by_the_next_complete_update():
    engines = well_engines()
    engines[1].devices = fail_once(engines[1].devices, RLMemoryError("cannot reach the engine"))
    report = push_from_all(engines, checkpoint(1), weight_version="1", **CONTINUE)
    assert [failure.engine for failure in report["failed"]] == [1]

    part = {"norm.weight": torch.full((8,), 3.0)}
    with pytest.raises(InvalidRequestError, match="base_version"):
        push_from_all(engines, part, partial=True, weight_version="2", **CONTINUE)
    report = push_from_all(engines, part, partial=True, weight_version="2", base_version="1", **CONTINUE)
    [failure] = report["failed"]  # it would mix the checkpoint that it started with and version 2
    assert failure.engine == 1 and isinstance(failure.error, StateConflictError)
    assert_loaded(engines[:1], {**checkpoint(1), **part})

    report = push_from_all(engines, checkpoint(3), weight_version="3", **CONTINUE)
    assert report["failed"] == [] and [engine.version for engine in engines] == ["3", "3"]
    assert_loaded(engines, checkpoint(3))
    push_from_all(engines, part, partial=True, weight_version="4", base_version="3", **CONTINUE)
    assert_loaded(engines, {**checkpoint(3), **part})


def test_without_an_engine_left_the_update_fails_and_names_each():
    engines = well_engines()
    engines[0].fail["post_update"] = StateConflictError("asleep")
    engines[1].devices = fail_once(engines[1].devices, WeightUpdateError("away"))
    with pytest.raises(StateConflictError, match="asleep") as caught:
        push_from_all(engines, checkpoint(), **CONTINUE)
    assert [one["error"]["message"] for one in caught.value.details["engines"]] == ["asleep", "away"]
    push_from_all(engines, checkpoint(), **CONTINUE)
    assert_loaded(engines, checkpoint())


def test_a_source_that_fails_ends_the_update_of_all_engines():
    class Broken(Tracked):
        def tensors(self):
            for number, item in enumerate(super().tensors()):
                if number == 5:
                    raise ValueError("the shard is gone")
                yield item

    engines = well_engines()
    with pytest.raises(WeightUpdateError, match="the shard is gone") as caught:
        push_from_all(engines, Broken(checkpoint()), **CONTINUE)
    assert [one["state"]["content"] for one in caught.value.details["engines"]] == ["failed", "failed"]
    push_from_all(engines, checkpoint(), **CONTINUE)
    assert_loaded(engines, checkpoint())


def test_an_interrupt_in_the_source_ends_the_update():
    class Interrupted(Tracked):
        def tensors(self):
            for number, item in enumerate(super().tensors()):
                if number == 3:
                    raise KeyboardInterrupt
                yield item

    ended = []

    def push():
        with pytest.raises(KeyboardInterrupt):
            push_from_all(well_engines(), Interrupted(checkpoint()), **CONTINUE)
        ended.append(True)

    pushing = threading.Thread(target=push, daemon=True)
    pushing.start()
    pushing.join(60)
    assert ended


def interrupted(engines, reached, tensors, **options):
    """Interrupt an update once all silent engines have been reached. It ends long before its timeout of 50 s."""
    silent, begun = [one for one in engines if isinstance(one, SilentEngine)], threading.Event()
    together, reach = threading.Barrier(len(silent), action=begun.set), SilentEngine._reach

    def noted(engine, point):
        if point == reached:
            together.wait(30)
        reach(engine, point)

    with pytest.MonkeyPatch.context() as patched, interrupts(begun):
        patched.setattr(SilentEngine, "_reach", noted)
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            push_from_all(engines, tensors, on_failure="continue", timeout_s=50, **options)
        assert time.monotonic() - start < 25
    for engine in silent:
        engine.wake()
    assert not [thread for thread in threading.enumerate() if thread.name == "rl-memory-send-weights"]


@pytest.mark.parametrize("tls", [False, True])
@SOURCES
def test_an_interrupt_does_not_wait_for_engines_that_take_nothing(form, tls):
    """An engine that waits for more is told why the update ends."""
    told = []

    class Told(ToyEngine):
        def post_update(self, body):
            try:
                return super().post_update(body)
            except RLMemoryError as error:
                told.append(error)
                raise

    well = Told(2)
    well.ranks = [Rank(Large(), number) for number in range(2)]
    silent = [SilentEngine("bucket", hangs=True, device=f"fake:{number}") for number in (8, 9)]
    tensors = form({name: torch.ones(4 << 20) for name in "abcd"})
    options = {"transport": "tcp", "advertise": "127.0.0.1", "tls": tls, "bucket_bytes": 16 << 20}
    interrupted([silent[0], well, silent[1]], "bucket", tensors, **options)
    if form is made:  # else it has taken all of the tensors meanwhile
        wait_until(lambda: told, "the engine has been told")
        assert re.search("KeyboardInterrupt|gave the update up", str(told[0])), told


@pytest.mark.parametrize("advertise", [None, "127.0.0.1"])
def test_an_interrupt_does_not_wait_for_an_engine_that_does_not_read_the_offer(advertise):
    """The description of so many tensors fills the buffers of a socket."""
    tensors = {f"{number}.{'x' * 500}": torch.ones(1) for number in range(20_000)}
    options = {} if advertise is None else {"transport": "tcp", "advertise": advertise}
    interrupted([SilentEngine("hello", hangs=True)], "hello", tensors, **options)


@pytest.mark.parametrize("point", ["post", "bucket"])
def test_an_engine_that_fails_leaves_the_source_and_its_error_at_once(point):
    well, source = well_engines(), Tracked(checkpoint(9))
    with no_collection():
        push_from_all(among(well, SilentEngine(point)), source, **CONTINUE)
        assert source.open == source.alive() == 0 and source.given == len(checkpoint(9))
        try:
            push_from_all([SilentEngine(point)], source, **CONTINUE)
        except EngineFaultError:
            assert source.open == source.alive() == 0


def test_a_source_makes_no_tensors_for_engines_that_are_all_dead():
    source = Tracked({f"{number}": torch.zeros(64) for number in range(100)})
    with pytest.raises(EngineFaultError, match="died after bucket"):
        push_from_all([SilentEngine("bucket"), SilentEngine("bucket", device="fake:8")], source, **CONTINUE)
    assert source.open == 0 and source.given < 50


def test_a_source_that_follows_the_engines_dtypes_is_asked_once_for_all():
    tensors, made_as = checkpoint(4), []

    def make():
        made_as.append(1)
        return ((name, tensor.float()) for name, tensor in tensors.items())

    well = well_engines()
    specs = [spec_of(name, tensor.float()) for name, tensor in tensors.items()]
    refusing = ToyEngine(1, first_device=5)
    del refusing.ranks[0].model.packed
    for failing, kind in [(SilentEngine("offer"), EngineFaultError), (refusing, ManifestError)]:
        report = push_from_all(among(well, failing), StreamSource(specs, make, dtype="engine"), **CONTINUE)
        assert_loaded(well, tensors)
        assert [type(failure.error) for failure in report["failed"]] == [kind]
    assert len(made_as) == 2


def test_adapters():
    engines = well_engines()
    engines[0].fail["post_adapter"] = StateConflictError("asleep")
    adapter = Adapter("policy", {"r": 4})
    tensors = {"base.lora_A.weight": torch.randn(4, 8), "base.lora_B.weight": torch.randn(8, 4)}
    report = push_from_all(engines, tensors, adapter=adapter, weight_version="1", **CONTINUE)
    assert [failure.engine for failure in report["failed"]] == [0]
    assert "policy" not in engines[0].adapters and engines[1].adapters["policy"][0] == "1"
    report = push_from_all(engines, tensors, adapter=adapter, weight_version="2", **CONTINUE)
    assert report["failed"] == [] and engines[0].adapters["policy"][0] == engines[1].adapters["policy"][0] == "2"


def test_an_unknown_choice_is_refused():
    with pytest.raises(InvalidRequestError, match="on_failure") as caught:
        push_from_all(well_engines(), checkpoint(), on_failure="ignore")
    assert caught.value.details["allowed"] == ["abort", "continue"]


@pytest.mark.parametrize("tls", [False, True])
def test_over_tcp(tls):
    well, tensors = well_engines(), checkpoint(3)
    options = {**CONTINUE, "transport": "tcp", "advertise": ["127.0.0.2", "::1"], "tls": tls}
    report = push_from_all(among(well, SilentEngine("hello")) if not tls else well, tensors, **options)
    assert_loaded(well, tensors)
    assert {received["transport"] for received in report["receivers"]} == {"tcp"}


class Behind(ToyEngine):
    """Finds the trainer at the second address alone: the first is that of a host which does not answer."""

    def __init__(self, silent):
        super().__init__()
        self._silent = silent

    def post_update(self, body):
        endpoints = {device: [self._silent, place] for device, place in body["endpoints"].items()}
        return super().post_update({**body, "endpoints": endpoints})


def test_an_engine_that_finds_one_of_the_addresses_silent_takes_the_next_in_time(monkeypatch):
    """It is more patient than the trainer, which waits for connections as long as ever."""
    monkeypatch.setattr(dial, "REACH_S", 0.5, raising=False)
    with contextlib.ExitStack() as end:
        full = end.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(3):  # the kernel drops the next ones
            waiting = end.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        engine, tensors = Behind(f"tcp://127.0.0.1:{full.getsockname()[1]}"), checkpoint(3)
        report = push_from_all([engine], tensors, transport="tcp", **{**CONTINUE, "timeout_s": 6.0})
    assert report["failed"] == []
    assert_loaded([engine], tensors)


def test_engines_that_cannot_be_joined_say_so_while_the_trainer_waits(monkeypatch):
    """They are more patient than the trainer, which may have another transport."""

    def dropped(meeting, connection, end, timeout_s):
        time.sleep(timeout_s)
        raise UnsupportedError("the hosts drop the packets of the other")

    monkeypatch.setattr(over_gloo, "_joined", dropped)
    engines = [ToyEngine(first_device=number) for number in range(5)]
    with pytest.raises(UnsupportedError):
        push_from_all(engines, checkpoint(), transport="gloo", **{**CONTINUE, "timeout_s": 9.0})


def test_each_engine_of_a_process_has_the_next_port():
    assert next_ports("10.0.0.2:5000", 2) == "10.0.0.2:5002"
    assert next_ports(["eth1:5000", "[fd00::2]:5000"], 1) == ["eth1:5001", "[fd00::2]:5001"]
    assert next_ports(["eth1", "fd00::2", "10.0.0.2", "10.0.0.2:0"], 1) == ["eth1", "fd00::2", "10.0.0.2", "10.0.0.2:0"]


# -- abort ----------------------------------------------------------------------------------------------------


def test_an_update_that_fails_at_all_engines_says_what_became_of_each():
    well, broken = well_engines(), SilentEngine("bucket")
    with pytest.raises(EngineFaultError, match="died after bucket") as caught:
        push_from_all(among(well, broken), checkpoint(), **OPTIONS)
    engines = caught.value.details["engines"]
    assert [(one["trainer_rank"], one["engine"]) for one in engines] == [(0, 0), (0, 1), (0, 2)]
    assert [one["state"] and one["state"]["content"] for one in engines] == ["failed", None, "failed"]
    assert all(one["error"] for one in engines)


def test_a_failure_before_the_first_byte_leaves_every_engine_valid():
    well = well_engines()
    well[1].fail["post_update"] = StateConflictError("asleep")
    with pytest.raises(StateConflictError, match="asleep") as caught:
        push_from_all(well, checkpoint(), **OPTIONS)
    assert [one["state"]["content"] for one in caught.value.details["engines"]] == ["valid", "valid"]


# -- several processes ----------------------------------------------------------------------------------------


def one_of_two_is_dead(rank, point):
    model, tensors = sharded(3)
    engine = ToyEngine(2, first_device=2 * rank) if rank == 0 else SilentEngine(point)
    report = push_from_all([engine], ModelSource(model), Peers(), weight_version="1", **CONTINUE)
    if rank == 0:
        assert_loaded([engine], tensors)
        assert engine.open
    return [(one.trainer_rank, one.engine, type(one.error).__name__) for one in report["failed"]]


@pytest.mark.parametrize("point", POINTS)
def test_every_process_learns_of_an_engine_that_died(pair, point):
    assert pair.run(one_of_two_is_dead, point) == [[(1, 0, "EngineFaultError")]] * 2


def its_engine_dies_in_the_stream(rank):
    source = Tracked({f"{number}": torch.zeros(64) for number in range(100)})
    with pytest.raises(EngineFaultError, match="died after bucket"):
        push_from_all([SilentEngine("bucket", device=f"fake:{rank}")], source, Peers(), **CONTINUE)
    return source.given


def test_processes_without_an_engine_that_is_left_iterate_to_the_end(pair):
    """Others may gather with them."""
    assert pair.run(its_engine_dies_in_the_stream) == [100, 100]


def each_serves_a_rank_of_both_engines(rank, scenario):
    from rl_memory_plugins.trainer.gpu import own_gpu

    on_engines_gpus(rank)
    try:
        model, tensors = sharded(4)
        engines = [ToyEngine(2), ToyEngine(2)] if rank == 0 else []
        if engines and scenario == "a rank breaks":
            break_once(engines[0].ranks[1].receiver)
        if engines and scenario == "a rank refuses":
            del engines[0].ranks[1].model.packed
        if engines and scenario == "the engine refuses":
            engines[0].fail["post_update"] = StateConflictError("busy")
        report = push_from_all(engines, ModelSource(model), Peers(), **CONTINUE)
        assert_loaded(engines[1:], tensors)
        assert all(engine.open for engine in engines[1:])
        assert report["receivers"]  # each process has sent
        return [(one.trainer_rank, one.engine, type(one.error).__name__) for one in report["failed"]]
    finally:
        sites.own_gpu = own_gpu


@pytest.mark.parametrize(
    ("scenario", "kind"),
    [
        ("a rank breaks", WeightUpdateError),
        ("a rank refuses", ManifestError),
        ("the engine refuses", StateConflictError),
    ],
)
def test_an_engine_that_two_processes_serve_fails_as_a_whole(pair, scenario, kind):
    assert pair.run(each_serves_a_rank_of_both_engines, scenario) == [[(0, 0, kind.__name__)]] * 2


def trainer_fails_on_one_rank(rank, when):
    class Broken(ModelSource):
        def specs(self):
            if when == "specs" and rank == 1:
                raise ValueError("only here")
            return super().specs()

        def revise(self, mismatches):
            if when == "revise" and rank == 1:
                raise ValueError("only here")
            return super().revise(mismatches)

        def resident(self):
            return None

        def tensors(self):
            for number, item in enumerate(super().tensors()):
                if when == "tensors" and number == 4 and rank == 1:
                    raise ValueError("only here")
                yield item

    engine = ToyEngine(1, first_device=rank)
    masters = {name: tensor.float() for name, tensor in checkpoint(7).items()}
    source = Broken(masters, dtype="engine") if when == "revise" else Broken(checkpoint(7))
    try:
        push_from_all([engine], source, Peers(), **CONTINUE)
    except Exception as error:
        caught = error
    push_from_all([engine], checkpoint(8), Peers(), **CONTINUE)
    assert_loaded([engine], checkpoint(8))
    return str(caught).split(": ")[-1], len(getattr(caught, "details", {}).get("engines", ()))


@pytest.mark.parametrize(("when", "engines"), [("specs", 0), ("revise", 0), ("tensors", 2)])
def test_a_trainer_that_fails_on_one_process_fails_on_all(pair, when, engines):
    assert pair.run(trainer_fails_on_one_rank, when) == [("only here", engines)] * 2


def test_why_a_rank_did_not_connect_is_said_by_the_engine():
    absent = WeightUpdateError("1 of 2 receivers did not connect", reason="stalled", missing=["gpu-1"])
    unreachable = WeightUpdateError("cannot connect to the trainer's socket", reason="unreachable")
    stalled = WeightUpdateError("the engine did not answer", reason="stalled")
    assert most_specific([absent, unreachable]) is unreachable
    assert most_specific([stalled, unreachable]) is stalled
    assert most_specific([absent, None]) is absent
