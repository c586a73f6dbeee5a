"""Functions in other threads: what they return, what they raise, and what happens without a thread."""

import threading

import pytest

from rl_memory_plugins.memory.threads import Beside


def test_a_function_runs_beside_its_caller():
    ran, caller = threading.Event(), threading.current_thread()
    beside = Beside(lambda: (ran.set(), threading.current_thread())[1], "rl-memory-test").start()
    assert ran.wait(60)
    assert beside.result() is not caller


def test_its_error_reaches_the_caller():
    beside = Beside(lambda: 1 // 0, "rl-memory-test").start()
    with pytest.raises(ZeroDivisionError):
        beside.result()


def test_who_waits_for_the_end_gets_its_error_once():
    failed = Beside(lambda: 1 // 0, "rl-memory-test").start()
    assert isinstance(failed.end(), ZeroDivisionError) and failed.end() is None
    assert Beside(lambda: None, "rl-memory-test").start().end() is None


def test_a_process_that_can_start_no_thread_runs_it_itself(monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert Beside(threading.current_thread, "rl-memory-test").start().result() is threading.current_thread()
