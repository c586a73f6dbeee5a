"""A trainer's state leaves while the engines' weights wake and the update runs, if the devices have room for both."""

import pytest
import torch
from test_overlap import Handoff
from test_pausable import Paged, adamw, learn, states, tensors_in
from toy_engine import ToyEngine
from toys import checkpoint

from rl_memory_plugins.errors import (
    DeviceMemoryError,
    EngineFaultError,
    InvalidRequestError,
    StateConflictError,
    WeightUpdateError,
)
from rl_memory_plugins.tags import TagState
from rl_memory_plugins.trainer import EngineObject, PausableMemory, RolloutHandoff
from rl_memory_plugins.trainer.room import ROOM_BYTES, Room, lacks_memory, suffices

GiB = 1 << 30
AWAKE, ASLEEP = "resident", "preserved"


class Engine(ToyEngine):
    """Notes the state of the trainer's optimiser at each call. `needed` bytes of the trainer's device it must have."""

    def __init__(self):
        super().__init__()
        self.optimizer = []
        self.needed = 0
        self.memory = None

    def asleep_bytes(self, tag):
        assert tag == "weights"
        return [("cpu:0", self.needed)]

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


# -- room ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rooms", "expected"),
    [
        ([Room({}, {})], True),
        ([Room({"GPU-a": 2 * GiB}, {"GPU-a": 2 * GiB + ROOM_BYTES})], True),
        ([Room({"GPU-a": 2 * GiB}, {"GPU-a": 2 * GiB + ROOM_BYTES - 1})], False),
        ([Room({"GPU-a": 2 * GiB}, {"GPU-b": 0})], True),  # no trainer is on the engine's GPU
        ([Room({"GPU-a": 2 * GiB, "GPU-b": GiB}, {"GPU-a": 80 * GiB}), Room({}, {"GPU-b": GiB})], False),
        ([Room({"GPU-a": 40 * GiB}, {"GPU-a": 80 * GiB}), Room({"GPU-a": 40 * GiB}, {"GPU-a": 80 * GiB})], False),
        ([Room(None, {"GPU-a": 80 * GiB}), Room({}, {"GPU-b": 80 * GiB})], False),
        ([Room({"cpu:0": GiB, "cpu:1": GiB}, {"cpu:0": ROOM_BYTES + 2 * GiB - 1})], False),
    ],
)
def test_all_engines_must_fit_on_their_devices(rooms, expected):
    assert suffices(rooms) is expected


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
