"""Running a function in another thread as the caller would: on its GPU and stream, and in its trace."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import copy_context
from typing import Generic, TypeVar

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
        try:
            self._thread.start()
        except RuntimeError:
            self._keep(self._run)
        return self

    def _keep(self, run: Callable[[], T]) -> None:
        if not self._begun.acquire(blocking=False):
            return
        try:
            self._results.append(run())
        except BaseException as error:
            self._error = error

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
        if error is not None:
            raise error
        return self._results[0]
