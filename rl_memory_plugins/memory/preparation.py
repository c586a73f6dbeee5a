"""Host memory for copies: a record of whether sleeps need it, and a thread that allocates it in advance."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from rl_memory_plugins.errors import RLMemoryError

logger = logging.getLogger(__name__)

#: The values of the option `prepare_host_memory`; `config.py` documents them.
PrepareMode = Literal["auto", "start", "first_use"]

#: A buffer may be this many times larger than the request. Without a bound, a small request takes the buffer of the
#: weights, and the weights need a second buffer.
MAX_OVERSIZE = 2
#: After this many consecutive discarding sleeps, the memory for copies of the weights counts as unneeded.
PATIENCE = 3
#: The pause between two steps of background work. Other processes poll for the lock, and get it in the pause.
PAUSE_S = 0.03
_POLL_S = 0.01


class AllocationCancelled(Exception):
    """The caller of an allocation cancelled it."""


def always() -> bool:
    return True


class Demand:
    """Whether sleeps need host memory for all weights, as past sleeps suggest.

    Args:
        mode: The option `prepare_host_memory`.
    """

    def __init__(self, mode: PrepareMode) -> None:
        self.mode = mode
        self._preserved = False
        self._discarded = 0  # consecutive sleeps that discarded the weights

    def note(self, preserving: bool) -> None:
        """Record a sleep that preserves or discards the weights."""
        self._preserved = self._preserved or preserving
        self._discarded = 0 if preserving else self._discarded + 1

    @property
    def is_gone(self) -> bool:
        """Whether sleeps no longer need the memory. One discarding sleep suffices if none has preserved the weights."""
        return self.mode == "auto" and self._discarded >= (PATIENCE if self._preserved else 1)


Asked = Callable[[], bool]


class Caller(NamedTuple):
    """Who wants host memory.

    Attributes:
        go_on: Asked while the memory is made; `False` cancels it.
        awaited: Whether a sleep or a wake waits for the memory. Until then others have the processors and the driver.
    """

    go_on: Asked = always
    awaited: Asked = always


SLEEP = Caller()  # waits, and does not give up

Make = Callable[[int, Caller, Callable[[], None]], None]
"""Allocates a buffer of the given size for the caller. The third argument is called once before each step, outside the
lock of all ranks: the pause that leaves time to the engine."""


class Preparation(threading.Thread):
    """A thread that allocates buffers in steps, the smallest first, because sleeps of every level need that buffer. The
    constructor starts the thread.

    Args:
        sizes: The buffers' sizes in bytes.
        make: See `Make`.

    Raises:
        RuntimeError: the thread cannot start.
    """

    def __init__(self, sizes: Sequence[int], make: Make) -> None:
        super().__init__(name="rl-memory-arena", daemon=True)
        self._make = make
        # Each event is set when its buffer is allocated, or when the allocation has failed.
        self._buffers = [(nbytes, threading.Event()) for nbytes in sorted(sizes) if nbytes]
        self._ended = threading.Event()
        self._awaited = threading.Event()
        self.start()

    def end(self) -> None:
        """Stop the thread within one step. It frees an unfinished buffer. Does not wait."""
        self._ended.set()

    def await_buffer(self, nbytes: int, caller: Caller = SLEEP) -> None:
        """Wait for a pending buffer that fits `nbytes`, if there is any.

        Raises:
            AllocationCancelled: by the caller.
        """
        done = self._pending(nbytes)
        if done is None:
            return
        while True:
            if caller.awaited():
                self.hurry()
            if done.wait(_POLL_S):
                return
            if not caller.go_on():
                raise AllocationCancelled

    def is_making(self, nbytes: int) -> bool:
        """Whether a buffer for so many bytes is pending."""
        return self._pending(nbytes) is not None

    def hurry(self) -> None:
        """Somebody waits: from now on the processors are for this thread."""
        self._awaited.set()

    def _pending(self, nbytes: int) -> threading.Event | None:
        if self._ended.is_set():
            return None
        fitting = (done for size, done in self._buffers if nbytes <= size <= MAX_OVERSIZE * nbytes)
        return next((done for done in fitting if not done.is_set()), None)

    def run(self) -> None:
        for nbytes, done in self._buffers:
            try:
                if not self._ended.is_set():
                    self._make(nbytes, Caller(self._go_on, self._awaited.is_set), self._pause)
            except AllocationCancelled:
                pass
            except RLMemoryError as error:
                logger.warning("host memory is not allocated in advance; a sleep that needs it allocates it: %s", error)
            except Exception:
                logger.exception("host memory is not allocated in advance; a sleep that needs it allocates it")
            finally:
                done.set()

    def _pause(self) -> None:
        if not self._awaited.is_set():
            self._ended.wait(PAUSE_S)

    def _go_on(self) -> bool:
        return not self._ended.is_set()
