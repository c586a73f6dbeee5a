"""Several threads that watch their loaders' thread pools at once, as the ranks of an engine in one process do."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rl_memory_plugins.weights.coverage import Coverage
from rl_memory_plugins.weights.pools import inline, intercepted
from rl_memory_plugins.weights.write_recorder import recording

SUBMIT = ThreadPoolExecutor.submit


def test_threads_that_watch_at_once_leave_no_trace():
    entered, left = threading.Event(), threading.Event()
    ran_on = []

    def second():
        with intercepted(inline):
            entered.set()
            left.wait(10)
            with ThreadPoolExecutor() as pool:
                ran_on.append(pool.submit(threading.get_ident).result() == threading.get_ident())

    with intercepted(inline):
        thread = threading.Thread(target=second)
        thread.start()
        entered.wait(10)
    with ThreadPoolExecutor() as pool:  # the other still watches its own
        assert pool.submit(threading.get_ident).result() != threading.get_ident()
    left.set()
    thread.join()
    assert ran_on == [True]
    assert ThreadPoolExecutor.submit is SUBMIT


@pytest.fixture
def restored(monkeypatch):
    monkeypatch.setattr(ThreadPoolExecutor, "submit", SUBMIT)


def instrumented():
    """Wraps what is there, as tracing of thread pools does; returns what it saw, and what undoes it."""
    inner, seen = ThreadPoolExecutor.submit, []

    def submit(pool, *args, **kwargs):
        seen.append(args[0])
        return inner(pool, *args, **kwargs)

    ThreadPoolExecutor.submit = submit
    return seen, lambda: setattr(ThreadPoolExecutor, "submit", inner)


@pytest.mark.usefixtures("restored")
def test_what_others_install_meanwhile_stays():
    with intercepted(inline):
        seen, undo = instrumented()
        with ThreadPoolExecutor() as pool:
            assert pool.submit(threading.get_ident).result() == threading.get_ident()
    for _ in range(2):  # and our own comes on top of it again
        with ThreadPoolExecutor() as pool:
            assert pool.submit(threading.get_ident).result() != threading.get_ident()
        with intercepted(inline), ThreadPoolExecutor() as pool:
            assert pool.submit(threading.get_ident).result() == threading.get_ident()
    assert len(seen) == 3  # inside, a call that is taken over reaches no pool
    undo()  # which puts back what was ours
    with ThreadPoolExecutor() as pool:
        assert pool.submit(threading.get_ident).result() != threading.get_ident()
    with intercepted(inline), ThreadPoolExecutor() as pool:
        assert pool.submit(threading.get_ident).result() == threading.get_ident()


def test_an_error_comes_with_the_result():
    with intercepted(inline), ThreadPoolExecutor() as pool:
        future = pool.submit(divmod, 1, 0)
    with pytest.raises(ZeroDivisionError):
        future.result()


def test_what_pools_of_pools_write_is_recorded():
    memory, overwritten = torch.zeros(8), Coverage()

    def outer():
        with ThreadPoolExecutor() as pool:
            pool.submit(memory[4:].fill_, 1).result()

    with recording(overwritten), ThreadPoolExecutor() as pool:
        pool.submit(memory[:4].fill_, 1).result()
        pool.submit(outer).result()
    assert overwritten.fraction(memory) == 1
    assert ThreadPoolExecutor.submit is SUBMIT
