"""A step that calls its own handoff would wait for itself for ever."""

import asyncio
import contextvars
import signal
import threading

import pytest
from test_handoff import AsyncObject, Setup

from rl_memory_plugins.errors import StateConflictError
from rl_memory_plugins.trainer import AsyncRolloutHandoff, EngineObject
from rl_memory_plugins.trainer.turns import Turns

WAIT_S = 30.0


def within(run):
    """Run a function in a thread. Returns: its error."""
    errors = []

    def keep():
        try:
            run()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=keep, daemon=True)
    thread.start()
    thread.join(WAIT_S)
    assert not thread.is_alive(), "it waits for itself"
    return errors[0] if errors else None


@pytest.mark.parametrize("engines", [1, 2])
@pytest.mark.parametrize("call", ["sleep", "wake_up", "post_update"])
def test_an_engine_that_calls_the_handoff_is_refused(call, engines):
    setup = Setup(engines=engines)
    made = getattr(setup.engine, call)

    def calls(*arguments, **options):
        setup.handoff.release()
        return made(*arguments, **options)

    setattr(setup.engine, call, calls)
    error = within(lambda: (setup.handoff.release(), setup.handoff.sync()))
    assert isinstance(error, StateConflictError) and "call it once the step is over" in str(error)
    setattr(setup.engine, call, made)
    setup.handoff.release()
    setup.handoff.sync()
    setup.assert_updated()


def test_a_coroutine_of_an_engine_that_calls_the_handoff_is_refused():
    setup = Setup()
    engine = AsyncObject(setup.engine)
    handoff = AsyncRolloutHandoff(EngineObject(engine), setup.tensors, bucket_bytes=256)
    sleep = engine.sleep

    async def calls(**options):
        await handoff.release()
        await sleep(**options)

    engine.sleep = calls
    error = within(lambda: asyncio.run(handoff.release()))
    assert isinstance(error, StateConflictError) and "call it once the step is over" in str(error)


def test_a_signal_handler_that_calls_the_handoff_is_refused():
    setup = Setup()
    sleep = setup.engine.sleep

    def interrupted(**options):
        signal.raise_signal(signal.SIGUSR1)
        sleep(**options)

    former = signal.signal(signal.SIGUSR1, lambda *_: setup.handoff.release())
    try:
        setup.engine.sleep = interrupted
        with pytest.raises(StateConflictError, match="a signal handler"):
            setup.handoff.release()
    finally:
        signal.signal(signal.SIGUSR1, former)


def test_a_thread_waits_for_its_turn_also_one_that_an_earlier_call_has_started():
    turns = Turns()
    came, order = threading.Event(), []

    def late():
        came.wait(WAIT_S)
        with turns.turn():
            order.append("late")

    with turns.turn():
        thread = threading.Thread(target=contextvars.copy_context().run, args=(late,), daemon=True)
        thread.start()
    with turns.turn():
        came.set()
        thread.join(0.1)
        order.append("first")
    thread.join(WAIT_S)
    assert order == ["first", "late"]


def test_an_interrupt_at_the_begin_of_a_turn_keeps_no_call_out(monkeypatch):
    turns = Turns()

    class Within:
        """A context variable whose `set` is interrupted once, at its end."""

        def __init__(self, variable):
            self.get, self._variable, self._calls = variable.get, variable, 0

        def set(self, value):
            self._variable.set(value)
            self._calls += 1
            if self._calls == 1:
                raise KeyboardInterrupt

    monkeypatch.setattr("rl_memory_plugins.trainer.turns._within", Within(contextvars.ContextVar("within", default=())))
    with pytest.raises(KeyboardInterrupt), turns.turn():
        pass
    with turns.turn():
        pass
