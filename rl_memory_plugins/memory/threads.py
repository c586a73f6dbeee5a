"""Running a function in another thread as the caller would: on its GPU and stream, and in its trace."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import copy_context
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")


def on_this_gpu(run: Callable[[], T]) -> Callable[[], T]:
    """Wrap `run` for another thread, on the caller's current GPU and stream. A new thread's own GPU is 0.

    The context variables are the caller's too: its trace is one of them.
    """
    context = copy_context()
    if not torch.cuda.is_initialized():
        return lambda: context.run(run)
    stream = torch.cuda.current_stream()

    def on_gpu() -> T:
        with torch.cuda.device(stream.device), torch.cuda.stream(stream):
            return context.run(run)

    return on_gpu


class Beside(Generic[T]):
    """Runs a function in a thread as `on_this_gpu`, from `start` on; in `start` if no more threads can be started.

    Args:
        run: The function.
        name: The name of the thread.
        daemon: Whether the interpreter may exit before the thread has ended.
    """

    def __init__(self, run: Callable[[], T], name: str, *, daemon: bool = True) -> None:
        self._run = run
        self._begun = threading.Lock()  # held from the begin of the function on, for ever
        self._results: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._keep, args=(on_this_gpu(run),), name=name, daemon=daemon)

    def start(self) -> Beside[T]:
        """Start the thread. An interrupt may come at any time: the function then runs in the thread or in `end`."""
        with suppress(RuntimeError):
            self._thread.start()
            return self
        self._keep(self._run)
        return self

    def _keep(self, run: Callable[[], T]) -> None:
        if not self._begun.acquire(blocking=False):
            return
        try:
            self._results.append(run())
        except BaseException as error:
            self._error = error
        finally:
            del self  # breaks the reference cycle between the error and this frame

    def cancel(self) -> None:
        """Let the function not begin any more. After an interrupted `start` the thread may still come."""
        self._begun.acquire(blocking=False)

    @property
    def is_here(self) -> bool:
        """Whether the caller is the function."""
        return threading.current_thread() is self._thread

    def join(self) -> None:
        """Wait for the end of the thread, if it runs and is not the caller's."""
        if self._thread.is_alive() and not self.is_here:
            self._thread.join()

    def end(self) -> BaseException | None:
        """Wait for the end of the function, which runs here if it has not begun. Returns what it has raised, once."""
        if not self._thread.is_alive():
            self._keep(self._run)
        self.join()
        error, self._error = self._error, None
        return error

    def result(self) -> T:
        """What the function returns. Raises what it raises."""
        error = self.end()
        try:
            if error is not None:
                raise error
        finally:
            del error  # breaks the reference cycle between the error and this frame
        return self._results[0]


def run_behind(run: Callable[[], object], name: str) -> None:
    """Run a function in a thread that the interpreter awaits at its end, and nobody else.

    Finalisers need this for all that waits or takes a lock: the garbage collector may call them in any thread, also in
    one that the function would wait for, or that holds the lock.
    """
    with suppress(RuntimeError):  # no thread starts while the interpreter ends
        threading.Thread(target=run, name=name).start()


def in_parallel(calls: Sequence[Callable[[], T]], name: str, *, to_the_end: bool = False) -> list[T]:
    """Run the calls at a time, each in a thread as `on_this_gpu`; here, one by one, if no more threads can be started.

    These threads start even while Python shuts down, unlike those of an executor. The function returns after the last
    call has ended, also if it is interrupted.

    Args:
        name: The name of the threads.
        to_the_end: Whether it waits on after a second interrupt too: the calls use memory that the caller frees.

    Returns: the results, in the order of the calls.

    Raises:
        BaseException: that of the first call that has failed; or the interrupt.
    """
    running = [Beside(call, name) for call in calls]
    try:
        for number in range(len(running)):
            running[number].start()
    except BaseException:
        for one in running:
            one.cancel()
        raise
    finally:
        _join(running, to_the_end)
    results = []
    while running:
        results.append(running.pop(0).result())
    return results


def _join(running: Sequence[Beside[Any]], to_the_end: bool) -> None:
    """Wait for all threads, also if a signal handler raises meanwhile."""
    interrupted: BaseException | None = None
    while True:
        try:
            for one in running:
                one.join()
            break
        except BaseException as error:
            if interrupted is not None and not to_the_end:
                raise
            interrupted = error
    if interrupted is not None:
        raise interrupted
