"""Where a device has room for all of the engines beside all of the trainer, the trainer leaves behind open engines."""

import asyncio
import gc
import subprocess
import sys
import textwrap
import threading
import weakref
from contextlib import contextmanager, nullcontext, suppress
from types import SimpleNamespace

import pytest
import torch
from helpers import interrupts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_leaving import (
    ASLEEP,
    AWAKE,
    BEGIN,
    OPEN,
    SHORT,
    STATE,
    UPDATE,
    WEIGHTS,
    Behind,
    Cache,
    Engine,
    GiB,
    Link,
    Merging,
    everything,
    fail,
    known,
)
from test_overlap import narrow
from test_pausable import WIDTH, Paged, Tied, adamw, states, tensors_in, train
from toy_engine import ToyEngine
from toys import checkpoint

from rl_memory_plugins.errors import (
    DeviceMemoryError,
    EngineFaultError,
    RLMemoryError,
    StateConflictError,
)
from rl_memory_plugins.trainer import (
    AsyncRolloutHandoff,
    ModelSource,
    Offloader,
    PausableMemory,
    RolloutHandoff,
    handoff,
    offloading,
    parts,
    room,
)
from rl_memory_plugins.trainer.leaving import Leaving
from rl_memory_plugins.trainer.offloading import host_view
from rl_memory_plugins.trainer.room import AMPLE_BYTES, cache_may_stay, holds_all
from rl_memory_plugins.weights import later

LONG_S = 30.0
LOST = RuntimeError("an uncorrectable error")
BEHIND = ["wait for the device", "end optimizer", "free optimizer", "end parameters", "free parameters"]


GATES = []


@pytest.fixture(autouse=True)
def open_gates():
    """A test that has failed leaves no thread behind."""
    yield
    while GATES:
        GATES.pop().set()


def wide(monkeypatch, *memories, free=100 * GiB):
    for memory in memories:
        monkeypatch.setattr(memory, "device_memory", lambda: ("cpu:0", free))


def is_awake(memory):
    """Whether all is that has a copy: gradients leave without."""
    found = states(memory)
    return found["parameters"] == found["optimizer"] == AWAKE


class HeldLink(Link):
    """A link whose copies do not end while `gate` is closed."""

    def __init__(self, *arguments):
        self.gate = threading.Event()
        self.gate.set()
        GATES.append(self.gate)
        super().__init__(*arguments)

    def _begin(self, memory, copy):
        begin = super()._begin(memory, copy)

        def begin_held(pairs):
            wait = begin(pairs)

            def held():
                assert self.gate.wait(LONG_S)
                wait()

            return held

        return begin_held

    def _wait_for_all(self):
        assert not self.under_way or self.gate.wait(LONG_S)
        super()._wait_for_all()


class Ample(Behind):
    """As `Behind`, with ample room. No copy ends between the body of a step and `leave`."""

    def __init__(self, monkeypatch, **options):
        super().__init__(monkeypatch, link=HeldLink, **options)
        wide(monkeypatch, self.memory, self.of_state)

    @property
    def memories(self):
        return list(dict.fromkeys([self.memory, self.of_state]))

    def step(self):
        """A step up to its return. Returns: what the link and the engine have done."""
        with self.handoff.training() as self.report:
            self.learn()
            self.link.gate.clear()
            self.link.log.clear()
        assert self.engine.open
        return list(self.link.log)

    def leave(self):
        """Let the copies end. Returns: what the link has done."""
        self.link.log.clear()
        self.link.gate.set()
        for memory in self.memories:
            memory.wait()
        return self.link.log

    def assert_all_awake(self):
        assert states(self.memory)["parameters"] == states(self.of_state)["optimizer"] == AWAKE

    def assert_asleep(self):
        assert states(self.memory)["parameters"] == states(self.of_state)["optimizer"] == ASLEEP
        assert self.link.under_way == 0

    def assert_nothing_lost(self):
        self.link.gate.set()
        self.handoff.release()
        for memory in self.memories:
            memory.wait()
        here, there = everything(self.model, self.optimizer), everything(self.twin, self.twin_optimizer)
        assert all(torch.equal(*pair) for pair in zip(here, there, strict=True))


@contextmanager
def held_back(gate, run):
    """Run a function in a thread, which must not end before the gate opens. The context's value is its outcome."""
    outcome, was_open = [], []

    def keep():
        try:
            outcome.append(run())
        except Exception as error:
            outcome.append(error)
        was_open.append(gate.is_set())

    thread = threading.Thread(target=keep, daemon=True)
    thread.start()
    thread.join(0.1)  # one that does not wait has the time to end
    gate.set()
    thread.join(LONG_S)
    assert was_open == [True]
    yield outcome[0]


# -- a handoff ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("apart", [False, True], ids=["one memory", "two memories"])
def test_the_engine_opens_before_the_copies_have_ended(monkeypatch, apart):
    setup = Ample(monkeypatch, apart=apart)
    for _ in range(3):
        assert setup.step() == [*BEGIN, *UPDATE, *OPEN]
        setup.assert_all_awake()
        assert setup.report.moved_bytes["offload"] == setup.memory.status()["parameters"].bytes
        assert setup.report.moved_bytes["offload_others"] == setup.of_state.status()["optimizer"].bytes
        log = setup.leave()
        assert log == BEHIND if not apart else set(log) == set(BEHIND)
        setup.assert_asleep()
    setup.assert_nothing_lost()


def test_the_next_release_waits_before_the_engine_sleeps(monkeypatch):
    setup = Ample(monkeypatch)
    for _ in range(2):
        setup.step()
        setup.link.log.clear()
        with held_back(setup.link.gate, setup.handoff.release) as report:
            assert setup.link.log == [*BEHIND, "sleep"]
            assert report.seconds["offload"] > 0
        setup.memory.wait()
        setup.handoff.sync()
    setup.assert_nothing_lost()


def test_the_steps_count_what_leaves_as_gone_and_the_wait_for_it(monkeypatch):
    monkeypatch.setattr(parts, "own_device", lambda: torch.device("cpu"))
    setup = Ample(monkeypatch)
    setup.step()
    last = setup.report.steps[-1]
    held = sum(status.bytes for tag, status in setup.memory.status().items() if tag != "gradients")
    assert (last.name, last.trainer_bytes_before, last.trainer_bytes_after) == ("offload", held, 0)
    with held_back(setup.link.gate, setup.handoff.release) as report:
        first = report.steps[0]
        assert (first.name, first.trainer_bytes_before, first.trainer_bytes_after) == ("offload", held, 0)
        assert report.seconds["offload"] > 0
    setup.assert_nothing_lost()


def test_a_sync_waits_too(monkeypatch):
    setup = Ample(monkeypatch)
    setup.step()
    setup.link.log.clear()
    with held_back(setup.link.gate, setup.handoff.sync) as report:
        assert not isinstance(report, Exception)
        assert setup.link.log[: len(BEHIND)] == BEHIND and setup.engine.open
    setup.assert_nothing_lost()


def test_another_handoff_with_the_same_memory_waits(monkeypatch):
    setup = Ample(monkeypatch)
    own = setup.handoff._parts
    other = RolloutHandoff(ToyEngine(), checkpoint(5), weights=own.weights, others=own.others, bucket_bytes=256)
    setup.step()
    with held_back(setup.link.gate, other.sync) as report:
        assert report.moved_bytes["load"] > 0  # the weights had gone
    setup.assert_nothing_lost()


NOT_BEHIND = {
    "no overlap": {"overlap": False},
    "from the host": {"from_host": True},
    "goes on without engines": {"on_failure": "continue"},
    "a source that may write": {"source": Merging},
}


@pytest.mark.parametrize("why", [*NOT_BEHIND, "no room", "an engine does not tell", "ranks meet for a sleep", "gone"])
def test_the_engine_opens_behind_the_trainer_where_it_must(monkeypatch, why):
    setup = Behind(monkeypatch, **NOT_BEHIND.get(why, {}))
    wide(monkeypatch, setup.memory)
    if why == "no room":
        narrow(monkeypatch, setup.memory)
    elif why == "an engine does not tell":
        monkeypatch.setattr(setup.engine, "asleep_bytes", lambda tag: fail())
    elif why == "ranks meet for a sleep":
        monkeypatch.setattr(PausableMemory, "process_groups", [object()])
    elif why == "gone":
        told = [100 * GiB, AMPLE_BYTES - 1]  # another process has taken the rest
        monkeypatch.setattr(setup.memory, "device_memory", lambda: ("cpu:0", told.pop(0)))
    assert setup.step()[-1:] == OPEN
    assert set(states(setup.memory).values()) == {ASLEEP, "discarded"}
    assert setup.memory._leaves is None


def test_what_the_engine_wakes_must_fit_beside_all(monkeypatch):
    setup = Ample(monkeypatch)
    setup.engine.needed, setup.engine.cache = 30 * GiB, 100 * GiB - AMPLE_BYTES - 30 * GiB
    assert setup.step() == [*BEGIN, *UPDATE, *OPEN]
    setup.leave()
    setup.engine.cache += 1
    with setup.handoff.training():
        setup.learn()
        setup.link.log.clear()
    assert setup.link.log == [*BEGIN, *UPDATE, *STATE, *WEIGHTS, *OPEN]
    setup.assert_nothing_lost()


def test_the_cache_goes_after_the_last_copy(monkeypatch):
    setup = Ample(monkeypatch)
    cache = Cache(monkeypatch, setup, 100 * GiB)
    setup.step()
    assert cache.emptied == []
    setup.leave()
    assert cache.emptied == ["sleep", "offload"] and cache.beside == [ASLEEP]


def noting_frees(monkeypatch, link):
    """An update frees what it has allocated on a GPU by adding "free the slots" to the link's log."""
    push = handoff.push_from_all

    def push_from_all(*arguments, **options):
        report = push(*arguments, **options)
        later.free(lambda: link.log.append("free the slots"))
        return report

    monkeypatch.setattr(handoff, "push_from_all", push_from_all)


@pytest.mark.parametrize("apart", [False, True], ids=["one memory", "two memories"])
def test_what_the_update_has_allocated_is_freed_after_the_last_copy(monkeypatch, apart):
    """The driver would wait for the copies."""
    setup = Ample(monkeypatch, apart=apart)
    noting_frees(monkeypatch, setup.link)
    for _ in range(2):
        assert setup.step() == [*BEGIN, *UPDATE, *OPEN]
        log = setup.leave()
        assert log[-1] == "free the slots" and log.count("free the slots") == 1
    setup.assert_nothing_lost()


def test_without_room_it_is_freed_by_the_update(monkeypatch):
    setup = Ample(monkeypatch)
    narrow(monkeypatch, setup.memory)
    noting_frees(monkeypatch, setup.link)
    with setup.handoff.training():
        setup.learn()
        setup.link.log.clear()
    assert setup.link.log.index("free the slots") < setup.link.log.index(WEIGHTS[-1])


def test_it_is_freed_before_the_trainer_makes_room_for_an_engine(monkeypatch):
    setup = Ample(monkeypatch)
    noting_frees(monkeypatch, setup.link)
    wake, seen = setup.engine.wake_up, []

    def wake_up(asked=None):
        if asked is None:
            seen.append("free the slots" in setup.link.log)
            if len(seen) == 1:
                setup.link.gate.set()
                raise SHORT
        wake(asked)

    monkeypatch.setattr(setup.engine, "wake_up", wake_up)
    setup.step()
    assert seen == [False, True]


def test_it_is_freed_in_the_end_if_the_trainer_fails_to_leave(monkeypatch):
    setup = Ample(monkeypatch)
    noting_frees(monkeypatch, setup.link)
    setup.link.failing["parameters"] = LOST
    setup.step()
    setup.link.gate.set()
    with pytest.raises(EngineFaultError):
        setup.handoff.release()
    assert setup.link.log.count("free the slots") == 1
    setup.assert_nothing_lost()


def test_it_is_freed_if_the_engine_does_not_open(monkeypatch):
    setup = Ample(monkeypatch)
    noting_frees(monkeypatch, setup.link)
    wake = setup.engine.wake_up

    def wake_up(asked=None):
        if asked is None:
            setup.link.gate.set()
            raise StateConflictError("busy")
        wake(asked)

    monkeypatch.setattr(setup.engine, "wake_up", wake_up)
    with pytest.raises(StateConflictError):
        setup.step()
    assert setup.link.log.count("free the slots") == 1


def test_an_engine_that_lacks_memory_after_all_opens_once_the_trainer_has_left(monkeypatch):
    setup = Ample(monkeypatch)
    cache = Cache(monkeypatch, setup, 100 * GiB)
    wake, refused = setup.engine.wake_up, []

    def wake_up(asked=None):
        if asked is None and not refused:
            refused.append(states(setup.memory)["parameters"])
            setup.link.gate.set()
            raise SHORT
        if refused:
            assert cache.emptied == ["offload_others"]
        wake(asked)

    monkeypatch.setattr(setup.engine, "wake_up", wake_up)
    assert setup.step() == [*BEGIN, *UPDATE, *STATE, *WEIGHTS, *OPEN]
    assert refused == [AWAKE]
    assert setup.report.moved_bytes["offload"] == setup.memory.status()["parameters"].bytes
    assert setup.memory._leaves is None
    setup.assert_asleep()
    monkeypatch.setattr(setup.engine, "wake_up", wake)
    assert setup.step() == [*BEGIN, *UPDATE, *OPEN]
    setup.assert_nothing_lost()


def test_an_engine_that_lacks_memory_for_the_update_is_asked_again_and_opens_behind_the_trainer(monkeypatch):
    setup = Ample(monkeypatch)
    fails = iter([True])
    post = setup.engine.post_update

    def post_update(body):
        if next(fails, False):
            setup.link.gate.set()
            raise SHORT
        return post(body)

    monkeypatch.setattr(setup.engine, "post_update", post_update)
    assert setup.step() == [*BEGIN, "wake_up", *STATE, *UPDATE, *WEIGHTS, *OPEN]
    setup.assert_nothing_lost()


def test_an_engine_that_does_not_open_for_another_reason_leaves_the_trainer_awake(monkeypatch):
    setup = Ample(monkeypatch)
    wake = setup.engine.wake_up

    def wake_up(asked=None):
        if asked is None:
            setup.link.gate.set()
            raise StateConflictError("busy")
        wake(asked)

    monkeypatch.setattr(setup.engine, "wake_up", wake_up)
    with pytest.raises(StateConflictError) as caught:
        setup.step()
    assert caught.value.details["step"] == "wake_kv_cache" and setup.link.under_way == 0
    setup.assert_all_awake()
    monkeypatch.setattr(setup.engine, "wake_up", wake)
    setup.handoff.sync()
    assert setup.engine.open
    setup.leave()
    setup.assert_asleep()
    setup.assert_nothing_lost()


@pytest.mark.parametrize("apart", [False, True], ids=["one memory", "two memories"])
@pytest.mark.parametrize("tag", ["optimizer", "parameters"])
@pytest.mark.parametrize("half", ["release", "sync", "training"])
def test_what_fails_to_leave_is_awake_and_the_next_half_says_so_once(monkeypatch, half, tag, apart):
    setup = Ample(monkeypatch, apart=apart)
    setup.link.failing[tag] = LOST
    setup.step()
    setup.link.gate.set()
    calls = {"release": setup.handoff.release, "sync": setup.handoff.sync, "training": setup.step}
    with pytest.raises(EngineFaultError, match=r"uncorrectable error\. It was an error of the sleep") as caught:
        calls[half]()
    assert caught.value.details["step"] == "offload" and setup.engine.open
    assert states(setup.of_state if tag == "optimizer" else setup.memory)[tag] == AWAKE
    left = states(setup.of_state)["optimizer"] if tag == "parameters" else states(setup.memory)["parameters"]
    assert left == (ASLEEP if apart or tag == "parameters" else AWAKE)
    if half == "sync":
        setup.handoff.sync()
    else:
        setup.step()
    assert setup.engine.open
    setup.assert_nothing_lost()


def test_a_release_that_fails_is_told_too_and_loses_nothing(monkeypatch):
    setup = Ample(monkeypatch)
    setup.step()
    release = setup.memory._allocator.release

    def failing(tag):
        if tag == "optimizer":
            raise LOST
        return release(tag)

    monkeypatch.setattr(setup.memory._allocator, "release", failing)
    setup.link.gate.set()
    with pytest.raises(EngineFaultError, match="uncorrectable"):
        setup.handoff.release()
    monkeypatch.setattr(setup.memory._allocator, "release", release)
    setup.step()
    setup.assert_nothing_lost()


def test_a_task_of_an_event_loop_goes_on_while_the_trainer_leaves(monkeypatch):
    setup = Ample(monkeypatch)
    handoff = AsyncRolloutHandoff.__new__(AsyncRolloutHandoff)
    handoff._handoff = setup.handoff

    async def step():
        async with handoff.training():
            setup.learn()
            setup.link.gate.clear()

    for _ in range(2):
        asyncio.run(step())
        assert setup.engine.open
        setup.assert_all_awake()
        setup.leave()
        setup.assert_asleep()
    setup.assert_nothing_lost()


# -- two processes ------------------------------------------------------------------------------------------


def handoff_of_two_that_leave_behind(rank, fails):
    """The copies of process 1 may fail. Returns: what was awake after `sync`; the error of `release`, by its parts."""
    torch.manual_seed(0)
    model = torch.nn.Linear(512, 512)
    optimizer = adamw(model)
    memory = PausableMemory(model, optimizer)
    model(torch.ones(1, 512)).sum().backward()
    optimizer.step()
    expected = [tensor.clone() for tensor in everything(model, optimizer)]
    memory.device_memory = lambda: (f"GPU-{rank}", 100 * GiB)
    engine = Engine()
    engine.asleep_bytes = lambda tag: [("GPU-0", GiB), ("GPU-1", GiB)]
    handoff = RolloutHandoff(
        [engine] if rank == 0 else [],
        checkpoint(5),
        weights=[memory.part("parameters")],
        others=[memory.part("gradients", "optimizer")],
        bucket_bytes=256,
    )
    found = ()
    with pytest.MonkeyPatch.context() as patch:
        link = HeldLink(patch, engine, memory)
        link.gate.clear()
        if fails and rank == 1:
            link.failing["parameters"] = LOST
        handoff.sync()
        awake = is_awake(memory)
        link.gate.set()
        try:
            handoff.release()
        except RLMemoryError as error:
            found = (type(error).__name__, error.details["step"], error.details.get("trainer_rank", rank))
            handoff.release()
    closed = rank == 1 or not engine.open
    memory.wait()
    same = all(torch.equal(*pair) for pair in zip(everything(model, optimizer), expected, strict=True))
    return awake, found, closed, same


@pytest.mark.parametrize("fails", [False, True])
def test_a_copy_that_fails_behind_on_one_process_is_an_error_of_all(pair, fails):
    error = ("EngineFaultError", "offload", 1) if fails else ()
    assert pair.run(handoff_of_two_that_leave_behind, fails) == [(True, error, True, True)] * 2


def handoff_of_two_without_room_on_one(rank):
    """The device of process 1 has no room for all. Returns: what was awake after `sync`."""
    memory = PausableMemory(torch.nn.Linear(512, 512))
    state = PausableMemory()
    state.adopt([torch.ones(4096)], tag="state")
    memory.device_memory = state.device_memory = lambda: (f"GPU-{rank}", AMPLE_BYTES - rank)
    handoff = RolloutHandoff([], {}, weights=[memory.part("parameters")], others=[state.part("state")])
    with pytest.MonkeyPatch.context() as patch:
        link = HeldLink(patch, Engine(), memory)
        if rank == 0:
            link.gate.clear()
            threading.Timer(0.5, link.gate.set).start()
        handoff.sync()
        return states(memory)["parameters"], states(state)["state"]


def test_no_process_leaves_behind_where_one_lacks_room(pair):
    assert pair.run(handoff_of_two_without_room_on_one) == [(ASLEEP, ASLEEP)] * 2


def memory_with_groups(rank):
    """Returns: what slept when `commit_behind` returned, and whether `then` had been called; then after a handoff."""
    import torch.distributed as dist

    memory = PausableMemory(torch.nn.Linear(512, 512), process_groups=[dist.group.WORLD])
    state = PausableMemory()
    state.adopt([torch.ones(4096)], tag="state")
    called = []
    memory.prepare_sleep()
    memory.begin()
    sizes = memory.commit_behind(lambda: called.append(True))
    found = states(memory)["parameters"], called, sizes["parameters"] > 0
    memory.wake()
    memory.device_memory = state.device_memory = lambda: (f"GPU-{rank}", 100 * GiB)
    RolloutHandoff([], {}, weights=[memory.part("parameters")], others=[state.part("state")]).sync()
    return *found, states(memory)["parameters"], states(state)["state"]


def test_ranks_that_sleep_together_do_not_leave_behind(pair):
    assert pair.run(memory_with_groups) == [(ASLEEP, [True], True, ASLEEP, ASLEEP)] * 2


# -- room ---------------------------------------------------------------------------------------------------


def rooms(*found):
    return [known(*one)._replace(behind=True) for one in found]


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (rooms(({}, {"GPU-a": AMPLE_BYTES}, {})), True),
        (rooms(({}, {"GPU-a": AMPLE_BYTES - 1}, {}, {"GPU-a": GiB})), False),  # what leaves does not count
        (rooms(({"GPU-a": GiB}, {"GPU-a": 9 * GiB + AMPLE_BYTES}, {"GPU-a": 9 * GiB})), True),
        (rooms(({"GPU-a": GiB}, {"GPU-a": 9 * GiB + AMPLE_BYTES - 1}, {"GPU-a": 9 * GiB})), False),
        (rooms(({"GPU-a": GiB}, {"GPU-a": 80 * GiB}, None)), False),
        (rooms((None, {"GPU-a": 80 * GiB}, None)), False),
        (rooms(({}, {"GPU-a": 80 * GiB}, {}), ({}, {"GPU-b": AMPLE_BYTES - 1}, {})), False),
        ([*rooms(({}, {"GPU-a": 80 * GiB}, {})), known({}, {"GPU-b": 80 * GiB}, {})], False),
    ],
)
def test_all_must_fit_at_once_on_all_devices(found, expected):
    assert holds_all(found) is expected


ROOM = AMPLE_BYTES + 10 * GiB


@pytest.mark.parametrize(
    ("free", "cache", "behind", "expected"),
    [
        (ROOM, 0, True, True),
        (ROOM, 30 * GiB, True, True),  # it holds all with the cache
        (ROOM - 1, 1, True, False),  # only without
        (ROOM - 2, 1, True, True),  # neither way: so the cache goes while the engines wake
        (ROOM - 1, 1, False, True),
        (5 * GiB, AMPLE_BYTES + 5 * GiB, True, False),
        (5 * GiB - 1, AMPLE_BYTES + 5 * GiB, True, False),
        (5 * GiB - 1, 0, True, False),  # not even the weights fit
    ],
)
def test_a_cache_does_not_keep_the_engines_from_opening_early(free, cache, behind, expected):
    one = known({"GPU-a": GiB}, {"GPU-a": free}, {"GPU-a": 10 * GiB}, {"GPU-a": 40 * GiB}, {"GPU-a": cache})
    assert cache_may_stay([one._replace(behind=behind)]) is expected


def test_caches_of_two_processes_add_up():
    one = known({}, {"GPU-a": ROOM - 2}, {"GPU-a": 5 * GiB}, {"GPU-a": 40 * GiB}, {"GPU-a": 1})
    assert not cache_may_stay([one._replace(behind=True)] * 2)


def test_a_cache_that_could_stay_is_emptied_if_it_hinders(monkeypatch):
    setup = Ample(monkeypatch)
    setup.step()
    setup.leave()
    held = [30 * GiB]
    empty_cache = setup.handoff._parts.empty_cache

    def empty(step):
        held[0] = 0
        return empty_cache(step)

    monkeypatch.setattr(setup.memory, "device_memory", lambda: ("cpu:0", AMPLE_BYTES - 1 + 30 * GiB - held[0]))
    monkeypatch.setattr(room, "cached_bytes", lambda device: held[0])
    monkeypatch.setattr(setup.handoff._parts, "empty_cache", empty)
    monkeypatch.setattr(handoff, "torch", SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: True)))
    assert setup.step() == [*BEGIN, *UPDATE, *OPEN]
    setup.leave()
    setup.assert_nothing_lost()


# -- a memory -----------------------------------------------------------------------------------------------


class Gate:
    """Holds back the copies of a memory to the host until it is open. Then a copy may fail."""

    def __init__(self, monkeypatch, memory):
        self._opened = threading.Event()
        GATES.append(self)
        self.failures = []
        device = memory._manager.device
        self._copy = device.begin_copy_to_host
        monkeypatch.setattr(device, "begin_copy_to_host", self._begin)

    def _begin(self, pairs):
        def wait():
            assert self._opened.wait(LONG_S)
            if self.failures:
                raise self.failures.pop(0)
            self._copy(pairs)

        return wait

    def set(self):
        self._opened.set()

    def clear(self):
        self._opened.clear()

    def is_set(self):
        return self._opened.is_set()


class Setup:
    """A trainer that has stepped twice, and whose memory leaves behind it; and an undisturbed twin."""

    def __init__(self, monkeypatch):
        self.twin, self.model = Tied(width=WIDTH), Tied(width=WIDTH)
        self.twin_optimizer, self.optimizer = adamw(self.twin), adamw(self.model)
        self.memory = PausableMemory(self.model, self.optimizer)
        for _ in range(2):
            self.train()
        self.state = tensors_in(self.optimizer)
        self.gate = Gate(monkeypatch, self.memory)

    def train(self):
        assert train(self.model, self.optimizer) == train(self.twin, self.twin_optimizer)

    def leave(self, **options):
        self.memory.prepare_sleep()
        self.memory.begin()
        return self.memory.commit_behind(**options)

    def assert_nothing_lost(self):
        self.memory.wake()
        here, there = everything(self.model, self.optimizer), everything(self.twin, self.twin_optimizer)
        assert all(torch.equal(*pair) for pair in zip(here, there, strict=True))
        self.train()


@pytest.fixture
def setup(monkeypatch):
    return Setup(monkeypatch)


USES = {
    "wait": lambda setup: setup.memory.wait(),
    "sleep": lambda setup: setup.memory.sleep(),
    "wake": lambda setup: setup.memory.wake(),
    "wake(wait=False)": lambda setup: setup.memory.wake(wait=False),
    "prepare_sleep": lambda setup: setup.memory.prepare_sleep(),
    "prepare_wake": lambda setup: setup.memory.prepare_wake(["optimizer"]),
    "region": lambda setup: setup.memory.region("mine").__enter__(),
    "adopt": lambda setup: setup.memory.adopt([torch.ones(8)], tag="mine"),
    "free_host_memory": lambda setup: setup.memory.free_host_memory(),
    "close": lambda setup: setup.memory.close(),
    "host_view": lambda setup: host_view(setup.state[0]),
    "is_awake": lambda setup: setup.memory.part("optimizer").is_awake(),
    "step": lambda setup: setup.optimizer.step(),
    "state_dict": lambda setup: setup.optimizer.state_dict(),
    "load_state_dict": lambda setup: setup.optimizer.load_state_dict(setup.twin_optimizer.state_dict()),
}
REFUSED = {"step", "state_dict"}


@pytest.mark.parametrize("use", USES)
def test_every_use_of_the_memory_waits(setup, use):
    setup.leave()
    with held_back(setup.gate, lambda: USES[use](setup)) as outcome:
        if use in REFUSED:
            assert isinstance(outcome, StateConflictError) and "is asleep: wake(['optimizer']) first" in str(outcome)
        else:
            assert not isinstance(outcome, Exception)
    setup.memory.abort()
    if use == "close":
        assert set(states(setup.memory).values()) == {AWAKE}
    elif use != "load_state_dict":
        setup.assert_nothing_lost()


def test_what_touches_no_tensor_does_not_wait(setup):
    setup.leave()
    assert is_awake(setup.memory)
    setup.memory.device_memory()
    setup.memory.abort()  # nothing is prepared
    assert not setup.memory._adopt_state(setup.optimizer)  # a step of another optimiser ends
    assert is_awake(setup.memory)
    setup.gate.set()
    setup.memory.wait()
    assert set(states(setup.memory).values()) == {ASLEEP, "discarded"}
    setup.assert_nothing_lost()


def test_the_status_bears_a_copy_that_another_thread_replaces(setup):
    class Replaced(dict):
        def __contains__(self, tag):
            return True  # until somebody looks

    setup.memory._manager._backups = Replaced()
    assert all(one.host_bytes == 0 for one in setup.memory.status().values())


def test_it_tells_what_leaves_and_calls_a_function_behind(setup):
    found = []

    def then():
        found.append((threading.current_thread() is threading.main_thread(), states(setup.memory)["optimizer"]))

    assert setup.leave(then=then) == {tag: one.bytes for tag, one in setup.memory.status().items()}
    setup.gate.set()
    setup.memory.wait()
    assert found == [(False, ASLEEP)]
    setup.memory.wake(["parameters"])
    assert setup.leave().keys() == {"parameters"}
    setup.assert_nothing_lost()


def test_a_failure_of_what_follows_says_that_all_sleeps(setup, caplog):
    def then():
        raise RuntimeError("the cache")

    setup.memory.prepare_sleep()
    setup.memory.commit_behind(then)
    setup.gate.set()
    with pytest.raises(RLMemoryError, match=r"the cache\. It was an error of what follows the sleep .* is asleep"):
        setup.memory.wait()
    assert states(setup.memory)["parameters"] == ASLEEP
    assert "has left, but what follows failed" in caplog.text and "did not leave" not in caplog.text
    setup.memory.wait()
    setup.assert_nothing_lost()


def test_gradients_are_dropped_at_once(setup):
    setup.model(torch.tensor([[1, 2, 3]])).sum().backward()
    setup.memory.prepare_sleep()
    setup.memory.commit_behind()  # without `begin`, the thread starts the copies
    assert all(parameter.grad is None for parameter in setup.model.parameters())
    setup.gate.set()
    setup.assert_nothing_lost()


def test_only_a_prepared_sleep_leaves(setup):
    with pytest.raises(StateConflictError, match="no sleep is prepared"):
        setup.memory.commit_behind()
    setup.leave()
    with pytest.raises(StateConflictError, match="no sleep is prepared"):
        setup.memory.commit_behind()
    setup.gate.set()
    setup.memory.prepare_wake()
    with pytest.raises(StateConflictError, match="no sleep is prepared"):
        setup.memory.commit_behind()
    setup.memory.abort()
    setup.assert_nothing_lost()


@pytest.mark.parametrize("use", ["wait", "sleep", "wake", "step", "close", "host_view"])
def test_a_failure_is_told_once_by_the_next_use(setup, use):
    setup.gate.failures.append(LOST)
    setup.leave()
    setup.gate.set()
    with pytest.raises(EngineFaultError, match=r"uncorrectable error\. .* what it has not put to sleep is awake"):
        USES[use](setup)
    assert is_awake(setup.memory)
    setup.memory.wait()
    setup.train()
    setup.memory.sleep()
    setup.assert_nothing_lost()


def test_an_error_of_the_function_behind_is_told_too(setup):
    setup.leave(then=lambda: 1 // 0)
    setup.gate.set()
    with pytest.raises(EngineFaultError, match="ZeroDivisionError"):
        setup.memory.wait()
    assert states(setup.memory)["optimizer"] == ASLEEP
    setup.assert_nothing_lost()


def test_an_interrupted_wait_can_be_made_again(setup):
    setup.leave()
    waiting = threading.Event()
    waiting.set()
    with interrupts(waiting), pytest.raises(KeyboardInterrupt):
        setup.memory.wait()
    with held_back(setup.gate, setup.memory.wait):
        assert states(setup.memory)["optimizer"] == ASLEEP
    setup.assert_nothing_lost()


@pytest.mark.parametrize("fails", [False, True])
def test_without_threads_the_call_itself_frees_the_memory(setup, monkeypatch, fails):
    def start(thread):
        raise RuntimeError("can't start new thread")

    setup.gate.set()
    setup.gate.failures += [LOST] if fails else []
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        setup.leave()
    assert states(setup.memory)["optimizer"] == (AWAKE if fails else ASLEEP)
    if fails:
        with pytest.raises(EngineFaultError, match="uncorrectable"):
            setup.memory.wait()
    setup.assert_nothing_lost()


@pytest.mark.parametrize("begun", [True, False])
def test_an_interrupt_while_the_thread_starts_loses_nothing(setup, monkeypatch, begun):
    start = threading.Thread.start

    def interrupted(thread):
        leaves = thread.name == "rl-memory-leaving"
        if begun or not leaves:
            start(thread)
        if leaves:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            setup.leave()
    setup.memory.abort()  # as a handoff does after an error
    with held_back(setup.gate, setup.memory.wait):
        assert states(setup.memory)["optimizer"] == ASLEEP
    setup.assert_nothing_lost()


@pytest.mark.parametrize("fails", [False, True])
def test_a_wake_of_another_memory_that_lacks_room_waits_for_what_leaves(setup, monkeypatch, fails):
    other = PausableMemory()
    kept = [torch.ones(1 << 20)]
    other.adopt(kept, tag="mine")
    other.sleep()
    monkeypatch.setattr(
        "rl_memory_plugins.memory.host.free_host_bytes",
        lambda: 0 if states(setup.memory)["optimizer"] == AWAKE else 100 * GiB,
    )
    setup.gate.failures += [LOST] if fails else []
    setup.leave()
    with held_back(setup.gate, other.wake) as outcome:
        assert isinstance(outcome, DeviceMemoryError) is fails
    with pytest.raises(EngineFaultError, match="uncorrectable") if fails else nullcontext():
        setup.memory.wait()  # the error is still this memory's own
    monkeypatch.undo()
    other.close()
    setup.assert_nothing_lost()


def test_a_load_that_lacks_room_waits_for_what_leaves(setup, monkeypatch):
    tensor = torch.ones(1 << 10)
    offloader = Offloader(tensor, moves=lambda one: True)
    offloader.offload()
    fill = offloading._fill

    def lacking(copies):
        if states(setup.memory)["optimizer"] == AWAKE:
            raise torch.OutOfMemoryError
        fill(copies)

    monkeypatch.setattr(offloading, "_fill", lacking)
    setup.leave()
    with held_back(setup.gate, offloader.load) as outcome:
        assert outcome.bytes == tensor.nbytes
    assert bool((tensor == 1).all())
    setup.assert_nothing_lost()


def test_others_neither_wait_for_this_memory_nor_get_its_error(setup):
    engine, model = ToyEngine(), Paged()
    memory = PausableMemory(model)
    weights = [memory.part("parameters")]
    handoff = RolloutHandoff(
        engine, ModelSource(dict(model.sent)), weights=weights, bucket_bytes=256, overlap=False, from_host=True
    )
    handoff.release()
    setup.gate.failures.append(LOST)
    setup.leave()
    tensor = torch.ones(8)
    assert host_view(tensor) is tensor
    handoff.sync()
    assert engine.open and is_awake(setup.memory) and setup.memory._leaves is not None
    setup.gate.set()
    with pytest.raises(EngineFaultError, match="uncorrectable"):
        setup.memory.wait()
    setup.assert_nothing_lost()


def test_the_function_behind_may_not_use_the_memory(setup):
    setup.leave(then=setup.memory.wait)
    with held_back(setup.gate, setup.memory.wait) as outcome:
        assert isinstance(outcome, StateConflictError) and "must not use the memory" in str(outcome)
    setup.assert_nothing_lost()


def test_failures_behind_are_logged(monkeypatch, caplog):
    setup = Ample(monkeypatch, apart=True)
    setup.link.failing |= {"optimizer": LOST, "parameters": LOST}
    setup.step()
    setup.link.gate.set()
    with pytest.raises(EngineFaultError):
        setup.handoff.release()
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len([line for line in told if "did not leave" in line]) == 2
    assert len([line for line in told if "another memory failed to leave too" in line]) == 1
    setup.assert_nothing_lost()


def test_the_function_behind_is_called_once_after_the_last_memory(monkeypatch):
    memories = [PausableMemory(), PausableMemory()]
    kept = [torch.ones(1 << 16), torch.ones(1 << 16)]
    for memory, tensor in zip(memories, kept, strict=True):
        memory.adopt([tensor], tag="mine")
    first, second = (Gate(monkeypatch, memory) for memory in memories)
    leaving = Leaving([memories[0].part("mine")], [memories[1].part("mine")], early=True)
    leaving.prepare()
    leaving.begin()
    found = []
    leaving.commit_behind(lambda: found.append([states(memory)["mine"] for memory in memories]))
    first.set()
    memories[0].wait()
    assert found == []
    second.set()
    memories[1].wait()
    assert found == [[ASLEEP, ASLEEP]]
    for memory in memories:
        memory.close()


def test_too_little_memory_for_the_next_wake_is_its_own_error(setup, monkeypatch):
    setup.leave()
    setup.gate.set()
    with monkeypatch.context() as patch:
        patch.setattr("rl_memory_plugins.memory.host.free_host_bytes", lambda: 0)
        with pytest.raises(DeviceMemoryError):
            setup.memory.wake()
    assert states(setup.memory)["optimizer"] == ASLEEP
    setup.assert_nothing_lost()


def test_a_wait_in_a_capture_is_refused(setup):
    setup.leave()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(StateConflictError, match=r"call wait\(\) before"):
            setup.memory.wait()
    setup.gate.set()
    setup.assert_nothing_lost()


def test_a_memory_lives_until_it_has_left_and_then_as_long_as_its_tensors_sleep(setup):
    setup.leave()
    found = weakref.ref(setup.memory)
    del setup.memory
    gc.collect()
    assert found() is not None
    setup.gate.set()
    found().wait()
    gc.collect()
    found().wake()
    setup.train()
    gc.collect()
    assert found() is None


def test_tensors_may_be_freed_and_made_while_others_leave(setup):
    made = [torch.ones(1 << 16) for _ in range(4)]
    setup.memory.adopt(made, tag="scratch")
    setup.leave()
    made.clear()
    gc.collect()
    more = [torch.full((1 << 16,), 3.0) for _ in range(4)]  # perhaps at the addresses of those
    setup.gate.set()
    setup.memory.wait()
    assert all(bool((one == 3.0).all()) for one in more)
    setup.assert_nothing_lost()
    assert all(bool((one == 3.0).all()) for one in more)


def test_the_memory_of_a_dead_trainer_leaves_without_an_error(setup):
    setup.leave()
    memory = setup.memory
    setup.__dict__.pop("model"), setup.__dict__.pop("optimizer"), setup.__dict__.pop("state")
    gc.collect()
    setup.gate.set()
    memory.wait()
    memory.close()


SCRIPT = """
import os, sys, threading, time
import torch
from rl_memory_plugins.trainer import PausableMemory

memory = PausableMemory()
memory.adopt([torch.ones(1 << 20)], tag="mine")
device = memory._manager.device
copy, begun = device.begin_copy_to_host, threading.Event()

def begin(pairs):
    def wait():
        begun.set()
        time.sleep(1)
        copy(pairs)
    return wait

device.begin_copy_to_host = begin
memory.prepare_sleep()
memory.begin()
memory.commit_behind(lambda: print("left", str(memory.status()["mine"].state), flush=True))
begun.wait()
"""


def run_script(end):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(SCRIPT) + textwrap.dedent(end)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, sorted(done.stdout.splitlines()), done.stderr


@pytest.mark.parametrize(("end", "code"), [("", 0), ("sys.exit(3)", 3)])
def test_a_process_that_exits_meanwhile_waits_and_ends_cleanly(end, code):
    assert run_script(end) == (code, ["left preserved"], "")


def test_a_child_by_fork_has_nothing_to_wait_for():
    end = """
    child = os.fork()
    if child == 0:
        memory.wait()
        memory.sleep()
        print("child", flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    memory.wait()
    """
    assert run_script(end) == (0, ["child", "left preserved"], "")


# -- at random ----------------------------------------------------------------------------------------------

CALLS = [
    "train",
    "leave",
    "leave optimizer",
    "sleep",
    "wake",
    "wake late",
    "wait",
    "status",
    "state_dict",
    "fail",
    "gc",
]


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(calls=st.lists(st.sampled_from(CALLS), min_size=4, max_size=20), delay_ms=st.integers(0, 4))
def test_any_order_of_calls_keeps_every_bit(calls, delay_ms):
    with pytest.MonkeyPatch.context() as monkeypatch:
        setup = Setup(monkeypatch)
        memory = setup.memory
        for call in calls:
            if delay_ms:
                setup.gate.clear()
                threading.Timer(delay_ms / 1000, setup.gate.set).start()
            else:
                setup.gate.set()
            with suppress(EngineFaultError):  # a copy that was to fail
                if call == "train":
                    memory.wake(wait=False)
                    setup.train()
                elif call.startswith("leave"):
                    memory.prepare_sleep(call.split()[1:] or None)
                    memory.begin()
                    memory.commit_behind()
                elif call == "fail":
                    setup.gate.failures.append(LOST)
                elif call == "wake late":
                    memory.wake(wait=False)
                elif call == "state_dict":
                    with suppress(StateConflictError):
                        setup.optimizer.state_dict()
                elif call == "gc":
                    gc.collect()
                else:
                    getattr(memory, call)()
        setup.gate.set()
        setup.gate.failures.clear()
        with suppress(EngineFaultError):
            memory.wait()
        memory._manager.check_integrity()
        setup.assert_nothing_lost()
