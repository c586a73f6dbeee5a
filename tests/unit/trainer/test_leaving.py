"""A trainer's state leaves while the engines' weights wake and the update runs, if the devices have room for both.

Its weights leave behind the state.
"""

import threading
import time
from collections import UserDict
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from test_overlap import Handoff, narrow, storages_in
from test_pausable import Paged, adamw, learn, states, tensors_in
from toy_engine import ToyEngine
from toys import checkpoint

from rl_memory_plugins.errors import (
    DeviceMemoryError,
    EngineFaultError,
    HostMemoryError,
    InvalidRequestError,
    RLMemoryError,
    StateConflictError,
    WeightUpdateError,
)
from rl_memory_plugins.tags import TagState
from rl_memory_plugins.trainer import (
    CheckpointSource,
    EngineObject,
    MegatronSource,
    ModelSource,
    Offloader,
    PausableMemory,
    QuantisedSource,
    RolloutHandoff,
    StreamSource,
    handoff,
)
from rl_memory_plugins.trainer.room import (
    AMPLE_BYTES,
    ROOM_BYTES,
    Needs,
    Room,
    is_ample,
    lacks_memory,
    needs_of,
    room,
    suffices,
)
from rl_memory_plugins.trainer.sources.model import only_reads

GiB = 1 << 30
AWAKE, ASLEEP = "resident", "preserved"


class Engine(ToyEngine):
    """Notes the state of the trainer's optimiser at each call. `needed` bytes of the trainer's device it must have."""

    def __init__(self):
        super().__init__()
        self.optimizer = []
        self.needed = self.cache = 0
        self.memory = None

    def asleep_bytes(self, tag):
        return [("cpu:0", {"weights": self.needed, "kv_cache": self.cache, "cuda_graph": 0}[tag])]

    def _call(self, *call):
        if self.memory is not None:
            self.optimizer.append((call[0], states(self.memory)["optimizer"]))
        super()._call(*call)


class SlowCopies:
    """Makes a memory's copies to host memory move their bytes as late as possible: when somebody waits for them."""

    def __init__(self, monkeypatch, memory):
        device = memory._manager.device
        self._copy = device.begin_copy_to_host
        self.failure = None
        self.under_way = 0
        monkeypatch.setattr(device, "begin_copy_to_host", self._begin)

    def _begin(self, pairs):
        self.under_way += 1

        def wait():
            self.under_way -= 1
            error, self.failure = self.failure, None
            if error is not None:
                raise error
            self._copy(pairs)

        return wait


class Setup(Handoff):
    """A trainer that has handed over once, and an undisturbed twin."""

    def __init__(self, monkeypatch, **options):
        super().__init__(monkeypatch, engine=Engine(), **options)
        self.engine.memory = self.memory
        self.leaving = SlowCopies(monkeypatch, self.memory)
        self.twin = Paged()
        self.twin_optimizer = adamw(self.twin)

    def learn(self):
        assert learn(self.model, self.optimizer) == learn(self.twin, self.twin_optimizer)

    def step(self):
        """A step. Returns: the state of the optimiser at each call of the engine on the way back."""
        with self.handoff.training() as self.report:
            self.learn()
            self.engine.optimizer.clear()
        self.assert_handed_over()
        return self.engine.optimizer

    def assert_handed_over(self):
        assert self.engine.open and self.leaving.under_way == 0
        assert set(states(self.memory).values()) == {"preserved", "discarded"}

    def assert_nothing_lost(self):
        self.memory.wake()
        both = zip(tensors_in(self.optimizer), tensors_in(self.twin_optimizer), strict=True)
        assert all(torch.equal(*pair) for pair in both)


BESIDE = [("wake_up", AWAKE), ("post_update", AWAKE), ("wake_up", ASLEEP)]
BEFORE = [("wake_up", ASLEEP), ("post_update", ASLEEP), ("wake_up", ASLEEP)]


def test_state_leaves_while_the_engine_wakes_and_takes_the_weights(monkeypatch):
    setup = Setup(monkeypatch)
    for _ in range(3):
        assert setup.step() == BESIDE
        assert setup.report.moved_bytes["offload_others"] > 0 and setup.report.seconds["offload_others"] > 0
    setup.assert_nothing_lost()


@pytest.mark.parametrize("options", [{"overlap": False}, {"from_host": True}], ids=str)
def test_state_leaves_first_where_the_handoff_is_told_so(monkeypatch, options):
    setup = Setup(monkeypatch, **options)
    assert setup.step() == setup.step() == BEFORE


def test_state_leaves_first_where_the_device_has_no_room(monkeypatch):
    setup = Setup(monkeypatch)
    setup.engine.needed = 1 << 60
    assert setup.step() == BEFORE
    setup.engine.needed = 0
    assert setup.step() == BESIDE
    setup.assert_nothing_lost()


def test_state_leaves_first_where_the_engine_does_not_tell_what_it_needs(monkeypatch):
    setup = Setup(monkeypatch)
    monkeypatch.setattr(setup.engine, "asleep_bytes", None)
    assert setup.step() == BEFORE


class Cache:
    """Notes when torch's cache is emptied. The trainer's device has `free` bytes."""

    def __init__(self, monkeypatch, setup, free):
        self.emptied = []
        self.beside = []  # what slept when another thread emptied it

        def empty_cache(step):
            if threading.current_thread() is not threading.main_thread():
                self.beside.append(states(setup.memory)["parameters"])
            self.emptied.append(step)
            return 0.0

        monkeypatch.setattr(setup.handoff._parts, "empty_cache", empty_cache)
        trim = setup.memory._manager.device.trim
        monkeypatch.setattr(setup.memory._manager.device, "trim", lambda *least: self._trim(trim, *least))
        monkeypatch.setattr(setup.memory, "device_memory", lambda: ("cpu:0", free))

    def _trim(self, trim, *least):
        if least:  # without, it is some time after the sleep
            self.emptied.append("sleep")
        trim(*least)


@pytest.mark.parametrize(("free", "kept"), [(30 * GiB - 1, True), (29 * GiB, False)])
def test_the_cache_goes_while_the_engine_opens_where_the_device_has_ample_memory(monkeypatch, free, kept):
    setup = Setup(monkeypatch)
    setup.step()
    cache = Cache(monkeypatch, setup, free)
    setup.engine.needed, setup.engine.cache = 4 * GiB, 10 * GiB
    assert setup.step() == BESIDE
    assert cache.emptied == ["offload"] and cache.beside == ([ASLEEP] if kept else [])
    setup.assert_nothing_lost()


def test_the_cache_has_gone_when_the_engine_does_not_open(monkeypatch):
    """Nothing of a failed handoff runs on: the caller may capture a CUDA graph."""
    setup = Setup(monkeypatch)
    setup.step()
    cache = Cache(monkeypatch, setup, 30 * GiB - 1)
    setup.engine.needed, setup.engine.cache = 4 * GiB, 10 * GiB
    wake, empty, begun = setup.engine.wake_up, setup.handoff._parts.empty_cache, threading.Event()

    def wake_up(asked=None):
        if asked is None:
            assert begun.wait(60)
            raise EngineFaultError("an error of the driver")
        wake(asked)

    def slowly(step):
        begun.set()
        time.sleep(0.3)
        return empty(step)

    monkeypatch.setattr(setup.engine, "wake_up", wake_up)
    monkeypatch.setattr(setup.handoff._parts, "empty_cache", slowly)
    setup.handoff.release()
    with pytest.raises(EngineFaultError, match="an error of the driver"):
        setup.handoff.sync()
    assert cache.beside == [ASLEEP]


@pytest.mark.parametrize("options", [{"on_failure": "continue"}, {"tells": False}], ids=str)
def test_the_cache_does_not_stay_where_an_engine_could_be_lost_for_it(monkeypatch, options):
    tells = options.pop("tells", True)
    setup = Setup(monkeypatch, **options)
    setup.step()
    cache = Cache(monkeypatch, setup, 100 * GiB)
    if not tells:
        monkeypatch.setattr(setup.engine, "asleep_bytes", lambda tag: fail())
    setup.step()
    assert "offload" in cache.emptied


def fail():
    raise RLMemoryError("cannot reach it")


@pytest.mark.parametrize("tags", [["weights"], None], ids=str)
def test_the_cache_goes_if_an_engine_lacks_memory_after_all(monkeypatch, tags):
    setup = Setup(monkeypatch)
    setup.step()
    cache = Cache(monkeypatch, setup, AMPLE_BYTES - 1)
    wake, refused = setup.engine.wake_up, []

    def wake_up(asked=None):
        if asked == tags and not refused:
            refused.append(asked)
            raise SHORT
        wake(asked)

    monkeypatch.setattr(setup.engine, "wake_up", wake_up)
    setup.step()
    assert refused == [tags] and "offload_others" in cache.emptied
    assert ("offload" in cache.emptied[: cache.emptied.index("offload_others")]) == (tags is None)
    setup.assert_nothing_lost()


def test_the_cache_goes_if_memory_has_gone_since_it_was_to_stay(monkeypatch):
    setup = Setup(monkeypatch)
    setup.step()
    cache = Cache(monkeypatch, setup, 100 * GiB)
    told = [100 * GiB, 5 * GiB]  # another process takes the rest
    monkeypatch.setattr(setup.memory, "device_memory", lambda: ("cpu:0", told.pop(0)))
    setup.engine.needed = 4 * GiB
    wake = setup.engine.wake_up

    def wake_up(asked=None):
        if not cache.emptied:
            raise SHORT
        wake(asked)

    monkeypatch.setattr(setup.engine, "wake_up", wake_up)
    assert setup.step() == BEFORE
    assert told == [] and cache.emptied == ["offload_others", "offload"]
    setup.assert_nothing_lost()


def test_weights_that_are_asleep_come_back_after_the_state_has_left(monkeypatch):
    setup = Setup(monkeypatch)
    setup.step()
    setup.memory.wake(["optimizer"])
    setup.engine.optimizer.clear()
    setup.handoff.sync()
    assert setup.engine.optimizer == BEFORE
    setup.assert_handed_over()
    setup.assert_nothing_lost()


SHORT = DeviceMemoryError("a wake needs 3 bytes")
UNTYPED = WeightUpdateError("OutOfMemoryError: CUDA out of memory", type="OutOfMemoryError")


@pytest.mark.parametrize(("call", "error"), [("wake_up", SHORT), ("post_update", SHORT), ("post_update", UNTYPED)])
def test_an_engine_that_runs_out_of_memory_beside_the_state_is_asked_again_without_it(monkeypatch, call, error):
    setup = Setup(monkeypatch)
    setup.step()
    setup.engine.fail[call] = error
    calls = setup.step()
    assert calls == BESIDE[: 1 + (call == "post_update")] + BEFORE
    setup.step()
    setup.assert_nothing_lost()


def another_engine():
    engine = Engine()
    engine.ranks = ToyEngine(first_device=5).ranks
    return engine


@pytest.mark.parametrize("call", ["wake_up", "post_update"])
def test_an_engine_that_runs_out_of_memory_beside_the_state_is_not_left_out(monkeypatch, call):
    setup = Setup(monkeypatch, on_failure="continue")
    setup.handoff.engines.append(another_engine())
    setup.step()
    setup.engine.fail[call] = SHORT
    calls = setup.step()
    assert calls == BESIDE[: 1 + (call == "post_update")] + BEFORE
    assert setup.report.failed == [] and all(engine.open for engine in setup.handoff.engines)
    setup.assert_nothing_lost()


def test_an_engine_that_does_not_answer_keeps_no_state_on_the_device(monkeypatch):
    setup = Setup(monkeypatch, on_failure="continue")
    dead = another_engine()
    setup.handoff.engines.append(dead)

    def gone(*args):
        raise RLMemoryError("cannot reach it")

    dead.asleep_bytes = dead.devices = dead.wake_up = gone
    assert setup.step() == BESIDE
    assert [one.engine for one in setup.report.failed] == [1]


def test_an_engine_that_runs_out_of_memory_without_the_state_fails(monkeypatch):
    setup = Setup(monkeypatch, overlap=False)
    setup.engine.fail["wake_up"] = DeviceMemoryError("a wake needs 3 bytes")
    with pytest.raises(DeviceMemoryError) as caught:
        setup.step()
    assert caught.value.details["step"] == "wake_weights"


@pytest.mark.parametrize("call", ["wake_up", "post_update"])
def test_another_error_of_an_engine_leaves_the_state_awake(monkeypatch, call):
    setup = Setup(monkeypatch)
    setup.step()
    setup.engine.fail[call] = StateConflictError("busy")
    with pytest.raises(StateConflictError):
        setup.step()
    assert states(setup.memory)["optimizer"] == AWAKE and setup.leaving.under_way == 0
    setup.handoff.sync()
    setup.assert_handed_over()
    setup.step()
    setup.assert_nothing_lost()


@pytest.mark.parametrize("again", ["sync", "training"])
def test_a_copy_that_fails_leaves_the_state_awake(monkeypatch, again):
    setup = Setup(monkeypatch)
    setup.step()
    setup.leaving.failure = RuntimeError("an uncorrectable error")
    with pytest.raises(EngineFaultError, match="an uncorrectable error") as caught:
        setup.step()
    assert caught.value.details["step"] == "offload_others"
    assert states(setup.memory)["optimizer"] == AWAKE and not setup.engine.open
    if again == "sync":
        setup.handoff.sync()
        setup.assert_handed_over()
    setup.step()
    setup.assert_nothing_lost()


def test_gradients_are_dropped_before_the_copies_begin(monkeypatch):
    setup = Setup(monkeypatch)
    dropped = []
    begin = setup.memory._manager.begin_sleep

    def note():
        dropped.append(all(parameter.grad is None for parameter in setup.model.parameters()))
        begin()

    monkeypatch.setattr(setup.memory._manager, "begin_sleep", note)
    with setup.handoff.training():
        setup.model().backward()
    assert dropped == [True]


def test_the_cache_is_emptied_once_of_the_gradients_too_and_before_the_copies_begin(monkeypatch):
    setup = Setup(monkeypatch)
    monkeypatch.setattr(setup.memory, "device_memory", lambda: ("cpu:0", AMPLE_BYTES - GiB))
    done = []

    def empty(step):
        here = any(parameter.grad is not None for parameter in setup.model.parameters())
        done.append((step, here, setup.leaving.under_way))
        return 0.0

    monkeypatch.setattr(setup.handoff._parts, "empty_cache", empty)
    monkeypatch.setattr(setup.memory._manager.device, "trim", lambda min_bytes=0: done.append("trim"))
    with setup.handoff.training():
        setup.model().backward()
        monkeypatch.setattr(handoff, "torch", SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: True)))
    assert done == [("offload_others", False, 0), ("offload", False, 0)]


def test_only_a_sleep_begins_and_once(monkeypatch):
    memory = PausableMemory(Paged())
    with pytest.raises(StateConflictError, match="no sleep is prepared"):
        memory.begin()
    memory.prepare_sleep()
    memory.begin()
    with pytest.raises(StateConflictError):
        memory.sleep()
    memory.begin()
    memory.commit()
    memory.prepare_wake()
    with pytest.raises(StateConflictError, match="no sleep is prepared"):
        memory.begin()
    memory.wake()


# -- the weights leave behind the state ----------------------------------------------------------------------


class Link:
    """Notes when copies of tags begin, and when they have ended; when tags are freed; and the engine's calls.

    A copy moves its bytes when somebody waits for it, as late as possible.
    """

    def __init__(self, monkeypatch, engine, *memories):
        self.log = []
        self.failing = {}
        self.under_way = 0
        for memory in memories:
            device, allocator = memory._manager.device, memory._allocator
            monkeypatch.setattr(device, "begin_copy_to_host", self._begin(memory, device.begin_copy_to_host))
            monkeypatch.setattr(allocator, "release", self._free(allocator.release))
            monkeypatch.setattr(device, "synchronize", self._wait_for_all)
        call = engine._call
        monkeypatch.setattr(engine, "_call", lambda *made: (self.log.append(made[0]), call(*made)))

    def _begin(self, memory, copy):
        def begin(pairs):
            [tag] = [tag for tag in states(memory) if set(memory._allocator.blocks(tag)) >= {pairs[0][0]}]
            self.log.append(f"begin {tag}")
            self.under_way += 1
            kept = storages_in(memory._allocator)

            def wait():
                self.log.append(f"end {tag}")
                self.under_way -= 1
                error = self.failing.pop(tag, None)
                if error is not None:
                    raise error
                copy(pairs)
                kept.clear()

            return wait

        return begin

    def _wait_for_all(self):
        if self.under_way:
            self.log.append("wait for the device")

    def _free(self, release):
        def free(tag):
            if tag != "gradients":
                self.log.append(f"free {tag}")
            return release(tag)

        return free


def everything(model, optimizer):
    return [*model.parameters(), *tensors_in(optimizer)]


class Behind:
    """As `Setup`: a trainer that has handed over once, its undisturbed twin, and what its link and engine did since."""

    def __init__(self, monkeypatch, *, source=None, others=None, apart=False, link=Link, **options):
        self.model, self.twin = Paged(), Paged()
        self.optimizer, self.twin_optimizer = adamw(self.model), adamw(self.twin)
        self.memory = PausableMemory(self.model)
        self.of_state = PausableMemory() if apart else self.memory
        self.of_state.adopt(self.optimizer)
        narrow(monkeypatch, self.memory, self.of_state)
        self.engine = Engine()
        sent = ModelSource({name: parameter.detach() for name, parameter in self.model.sent.items()})
        self.handoff = RolloutHandoff(
            self.engine,
            sent if source is None else source(self.model, sent),
            weights=[self.memory.part("parameters")],
            others=[self.of_state.part("gradients", "optimizer")] if others is None else others(self.optimizer),
            bucket_bytes=256,
            **options,
        )
        with self.handoff.training():
            self.learn()
        self.link = link(monkeypatch, self.engine, *dict.fromkeys([self.memory, self.of_state]))

    def learn(self):
        assert learn(self.model, self.optimizer) == learn(self.twin, self.twin_optimizer)

    def step(self):
        """A step. Returns: what the link and the engine did after the body."""
        with self.handoff.training() as self.report:
            self.learn()
            self.link.log.clear()
        self.assert_handed_over()
        return self.link.log

    def assert_handed_over(self):
        assert self.engine.open and self.link.under_way == 0
        assert states(self.memory)["parameters"] == ASLEEP

    def assert_nothing_lost(self):
        """Whatever has happened: the trainer is as its twin, and goes on as its twin."""
        self.step()
        self.handoff.release()
        for memory in (self.memory, self.of_state):
            memory.wait()
        here, there = everything(self.model, self.optimizer), everything(self.twin, self.twin_optimizer)
        assert all(torch.equal(*pair) for pair in zip(here, there, strict=True))


BEGIN = ["begin optimizer", "begin parameters"]
UPDATE = ["wake_up", "post_update"]
STATE = ["end optimizer", "free optimizer"]
WEIGHTS = ["wait for the device", "end parameters", "free parameters"]  # the device may still have read them
OPEN = ["wake_up"]


@pytest.mark.parametrize("apart", [False, True], ids=["one memory", "two memories"])
def test_the_weights_queue_behind_the_state_and_the_state_is_freed_before_they_have_left(monkeypatch, apart):
    setup = Behind(monkeypatch, apart=apart)
    for _ in range(2):
        assert setup.step() == [*BEGIN, *UPDATE, *STATE, *WEIGHTS, *OPEN]
        assert setup.report.moved_bytes["offload"] == setup.memory.status()["parameters"].bytes
        assert setup.report.moved_bytes["offload_others"] == setup.of_state.status()["optimizer"].bytes
        assert setup.report.seconds["offload"] > 0 and setup.report.seconds["offload_others"] > 0
    setup.assert_nothing_lost()


def test_the_weights_go_on_leaving_where_the_state_must_leave_first(monkeypatch):
    setup = Behind(monkeypatch)
    setup.engine.needed = 1 << 60
    assert setup.step() == [*BEGIN, *STATE, *UPDATE, *WEIGHTS, *OPEN]
    setup.engine.needed = 0
    setup.engine.fail["post_update"] = SHORT
    assert setup.step() == [*BEGIN, *UPDATE, *STATE, *UPDATE, *WEIGHTS, *OPEN]
    setup.assert_nothing_lost()


@pytest.mark.parametrize("others", [lambda optimizer: [], lambda optimizer: [Offloader(optimizer)]])
def test_the_weights_leave_during_the_update_where_no_state_is_pausable(monkeypatch, others):
    monkeypatch.setattr("rl_memory_plugins.trainer.offloading.on_accelerator", lambda tensor: True)
    setup = Behind(monkeypatch, others=others, apart=True)
    assert setup.step() == ["begin parameters", *UPDATE, *WEIGHTS, *OPEN]
    assert setup.report.moved_bytes["offload"] == setup.memory.status()["parameters"].bytes


def test_weights_that_slept_come_back_and_leave_during_the_update(monkeypatch):
    setup = Behind(monkeypatch)
    setup.handoff.sync()
    assert setup.link.log == ["begin parameters", *UPDATE, *WEIGHTS, *OPEN]
    setup.assert_nothing_lost()


def test_without_overlap_the_weights_leave_after_the_update(monkeypatch):
    setup = Behind(monkeypatch, overlap=False)
    assert setup.step() == ["begin optimizer", *STATE, *UPDATE, "begin parameters", *WEIGHTS[1:], *OPEN]


def test_from_host_nothing_is_copied_during_the_update(monkeypatch):
    setup = Behind(monkeypatch, from_host=True)
    assert setup.step() == ["begin optimizer", *STATE, "begin parameters", *WEIGHTS[1:], *UPDATE, *OPEN]


class Merging:
    """A source that writes to the weights for as long as it is used, and then restores every bit."""

    def __init__(self, model, source):
        self.model, self.source = model, source

    def specs(self):
        return self.source.specs()

    def tensors(self):
        former = self.model.wide.weight.detach().clone()
        with torch.no_grad():
            self.model.wide.weight.zero_()
        yield from self.source.tensors()
        with torch.no_grad():
            self.model.wide.weight.copy_(former)


def test_weights_that_a_source_may_write_leave_after_the_update(monkeypatch):
    setup = Behind(monkeypatch, source=Merging)
    assert setup.step() == ["begin optimizer", *UPDATE, *STATE, "begin parameters", *WEIGHTS[1:], *OPEN]
    setup.assert_nothing_lost()


def _saved(folder, tensors):
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder / "model.safetensors"


def test_which_sources_only_read(tmp_path):
    class Lazy(dict):
        pass

    class Made(UserDict):
        pass

    tensors = checkpoint(5)
    own = ModelSource(tensors)
    assert all(map(only_reads, [Paged(), tensors, Lazy(tensors), own, MegatronSource({}, lambda name: None)]))
    assert only_reads(CheckpointSource(_saved(tmp_path, tensors)))
    assert not any(map(only_reads, [Made(tensors), Merging(None, own), StreamSource([], list)]))
    for source, expected in ((own, True), (Merging(None, own), False)):
        quantised = QuantisedSource(source, {"quant_method": "fp8"}, ["a.weight", "a.weight_scale"])
        assert only_reads(quantised) is expected


def test_a_source_that_changes_how_another_reads_must_say_again_that_it_only_reads():
    """A `ModelSource` that merges adapters into the weights inherits what `ModelSource` says."""

    class Merged(ModelSource):
        def tensors(self):
            return Merging(self._model, ModelSource(self._model)).tensors()

    class Renamed(ModelSource):
        def _named(self):
            return super()._named()

    class Said(Merged):
        only_reads = True

    model = Paged()
    assert [only_reads(kind(model)) for kind in (Merged, Renamed, Said)] == [False, True, True]


def test_a_draft_that_may_write_counts_too(monkeypatch):
    setup = Behind(monkeypatch)
    own = setup.handoff._source
    assert RolloutHandoff([], own, draft=own)._only_read
    assert not RolloutHandoff([], own, draft=Merging(setup.model, own))._only_read


@pytest.mark.parametrize("call", UPDATE)
@pytest.mark.parametrize("again", ["sync", "training"])
def test_an_engine_that_fails_leaves_state_and_weights_on_the_device(monkeypatch, call, again):
    setup = Behind(monkeypatch)
    setup.engine.fail[call] = StateConflictError("busy")
    with pytest.raises(StateConflictError):
        setup.step()
    assert set(states(setup.memory).values()) == {AWAKE} and setup.link.under_way == 0
    if again == "sync":
        setup.link.log.clear()
        setup.handoff.sync()
        assert setup.link.log == [*BEGIN, *UPDATE, *STATE, *WEIGHTS, *OPEN]
        setup.assert_handed_over()
    setup.assert_nothing_lost()


@pytest.mark.parametrize(
    ("tag", "step", "left"), [("optimizer", "offload_others", AWAKE), ("parameters", "offload", ASLEEP)]
)
def test_a_copy_that_fails_leaves_its_tag_on_the_device(monkeypatch, tag, step, left):
    setup = Behind(monkeypatch)
    setup.link.failing[tag] = RuntimeError("an uncorrectable error")
    with pytest.raises(EngineFaultError, match="an uncorrectable error") as caught:
        setup.step()
    assert caught.value.details["step"] == step and not setup.engine.open and setup.link.under_way == 0
    assert states(setup.memory)["parameters"] == AWAKE and states(setup.memory)["optimizer"] == left
    setup.handoff.sync()
    setup.assert_handed_over()
    setup.assert_nothing_lost()


@pytest.mark.parametrize("apart", [False, True], ids=["one memory", "two memories"])
def test_copies_that_fail_too_hide_no_error_of_the_engine(monkeypatch, apart):
    """And each memory is as before: what an abort could not copy is on the device."""
    setup = Behind(monkeypatch, apart=apart)
    memories = dict.fromkeys([setup.memory, setup.of_state])
    setup.engine.fail["post_update"] = StateConflictError("busy")
    setup.link.failing = {tag: RuntimeError("an uncorrectable error") for tag in ("optimizer", "parameters")}
    with pytest.raises(StateConflictError, match="busy"):
        setup.step()
    assert setup.link.under_way == 0 and not setup.link.failing
    for memory in memories:
        assert set(states(memory).values()) == {AWAKE}
        assert all(one.host_bytes == 0 for one in memory.status().values())
    setup.assert_nothing_lost()


def test_a_tag_may_be_named_among_both(monkeypatch):
    setup = Behind(monkeypatch, others=lambda optimizer: [])
    both = [setup.memory.part("optimizer", "parameters", "gradients")]
    setup.handoff._parts.others = [*both, *setup.handoff._parts.others]
    assert setup.step() == [*BEGIN, *UPDATE, *STATE, *WEIGHTS, *OPEN]
    setup.assert_nothing_lost()


def test_tags_that_were_prepared_together_leave_one_after_the_other():
    model = Paged()
    optimizer = adamw(model)
    memory = PausableMemory(model, optimizer)
    learn(model, optimizer)
    expected = [tensor.clone() for tensor in everything(model, optimizer)]
    memory.prepare_sleep(["optimizer", "parameters"])
    memory.begin()
    first = memory.commit(tags=["optimizer"])
    assert [change.tag for change in first.changes] == ["optimizer"]
    assert states(memory)["parameters"] == AWAKE and states(memory)["optimizer"] == ASLEEP
    with pytest.raises(StateConflictError, match="call commit or abort first"):
        memory.wake(["optimizer"])
    second = memory.commit()
    assert [change.tag for change in second.changes] == ["parameters"]
    assert "adopt" in first.seconds and "adopt" not in second.seconds
    with pytest.raises(StateConflictError, match="no sleep or wake is prepared"):
        memory.commit()
    memory.wake()
    memory.sleep(["optimizer"])
    memory.prepare_sleep(["optimizer", "parameters"])
    assert memory.commit(tags=["optimizer"]).changes == []  # it sleeps already
    memory.abort()
    memory.wake()
    assert all(torch.equal(*pair) for pair in zip(everything(model, optimizer), expected, strict=True))


# -- room ---------------------------------------------------------------------------------------------------


def known(weights, free, everything=None, leaving=None, cache=None):
    return Room(Needs(weights, everything), free, leaving or {}, cache or {})


@pytest.mark.parametrize(
    ("rooms", "expected"),
    [
        ([known({}, {})], True),
        ([known({"GPU-a": 2 * GiB}, {"GPU-a": 2 * GiB + ROOM_BYTES})], True),
        ([known({"GPU-a": 2 * GiB}, {"GPU-a": 2 * GiB + ROOM_BYTES - 1})], False),
        ([known({"GPU-a": 2 * GiB}, {"GPU-b": 0})], True),  # no trainer is on the engine's GPU
        ([known({"GPU-a": 2 * GiB, "GPU-b": GiB}, {"GPU-a": 80 * GiB}), known({}, {"GPU-b": GiB})], False),
        ([known({"GPU-a": 40 * GiB}, {"GPU-a": 80 * GiB}), known({"GPU-a": 40 * GiB}, {"GPU-a": 80 * GiB})], False),
        ([known(None, {"GPU-a": 80 * GiB}), known({}, {"GPU-b": 80 * GiB})], False),
        ([known({"cpu:0": GiB, "cpu:1": GiB}, {"cpu:0": ROOM_BYTES + 2 * GiB - 1})], False),
    ],
)
def test_all_engines_must_fit_on_their_devices(rooms, expected):
    assert suffices(rooms) is expected


@pytest.mark.parametrize(
    ("rooms", "expected"),
    [
        ([known({}, {"GPU-a": AMPLE_BYTES}, {})], True),
        ([known({"GPU-a": GiB}, {"GPU-a": 5 * GiB}, {"GPU-a": 9 * GiB}, {"GPU-a": AMPLE_BYTES + 4 * GiB})], True),
        ([known({"GPU-a": GiB}, {"GPU-a": 5 * GiB}, {"GPU-a": 9 * GiB}, {"GPU-a": AMPLE_BYTES + 4 * GiB - 1})], False),
        ([known({"GPU-a": GiB}, {"GPU-a": 5 * GiB - 1}, {"GPU-a": GiB}, {"GPU-a": 80 * GiB})], False),
        ([known({"GPU-a": GiB}, {"GPU-a": 80 * GiB}, None)], False),  # an engine does not tell
        ([known({}, {"GPU-a": 80 * GiB}, {}), known({}, {"GPU-b": AMPLE_BYTES - 1}, {})], False),
        ([known({}, {"cpu:0": AMPLE_BYTES}, {}), known({}, {"cpu:1": AMPLE_BYTES}, {"cpu:1": 1})], False),
    ],
)
def test_caches_stay_only_beside_ample_memory(rooms, expected):
    assert is_ample(rooms) is expected


def test_only_what_is_awake_will_leave_and_once():
    model = Paged()
    optimizer = adamw(model)
    memory = PausableMemory(model, optimizer)
    learn(model, optimizer)
    tags, status = ["optimizer", "parameters", "parameters"], memory.status()
    both = {tag: status[tag].bytes for tag in tags}
    assert all(both.values())
    [leaving] = room(Needs({}, {}), {memory: tags}).leaving.values()
    assert leaving == sum(both.values())
    memory.sleep(["optimizer"])
    [leaving] = room(Needs({}, {}), {memory: tags}).leaving.values()
    assert leaving == both["parameters"]


def test_errors_that_tell_of_scarce_memory():
    assert lacks_memory(SHORT) and lacks_memory(UNTYPED)
    assert not lacks_memory(WeightUpdateError("TypeError: no", type="TypeError"))
    assert lacks_memory(
        WeightUpdateError("DistBackendError: NCCL: Cuda failure 'out of memory'", type="DistBackendError")
    )
    assert not lacks_memory(InvalidRequestError("no"))


def test_an_engine_object_tells_what_its_weights_need():
    class Status:
        device = "cpu:0"
        tags = {"weights": PausableMemory(Paged()).status()["parameters"]}

    class Asleep:
        device = "cpu:1"
        tags = {"weights": type("Tag", (), {"state": TagState.DISCARDED, "bytes": 7})}

    class Llm:
        def memory_status(self):
            return [type("Engine", (), {"ranks": [Status, Asleep]})]

    assert EngineObject(Llm()).asleep_bytes("weights") == [("cpu:0", 0), ("cpu:1", 7)]


@pytest.mark.parametrize("error", [RLMemoryError("cannot reach it"), TimeoutError("an actor"), KeyError("weights")])
def test_an_engine_that_fails_to_tell_its_need_needs_nothing(error):
    def fails(tag):
        raise error

    well, dead = ToyEngine(), ToyEngine()
    well.asleep_bytes, dead.asleep_bytes = lambda tag: [("GPU-0", GiB)], fails
    found = needs_of([well, dead])
    assert found.weights == {"GPU-0": GiB} and found.everything is None


# -- two processes ------------------------------------------------------------------------------------------


def handoff_of_two(rank, needed):
    """At each call of the engine of process 0: how the state of each process is. Process 1 has 8 GiB."""
    torch.manual_seed(0)
    model = torch.nn.Linear(512, 512)
    optimizer = adamw(model)
    memory = PausableMemory(model, optimizer)
    model(torch.ones(1, 512)).sum().backward()
    optimizer.step()
    expected = [tensor.clone() for tensor in tensors_in(optimizer)]
    memory.device_memory = lambda: (f"GPU-{rank}", 8 * GiB)
    engine = Engine()
    engine.memory = memory
    engine.asleep_bytes = lambda tag: [("GPU-0", GiB), ("GPU-1", needed)]
    handoff = RolloutHandoff(
        [engine] if rank == 0 else [],
        checkpoint(5),
        weights=[memory.part("parameters")],
        others=[memory.part("gradients", "optimizer")],
        bucket_bytes=256,
    )
    handoff.sync()
    found = list(engine.optimizer)
    memory.wake()
    return found, all(torch.equal(*pair) for pair in zip(tensors_in(optimizer), expected, strict=True))


@pytest.mark.parametrize(("needed", "expected"), [(GiB, BESIDE), (5 * GiB, BEFORE)])
def test_all_processes_take_the_same_way(pair, needed, expected):
    assert pair.run(handoff_of_two, needed) == [(expected, True), ([], True)]


def handoff_of_two_kinds(rank):
    """The weights of process 1 are in no `PausableMemory`. Returns: where the weights of process 0 go meanwhile."""
    torch.manual_seed(0)
    model = torch.nn.Linear(512, 512)
    memory = PausableMemory(model) if rank == 0 else None
    engine = Engine()
    handoff = RolloutHandoff(
        [engine] if rank == 0 else [],
        checkpoint(5),
        weights=[memory.part("parameters") if rank == 0 else model],
        bucket_bytes=256,
    )
    log = []
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            log = Link(patch, engine, memory).log
        handoff.sync()
    return log


def test_each_process_lets_leave_early_what_it_can(pair):
    assert pair.run(handoff_of_two_kinds) == [["begin parameters", *UPDATE, *WEIGHTS, *OPEN], []]


def handoff_of_two_without_host_memory(rank):
    """Process 1 has too little host memory for state and weights. Returns: the error, and what is awake after it."""
    torch.manual_seed(0)
    model = torch.nn.Linear(512, 512)
    optimizer = adamw(model)
    memory = PausableMemory(model, optimizer)
    memory.device_memory = lambda: ("cpu:0", AMPLE_BYTES - 1)
    model(torch.ones(1, 512)).sum().backward()
    optimizer.step()
    expected = [tensor.clone() for tensor in everything(model, optimizer)]
    handoff = RolloutHandoff(
        [],
        checkpoint(5),
        weights=[memory.part("parameters")],
        others=[memory.part("gradients", "optimizer")],
    )
    arena = memory._manager.arena
    arena._margin_bytes = rank << 60
    found = ""
    try:
        handoff.sync()
    except HostMemoryError as error:
        found = error.details["step"]
    awake = set(states(memory).values()) == {AWAKE}
    arena._margin_bytes = 0
    handoff.sync()
    asleep = {state for tag, state in states(memory).items() if tag != "gradients"} == {ASLEEP}
    memory.wake()
    same = all(torch.equal(*pair) for pair in zip(everything(model, optimizer), expected, strict=True))
    return found, awake, asleep, same


def test_too_little_host_memory_of_one_process_leaves_all_awake_on_both(pair):
    assert pair.run(handoff_of_two_without_host_memory) == [("offload_others", True, True, True)] * 2


def handoff_of_two_caches(rank, folder, tags):
    """The engine lacks memory until both processes have emptied their caches. Returns: whether it is open."""
    torch.manual_seed(0)
    model = torch.nn.Linear(512, 512)
    memory = PausableMemory(model)
    state = PausableMemory()
    state.adopt([torch.ones(512)], tag="state")
    memory.device_memory = state.device_memory = lambda: (f"GPU-{rank}", AMPLE_BYTES - 1)
    engine = Engine()
    wake = engine.wake_up

    def wake_up(asked=None):
        if asked == tags and len(list(folder.iterdir())) < 2:
            raise SHORT
        wake(asked)

    engine.wake_up = wake_up
    handoff = RolloutHandoff(
        [engine] if rank == 0 else [],
        checkpoint(5),
        weights=[memory.part("parameters")],
        others=[state.part("state")],
        bucket_bytes=256,
    )

    def empty_cache(step):
        time.sleep(0.5 * rank)  # garbage is collected
        (folder / str(rank)).touch()
        return 0.0

    handoff._parts.empty_cache = empty_cache
    handoff.sync()
    return engine.open


@pytest.mark.parametrize("tags", [["weights"], None], ids=str)
def test_an_engine_is_asked_again_once_all_processes_have_emptied_their_caches(pair, tmp_path, tags):
    assert pair.run(handoff_of_two_caches, tmp_path, tags)[0]
