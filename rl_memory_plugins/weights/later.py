"""Memory of a GPU that is freed later, when the GPU has nothing else to do.

The driver frees memory only once all work of this process on the GPU has ended. While a trainer's copies to host memory
run, an update would end with the last of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_current: ContextVar[Frees | None] = ContextVar("rl_memory_frees", default=None)


class Frees:
    """What has been freed in the body of `noted`, also by threads that were started with a copy of its context."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()

    @contextmanager
    def noted(self) -> Iterator[None]:
        """In the body, `free` only notes what is to be freed."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def note(self, free: Callable[[], None]) -> None:
        self._waiting.append(free)

    def run(self) -> None:
        """Free what was noted. Any thread may call this, and again."""
        while True:
            try:
                free_one = self._waiting.popleft()
            except IndexError:
                return
            free_one()


def free(now: Callable[[], None]) -> None:
    """Free memory by calling `now`, at once or when the `Frees` of this context runs."""
    frees = _current.get()
    if frees is None:
        now()
    else:
        frees.note(now)
