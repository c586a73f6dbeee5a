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
    """Runs a function in a thread as `on_this_gpu`, or at `result` if this process cannot start more threads."""

    def __init__(self, run: Callable[[], T], name: str) -> None:
        self._run = run
        self._results: list[T] = []
        self._error: BaseException | None = None
        wrapped = on_this_gpu(run)
        self._thread: threading.Thread | None = threading.Thread(
            target=self._keep, args=(wrapped,), name=name, daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError:
            self._thread = None

    def _keep(self, run: Callable[[], T]) -> None:
        try:
            self._results.append(run())
        except BaseException as error:
            self._error = error

    def result(self) -> T:
        """What the function returns. Raises what it raises."""
        if self._thread is None:
            return self._run()
        self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self._results[0]
