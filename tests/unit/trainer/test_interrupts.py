"""An interrupt may come at any call. What it leaves can be called again, and no content is lost."""

import itertools
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from helpers import InterruptedLock, interrupts
from test_leaving import Behind
from test_pausable import Paged, adamw, states, tensors_in

import rl_memory_plugins
from rl_memory_plugins.errors import StateConflictError
from rl_memory_plugins.trainer import PausableMemory

ROOT = Path(rl_memory_plugins.__file__).parent
FILES = (
    "trainer/pausable.py",
    "trainer/pausable_tensors.py",
    "trainer/process_groups.py",
    "memory/arena.py",
    "memory/backup.py",
    "memory/manager.py",
    "memory/sleep_copies.py",
    "memory/transitions.py",
)
OWN = {str(ROOT / path) for path in FILES}


def interrupt():
    raise KeyboardInterrupt


def is_interrupted(run, at, act=interrupt, events=("call",)):
    """Run a function, and interrupt it in the given call of this package's functions. Returns: whether it was.

    Args:
        events: `return` also counts the ends of calls.
    """
    calls, interrupted = itertools.count(), []

    def note(frame, event, argument):
        code = frame.f_code
        if event in events and code.co_filename in OWN and code.co_name != "<genexpr>" and next(calls) == at:
            sys.setprofile(None)
            interrupted.append(at)
            act()

    sys.setprofile(note)
    try:
        with suppress(KeyboardInterrupt, StateConflictError):
            run()
    finally:
        sys.setprofile(None)
    return bool(interrupted)


def leave(memory):
    memory.prepare_sleep()
    memory.begin()
    memory.commit(tags=["optimizer"])
    memory.commit()


def leave_behind(memory):
    memory.prepare_sleep()
    memory.begin()
    memory.commit_behind()
    memory.wait()


def open_region(memory):
    with memory.region("parameters"):
        pass


CALLS = {
    "region": open_region,
    "sleep": PausableMemory.sleep,
    "wake": PausableMemory.wake,
    "wake late": lambda memory: (memory.wake(wait=False), memory.wait()),
    "leave": leave,
    "leave behind": leave_behind,
}


@pytest.mark.parametrize("call", CALLS)
def test_an_interrupt_leaves_a_memory_that_sleeps_and_wakes(call):
    model = Paged()
    optimizer = adamw(model)
    memory = PausableMemory(model, optimizer)
    model().backward()
    optimizer.step()
    kept = [*model.parameters(), *tensors_in(optimizer)]
    expected = [tensor.detach().clone() for tensor in kept]
    for at in itertools.count():
        memory.wake()
        if call.startswith("wake"):
            memory.sleep()
        if not is_interrupted(lambda: CALLS[call](memory), at):
            break
        if call.startswith("leave"):  # the caller had prepared it
            memory.abort()
        memory.wake()
        assert all(torch.equal(*pair) for pair in zip(kept, expected, strict=True)), at
        memory.sleep()
        assert states(memory)["parameters"] == states(memory)["optimizer"] == "preserved", at
    assert at > 8
    memory.close()
    assert all(torch.equal(*pair) for pair in zip(kept, expected, strict=True))


def test_an_interrupt_at_the_lock_leaves_no_region_open(monkeypatch):
    memory = PausableMemory()
    for at in itertools.count():
        lock = InterruptedLock(memory._lock, at)
        with monkeypatch.context() as patch:
            patch.setattr(memory, "_lock", lock)
            with suppress(KeyboardInterrupt), memory.region("mine"):
                pass
        memory.sleep()  # would be refused if a region were open
        memory.wake()
        if not lock.interrupted:
            break
    assert at >= 2


def test_a_region_closes_while_another_thread_works_for_long():
    """So no interrupt can come while it waits for that."""
    memory = PausableMemory()
    held, enough = threading.Event(), threading.Event()

    def work():
        with memory._lock:
            held.set()
            enough.wait(60)

    worker = threading.Thread(target=work)
    with interrupts(held), suppress(KeyboardInterrupt):
        with memory.region("mine"):
            worker.start()
            held.wait(60)
        time.sleep(10)
    enough.set()
    worker.join()
    memory.sleep()


@pytest.mark.parametrize("within", ["sleep", "wake"])
@pytest.mark.parametrize("call", ["sleep", "wake"])
def test_a_signal_handler_that_calls_the_memory_loses_nothing(call, within):
    tensor = torch.arange(float(1 << 14))
    memory = PausableMemory()
    memory.adopt([tensor], tag="mine")

    def handle():
        with suppress(StateConflictError):  # no interrupt comes from the return of a generator itself
            getattr(memory, within)()

    for at in itertools.count():
        if call == "wake":
            memory.sleep()
        if not is_interrupted(getattr(memory, call), at, handle, ("call", "return")):
            break
        memory.wake()
        assert torch.equal(tensor, torch.arange(float(1 << 14))), at
    assert at > 10
    memory.close()


def test_an_interrupt_while_the_state_is_freed_leaves_nothing_prepared(monkeypatch):
    setup = Behind(monkeypatch, apart=True)

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    setup.handoff.release()
    setup.learn()
    with monkeypatch.context() as patch:
        patch.setattr(setup.of_state, "commit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            setup.handoff.sync()
    setup.step()
    setup.assert_nothing_lost()
