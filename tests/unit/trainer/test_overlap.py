"""Content that comes while the trainer computes: who waits for it, what a failure leaves, what may not come late."""

import copy
import gc
import weakref

import pytest
import torch
from models import Tied, same, whole
from test_pausable import WIDTH, Paged, adamw, learn, starve, states, tensors_in, train
from torch.optim.optimizer import register_optimizer_step_pre_hook
from toy_engine import ToyEngine

from rl_memory_plugins.errors import DeviceMemoryError, EngineFaultError, StateConflictError
from rl_memory_plugins.trainer import ModelSource, PausableMemory, RolloutHandoff
from rl_memory_plugins.trainer.offloading import host_view
from rl_memory_plugins.trainer.room import AMPLE_BYTES


def storages_in(allocator):
    """They stay while a late copy may touch them: memory of a GPU stays mapped, that of a CPU goes to others."""
    return [entry.storage() for entry in list(allocator._entries.values())]


class LateCopies:
    """Makes a memory's copies to the device move their bytes as late as possible: when somebody waits for them."""

    def __init__(self, monkeypatch, memory):
        device, self._allocator = memory._manager.device, memory._allocator
        self._copy = device.begin_copy_from_host
        self.failure = None
        monkeypatch.setattr(device, "begin_copy_from_host", self._begin)

    def _begin(self, pairs):
        kept = storages_in(self._allocator)

        def wait():
            error, self.failure = self.failure, None
            if error is not None:
                raise error
            self._copy(pairs)
            kept.clear()

        return wait


class Setup:
    """A trainer that has stepped twice and sleeps, with copies that come late, and an undisturbed twin."""

    def __init__(self, monkeypatch, make=adamw):
        self.twin, self.model = Tied(width=WIDTH), Tied(width=WIDTH)
        self.twin_optimizer, self.optimizer = make(self.twin), make(self.model)
        self.memory = PausableMemory(self.model, self.optimizer)
        for _ in range(2):
            self.train()
        self.state = tensors_in(self.optimizer)
        self.memory.sleep()
        self.copies = LateCopies(monkeypatch, self.memory)

    def train(self):
        assert train(self.model, self.optimizer) == train(self.twin, self.twin_optimizer)
        same(whole(self.model), whole(self.twin))

    def wake_late(self):
        self.memory.wake(wait=False)
        assert set(states(self.memory).values()) == {"resident"}
        same(whole(self.model), whole(self.twin))
        assert not self.state_is_there()

    def state_is_there(self):
        twins = tensors_in(self.twin_optimizer)
        return all(torch.equal(*pair) for pair in zip(self.state, twins, strict=True))


@pytest.fixture
def setup(monkeypatch):
    return Setup(monkeypatch)


def test_a_step_waits_for_the_state_and_the_losses_stay_the_same(setup):
    for _ in range(3):
        setup.wake_late()
        setup.train()
        assert setup.state_is_there()
        setup.train()
        setup.memory.sleep()
    setup.memory.wake()
    assert setup.state_is_there()


USES = {
    "wait": lambda setup: setup.memory.wait(),
    "state_dict": lambda setup: setup.optimizer.state_dict(),
    "load_state_dict": lambda setup: setup.optimizer.load_state_dict(setup.twin_optimizer.state_dict()),
    "sleep": lambda setup: setup.memory.prepare_sleep(["parameters"]),
    "wake": lambda setup: setup.memory.wake(["parameters"]),
    "region": lambda setup: setup.memory.region("mine").__enter__(),
    "adopt": lambda setup: setup.memory.adopt([torch.ones(8)], tag="mine"),
    "free_host_memory": lambda setup: setup.memory.free_host_memory(),
    "begin": lambda setup: (setup.memory.prepare_sleep(["parameters"]), setup.memory.begin()),
    "close": lambda setup: setup.memory.close(),
    "host_view": lambda setup: host_view(setup.state[0]),
}


@pytest.mark.parametrize("use", USES)
def test_every_use_of_the_memory_waits(setup, use):
    setup.wake_late()
    USES[use](setup)
    assert setup.state_is_there() and setup.memory._manager.unfinished == []


def test_the_status_does_not_wait(setup):
    setup.wake_late()
    assert setup.memory.status()["optimizer"].state == "resident"
    assert not setup.state_is_there()


def test_a_sleep_keeps_content_that_was_on_its_way(setup):
    setup.wake_late()
    setup.memory.sleep()
    setup.memory.wake()
    assert setup.state_is_there()


def test_a_hook_of_others_sees_the_whole_state(monkeypatch):
    """It was registered before the memory's own."""
    seen = []

    def make(model):
        optimizer = adamw(model)
        optimizer.register_step_pre_hook(lambda *_: seen.append([tensor.clone() for tensor in tensors_in(optimizer)]))
        return optimizer

    setup = Setup(monkeypatch, make)
    setup.wake_late()
    setup.train()
    of_model, of_twin = seen[-2:]
    assert of_model and all(torch.equal(*pair) for pair in zip(of_model, of_twin, strict=True))


def test_a_copy_that_fails_stops_the_step_and_loses_nothing(setup):
    setup.wake_late()
    setup.copies.failure = RuntimeError("an uncorrectable error")
    with pytest.raises(EngineFaultError, match=r"an uncorrectable error\. optimizer sleep again with their content"):
        train(setup.model, setup.optimizer)
    for use in (setup.optimizer.step, setup.optimizer.state_dict):
        with pytest.raises(StateConflictError, match=r"is asleep: wake\(\['optimizer'\]\) first"):
            use()
    same(whole(setup.model), whole(setup.twin))
    assert states(setup.memory)["optimizer"] == "preserved"
    setup.optimizer.zero_grad(set_to_none=True)
    setup.wake_late()
    setup.train()


def test_too_little_device_memory_is_an_error_of_the_wake(setup, monkeypatch):
    asleep = states(setup.memory)
    starve(monkeypatch, setup.memory)
    with pytest.raises(DeviceMemoryError):
        setup.memory.wake(wait=False)
    assert states(setup.memory) == asleep and setup.memory._manager.unfinished == []
    starve(monkeypatch, setup.memory, 0)
    setup.wake_late()
    setup.train()


class Wrapper(torch.optim.Optimizer):
    """An optimiser around another. It has no hooks of its own."""

    def __init__(self, inner):
        self.inner = inner

    @property
    def state(self):
        return self.inner.state

    def step(self, closure=None):
        return self.inner.step(closure)


def with_masters(memory, model, optimizer):
    memory.adopt(optimizer)
    memory.adopt([torch.ones(WIDTH * WIDTH)], tag="optimizer")


def with_a_region(memory, model, optimizer):
    memory.adopt(optimizer)
    with memory.region("optimizer"):
        pass


def wrapped(memory, model, optimizer):
    memory.adopt(Wrapper(optimizer))


def beside_a_module(memory, model, optimizer):
    memory.adopt(optimizer, model, tag="optimizer")


def captured(memory, model, optimizer):
    memory.adopt(optimizer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        train(model, optimizer)


def of_another_class(memory, model, optimizer):
    """As schedule-free optimisers, it may read its state outside `step`."""

    class Own(torch.optim.AdamW):
        pass

    optimizer.__class__ = Own
    memory.adopt(optimizer)


def in_the_tag_of_gradients(memory, model, optimizer):
    memory._dropped = frozenset()
    memory.adopt(optimizer, tag="gradients")


def dropped(memory, model, optimizer):
    memory._dropped |= {"optimizer"}
    memory.adopt(optimizer)


ADOPT = (
    with_masters,
    with_a_region,
    wrapped,
    beside_a_module,
    captured,
    of_another_class,
    in_the_tag_of_gradients,
    dropped,
)


@pytest.mark.parametrize("adopt", ADOPT)
def test_what_would_be_used_without_a_wait_comes_at_once(monkeypatch, adopt):
    model = Tied(width=WIDTH)
    optimizer = adamw(model)
    train(model, optimizer)
    memory = PausableMemory()
    adopt(memory, model, optimizer)
    memory.sleep()
    LateCopies(monkeypatch, memory)
    memory.wake(wait=False)
    assert memory._manager.unfinished == [] and not any(map(memory.waits_before_use, states(memory)))


def test_hooks_of_all_optimisers_may_read_the_state_so_it_comes_at_once(setup):
    handle = register_optimizer_step_pre_hook(lambda *_: None)
    try:
        setup.memory.wake(wait=False)
        assert setup.state_is_there() and setup.memory._manager.unfinished == []
    finally:
        handle.remove()
    setup.memory.sleep()
    setup.wake_late()


def test_state_may_be_loaded_while_it_sleeps(setup):
    setup.optimizer.load_state_dict(copy.deepcopy(setup.twin_optimizer.state_dict()))
    setup.memory.wake()
    setup.train()


def test_an_optimiser_without_state_may_step_while_its_tag_sleeps():
    model = Tied(width=WIDTH)
    optimizer, other = adamw(model), adamw(Tied(width=WIDTH))
    train(model, optimizer)
    memory = PausableMemory(optimizer, other)
    memory.sleep()
    other.step()
    with pytest.raises(StateConflictError):
        optimizer.step()


def hooks_of(optimizer):
    names = ("step_pre", "state_dict_pre", "load_state_dict_pre")
    return [len(getattr(optimizer, f"_optimizer_{name}_hooks")) for name in names]


def test_a_closed_memory_leaves_no_hooks():
    optimizer = adamw(Tied(width=WIDTH))
    before = hooks_of(optimizer)
    memory = PausableMemory(optimizer)
    assert hooks_of(optimizer) == [1 + number for number in before]
    memory.close()
    assert hooks_of(optimizer) == before


def test_a_capture_does_not_begin_before_the_content_is_there(setup):
    setup.wake_late()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(StateConflictError, match=r"call wait\(\) before"):
            setup.optimizer.step()
    setup.memory.wait()
    setup.train()


def test_a_memory_lives_until_its_content_is_there(setup):
    setup.wake_late()
    found = weakref.ref(setup.memory)
    del setup.memory
    gc.collect()
    assert found() is not None
    setup.train()
    gc.collect()
    assert found() is None


def test_an_optimiser_does_not_keep_its_memory():
    model = Tied(width=WIDTH)
    optimizer = adamw(model)
    memory = weakref.ref(PausableMemory(model, optimizer))
    gc.collect()
    assert memory() is None
    train(model, optimizer)
    optimizer.load_state_dict(optimizer.state_dict())


# -- in a handoff -------------------------------------------------------------------------------------------


def narrow(monkeypatch, *memories):
    """Their device has ample memory for the engines once the trainer has left, and not before."""
    for memory in memories:
        monkeypatch.setattr(memory, "device_memory", lambda: ("cpu:0", AMPLE_BYTES - 1))


class Handoff:
    def __init__(self, monkeypatch, engine=None, **options):
        self.model = Paged()
        self.optimizer = adamw(self.model)
        self.memory = PausableMemory(self.model, self.optimizer)
        narrow(monkeypatch, self.memory)
        self.engine = engine or ToyEngine()
        self.handoff = RolloutHandoff(
            self.engine,
            ModelSource({name: parameter.detach() for name, parameter in self.model.sent.items()}),
            weights=[self.memory.part("parameters")],
            others=[self.memory.part("gradients", "optimizer")],
            bucket_bytes=256,
            **options,
        )
        self.copies = LateCopies(monkeypatch, self.memory)

    @property
    def unfinished(self):
        return self.memory._manager.unfinished


@pytest.mark.parametrize("overlap", [True, False])
def test_state_comes_while_the_body_runs_and_the_losses_stay_the_same(monkeypatch, overlap):
    undisturbed = Paged()
    optimizer = adamw(undisturbed)
    expected = [learn(undisturbed, optimizer) for _ in range(4)]
    setup = Handoff(monkeypatch, overlap=overlap)
    losses = []
    for step in range(4):
        with setup.handoff.training(str(step)):
            assert setup.unfinished == (["optimizer"] if overlap and step else [])
            losses.append(learn(setup.model, setup.optimizer))
            assert setup.unfinished == []
        assert setup.engine.open and setup.engine.version == str(step)
    assert losses == expected


@pytest.mark.parametrize(
    ("dropped", "others", "stay"),
    [
        (("gradients",), ["optimizer"], False),
        (("gradients",), ["gradients", "optimizer"], False),
        ((), ["optimizer"], True),  # gradients that no sleep drops are a tag like any other
        ((), ["gradients", "optimizer"], True),
    ],
)
def test_gradients_that_a_memory_drops_leave_without_being_named(dropped, others, stay):
    model = Paged()
    memory = PausableMemory(model, optimizer := adamw(model), dropped=dropped)
    weights, rest = [memory.part("parameters")], [memory.part(*others)]
    handoff = RolloutHandoff(ToyEngine(), model.sent, weights=weights, others=rest, bucket_bytes=256)
    with handoff.training():
        learn(model, optimizer)
        model().backward()
    assert all((parameter.grad is not None) == stay for parameter in model.parameters())
    with handoff.training():
        assert all((parameter.grad is not None) == stay for parameter in model.parameters())


def test_a_body_without_a_step_loses_nothing(monkeypatch):
    setup = Handoff(monkeypatch)
    with setup.handoff.training():
        learn(setup.model, setup.optimizer)
        state = [tensor.clone() for tensor in tensors_in(setup.optimizer)]
    with setup.handoff.training():
        assert setup.unfinished == ["optimizer"]
    with setup.handoff.training():
        setup.memory.wait()
        assert all(torch.equal(*pair) for pair in zip(tensors_in(setup.optimizer), state, strict=True))


def test_a_copy_that_fails_is_an_error_of_the_body(monkeypatch):
    setup = Handoff(monkeypatch)
    with setup.handoff.training():
        learn(setup.model, setup.optimizer)
    with pytest.raises(EngineFaultError, match="an uncorrectable error"), setup.handoff.training():
        setup.copies.failure = RuntimeError("an uncorrectable error")
        learn(setup.model, setup.optimizer)
    assert not setup.engine.open
    assert states(setup.memory)["optimizer"] == "preserved"
    setup.optimizer.zero_grad(set_to_none=True)
    with setup.handoff.training():
        learn(setup.model, setup.optimizer)
    assert setup.engine.open
