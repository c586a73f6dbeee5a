"""Running a function in another thread as the caller would: on its GPU and stream, and in its trace."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import copy_context
from typing import Generic, TypeVar

import torch

T = TypeVar("T")

WAIT_S = 0.1
"""How often a thread that waits looks by itself. It is told at once, unless an interrupt has lost the message."""


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


def await_end(thread: threading.Thread) -> None:
    """`thread.join()`, which can be interrupted and made again.

    In Python before 3.13 an interrupted `join` takes its thread for ended, while it runs.
    """
    start = time.monotonic()
    while thread.is_alive():
        time.sleep(min(max((time.monotonic() - start) / 10, 50e-6), 0.002))


INTERRUPT_S = 1.0


def await_that(is_so: Callable[[], object], changed: threading.Condition) -> None:
    """`changed.wait_for(is_so)`, for the main thread.

    Python runs the handler of a signal that comes just before a wait only after the wait, which may be long.
    """
    while not changed.wait_for(is_so, INTERRUPT_S):
        pass


class Beside(Generic[T]):
    """Runs a function in a thread as `on_this_gpu`, from `start` on; in `start` if no more threads can be started.

    An interrupt may come at any time: every wait can be made again, and ends when the function has ended.

    Args:
        run: The function.
        name: The name of the thread.
        daemon: Whether the interpreter may exit before the thread has ended.
    """

    def __init__(self, run: Callable[[], T], name: str, *, daemon: bool = True) -> None:
        self._run = run
        self._claims: list[object | None] = []  # the first decides: `None` keeps the function from beginning
        self._has_started = self._has_ended = False
        self._process = os.getpid()  # a child by fork has no thread to wait for
        self._end = threading.Lock()  # held until the function has ended; what counts is `_has_ended`
        self._end.acquire()
        self._results: list[T] = []
        self._error: BaseException | None = None
        target = on_this_gpu(run)
        self._thread: threading.Thread | None = threading.Thread(
            target=self._keep, args=(target,), name=name, daemon=daemon
        )

    def start(self) -> Beside[T]:
        """Start the thread. After an interrupt the function runs in the thread or in `end`.

        Raises:
            KeyboardInterrupt: one that came while the function ran here.
        """
        assert self._thread is not None
        with suppress(RuntimeError):
            self._thread.start()
            self._has_started = True
            return self
        self._thread = None  # it refers to this object
        self._keep(self._run)
        if self._error is not None and not isinstance(self._error, Exception):
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error  # breaks the reference cycle between the error and this frame
        return self

    def _keep(self, run: Callable[[], T]) -> None:
        self._claims.append(own := object())
        if self._claims[0] is not own:
            return
        try:
            self._results.append(run())
        except BaseException as error:
            self._error = error
        finally:
            self._note_end()
            del self  # breaks the reference cycle between the error and this frame

    def _note_end(self) -> None:
        self._has_ended = True
        self._end.release()

    def cancel(self) -> None:
        """Let the function not begin any more. After an interrupted `start` the thread may still come."""
        self._claims.append(None)
        if self._claims[0] is None and not self._has_ended:
            self._note_end()

    @property
    def is_here(self) -> bool:
        """Whether the caller is the function."""
        return threading.current_thread() is self._thread

    def join(self) -> None:
        """Wait for the end of the function, if it runs and is not the caller."""
        if self.is_here or self._process != os.getpid():
            return
        while not self._has_ended and (self._has_started or self._claims):
            if self._end.acquire(timeout=WAIT_S):
                self._end.release()  # others wait too; if an interrupt comes first, they look again in `WAIT_S`

    def end(self) -> BaseException | None:
        """Wait for the end of the function, which runs here if it has not begun. Returns what it has raised, once."""
        if not self._has_started:
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


def in_parallel(
    calls: Sequence[Callable[[], T]], name: str, *, to_the_end: bool = False, stop: Callable[[], None] | None = None
) -> list[T]:
    """Run the calls at a time, each in a thread as `on_this_gpu`; here, one by one, if no more threads can be started.

    These threads start even while Python shuts down, unlike those of an executor. The function returns after the last
    call has ended, also if it is interrupted; then no further call begins.

    Args:
        name: The name of the threads.
        to_the_end: Whether it waits on after a second interrupt too: the calls use memory that the caller frees.
        stop: Called after each interrupt. Makes the calls end that run.

    Returns: the results, in the order of the calls.

    Raises:
        BaseException: that of the first call that has failed; or the interrupt.
    """
    running = [Beside(call, name) for call in calls]
    interrupted: BaseException | None = None
    number = 0
    while True:
        try:
            if interrupted is not None:
                for one in running:
                    one.cancel()
                if stop is not None:
                    stop()
            while number < len(running):
                running[number].start()
                number += 1
            for one in running:
                one.join()
            break
        except BaseException as error:
            if interrupted is not None and not to_the_end:
                raise
            number = len(running)
            interrupted = error
    try:
        if interrupted is not None:
            raise interrupted
    finally:
        del interrupted  # breaks the reference cycle between the error and this frame
    results = []
    while running:
        results.append(running.pop(0).result())
    return results
