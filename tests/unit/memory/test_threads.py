"""Functions in other threads: what they return, what they raise, and what happens without a thread."""

import signal
import threading
import time
import weakref
from functools import partial

import pytest
from helpers import interrupts, no_collection, refuse_threads

from rl_memory_plugins.memory.threads import Beside, await_end, await_that, in_parallel

NAME = "rl-memory-test"


def test_a_function_runs_beside_its_caller():
    ran, caller = threading.Event(), threading.current_thread()
    beside = Beside(lambda: (ran.set(), threading.current_thread())[1], NAME).start()
    assert ran.wait(60)
    assert beside.result() is not caller


def test_its_error_reaches_the_caller():
    beside = Beside(lambda: 1 // 0, NAME).start()
    with pytest.raises(ZeroDivisionError):
        beside.result()


def test_who_waits_for_the_end_gets_its_error_once():
    failed = Beside(lambda: 1 // 0, NAME).start()
    assert isinstance(failed.end(), ZeroDivisionError) and failed.end() is None
    assert Beside(lambda: None, NAME).start().end() is None


def test_a_process_that_can_start_no_thread_runs_it_itself(monkeypatch):
    refuse_threads(monkeypatch)
    assert Beside(threading.current_thread, NAME).start().result() is threading.current_thread()


def test_calls_in_parallel_meet_and_return_in_order():
    met = threading.Barrier(3, timeout=60)
    calls = [lambda number=number: (met.wait(), number)[1] for number in range(3)]
    assert in_parallel(calls, NAME) == [0, 1, 2]
    assert in_parallel([], NAME) == []


def test_the_first_error_of_calls_in_parallel_reaches_the_caller_after_the_last_has_ended_and_leaves_no_cycle():
    class Held:
        pass

    ended = threading.Event()

    def fail(kind):
        held.append(weakref.ref(mine := Held()))
        raise kind(mine)

    held, failing = [], threading.Event()
    calls = [
        lambda: (failing.wait(60), time.sleep(0.2), ended.set()),
        lambda: fail(LookupError),
        lambda: (failing.set(), fail(OSError)),
    ]
    with no_collection():
        with pytest.raises(LookupError):
            in_parallel(calls, NAME)
        assert ended.is_set()
        assert [one() for one in held] == [None, None]


@pytest.mark.parametrize("allowed", range(4))
def test_calls_in_parallel_run_one_by_one_where_no_thread_can_be_started(monkeypatch, allowed):
    ran = []

    def call(number):
        ran.append(number)
        if number == 2:
            raise LookupError
        return number

    refuse_threads(monkeypatch, allowed)
    with pytest.raises(LookupError):
        in_parallel([partial(call, number) for number in range(4)], NAME)
    assert sorted(ran) == [0, 1, 2, 3]


@pytest.mark.parametrize(("to_the_end", "times"), [(False, 1), (True, 3)])
def test_an_interrupt_waits_for_calls_in_parallel(to_the_end, times):
    begun, ended = threading.Event(), []
    both = threading.Barrier(2, action=begun.set)  # of a call that has not begun an interrupt would leave nothing

    def call(seconds):
        both.wait(60)
        time.sleep(seconds)
        ended.append(seconds)

    with interrupts(begun, times), pytest.raises(KeyboardInterrupt):
        in_parallel([partial(call, 1.0), partial(call, 0.1)], NAME, to_the_end=to_the_end)
    assert ended == [0.1, 1.0]


def test_an_interrupt_makes_calls_end_that_can_be_stopped():
    begun, stopped = threading.Event(), threading.Event()
    calls = [lambda: (begun.set(), stopped.wait(60))] * 2
    start = time.monotonic()
    with interrupts(begun), pytest.raises(KeyboardInterrupt):
        in_parallel(calls, NAME, to_the_end=True, stop=stopped.set)
    assert time.monotonic() - start < 30


def test_a_second_interrupt_need_not_wait():
    begun, go_on = threading.Event(), threading.Event()
    with interrupts(begun, 2), pytest.raises(KeyboardInterrupt):
        in_parallel([lambda: (begun.set(), go_on.wait(60))], NAME)
    go_on.set()


def test_an_interrupted_wait_for_a_thread_can_be_made_again():
    """`Thread.join` itself: the thread is taken for ended from then on, in Python before 3.13."""
    begun, go_on = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: (begun.set(), go_on.wait(60)))
    thread.start()
    for _ in range(2):
        with interrupts(begun), pytest.raises(KeyboardInterrupt):
            await_end(thread)
        assert thread.is_alive()
    threading.Timer(0.2, go_on.set).start()
    await_end(thread)
    assert go_on.is_set() and not thread.is_alive()


def test_an_interrupted_wait_for_a_function_can_be_made_again():
    begun, go_on = threading.Event(), threading.Event()
    beside = Beside(lambda: (begun.set(), go_on.wait(60), 7)[2], NAME).start()
    for wait in (beside.join, beside.end, beside.result):
        with interrupts(begun), pytest.raises(KeyboardInterrupt):
            wait()
    threading.Timer(0.2, go_on.set).start()
    assert beside.result() == 7


def test_an_interrupt_of_a_call_that_runs_here_begins_no_further_call(monkeypatch):
    ran = []

    def call(number):
        ran.append(number)
        if number == 0:
            raise LookupError
        raise KeyboardInterrupt

    refuse_threads(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        in_parallel([partial(call, number) for number in range(3)], NAME)
    assert ran == [0, 1]


def test_what_cannot_run_in_a_thread_is_not_kept_alive(monkeypatch):
    class Held:
        pass

    refuse_threads(monkeypatch)
    held = Held()
    gone = weakref.ref(held)
    with no_collection():
        assert Beside(partial(str, held), NAME).start().result()
        in_parallel([partial(str, held)], NAME)
        del held
        assert gone() is None


def test_an_interrupt_while_a_thread_starts_begins_no_further_call(monkeypatch):
    start, started, ran = threading.Thread.start, [], []

    def interrupted(thread):
        started.append(thread)
        if len(started) == 2:
            raise KeyboardInterrupt
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        in_parallel([partial(ran.append, number) for number in range(3)], NAME)
    start(started[1])  # as if it had been started already
    started[1].join()
    assert ran == [0]


def test_a_signal_that_ends_no_wait_of_the_main_thread_is_handled_before_its_end():
    """As one that comes just before the wait: the handler in C has run, and that in Python comes after the wait."""
    changed, is_over, asked = threading.Condition(), threading.Event(), threading.Event()

    def send():
        asked.wait(60)
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        is_over.wait(20)
        is_over.set()
        with changed:
            changed.notify_all()

    def is_so():
        asked.set()
        return is_over.is_set()

    former = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    sending = threading.Thread(target=send)
    sending.start()
    try:
        with pytest.raises(KeyboardInterrupt), changed:
            await_that(is_so, changed)
        assert not is_over.is_set()
    finally:
        is_over.set()
        sending.join()
        signal.signal(signal.SIGUSR1, former)
