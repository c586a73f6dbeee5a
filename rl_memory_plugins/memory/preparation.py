"""Host memory for copies: a record of whether sleeps need it, and a thread that allocates it in advance."""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

from rl_memory_plugins.errors import RLMemoryError

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: The values of the option `prepare_host_memory`; `config.py` documents them.
PrepareMode = Literal["auto", "start", "first_use"]

#: A buffer may be this many times larger than the request. Without a bound, a small request takes the buffer of the
#: weights, and the weights need a second buffer.
MAX_OVERSIZE = 2
#: After this many consecutive discarding sleeps, the memory for copies of the weights counts as unneeded.
PATIENCE = 3
#: The shortest pause between two steps of background work. Other processes poll for the lock, and get it in the pause.
PAUSE_S = 0.03
#: The share of the time that memory in advance may take while the engine computes, of all its ranks together: each of
#: its steps waits for the slowest rank. Kernels wait while pages are locked: with pauses of `PAUSE_S` alone, requests
#: of 18 ms took 29. With this share, requests of 19 ms took 21.5 beside steps of 128 MiB, and 19 beside steps of 32.
WORK_SHARE = 0.1
#: The engine counts as computing for so long after it has begun or ended a step. A prefill may take as long.
COMPUTES_S = 1.0
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

Make = Callable[[int, Caller], None]
"""Allocates a buffer of the given size for the caller."""


class Pace:
    """The pauses of background work, which leave the driver and the processors to the engine.

    Attributes:
        ranks: The number of the engine's ranks.
    """

    def __init__(self) -> None:
        self.ranks = 1
        self._step = -math.inf  # the monotonic time of the engine's latest step

    def noting(self, run: Callable[..., T]) -> Callable[..., T]:
        """Wrap what the engine calls for each step."""

        @functools.wraps(run)
        def noted(*args: Any, **kwargs: Any) -> T:
            self.note_step()
            return run(*args, **kwargs)

        return noted

    def note_step(self) -> None:
        """The engine begins or ends a step."""
        self._step = time.monotonic()

    @property
    def engine_computes(self) -> bool:
        """Whether the engine has noted a step lately."""
        return time.monotonic() - self._step < COMPUTES_S

    def rest(self, worked_s: float, caller: Caller) -> None:
        """Pause after a step of background work. Ends early if somebody waits for the memory, or nobody wants it any
        more.

        Args:
            worked_s: The seconds of that step for which the engine is to be left alone; 0 for the shortest pause.
        """
        start = time.monotonic()
        while caller.go_on() and not caller.awaited():
            pause = max(PAUSE_S, worked_s * (self.ranks / WORK_SHARE - 1) if self.engine_computes else 0.0)
            left = start + pause - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(left, _POLL_S))


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
                    self._make(nbytes, Caller(self._go_on, self._awaited.is_set))
            except AllocationCancelled:
                pass
            except RLMemoryError as error:
                logger.warning("host memory is not allocated in advance; a sleep that needs it allocates it: %s", error)
            except Exception:
                logger.exception("host memory is not allocated in advance; a sleep that needs it allocates it")
            finally:
                done.set()

    def _go_on(self) -> bool:
        return not self._ended.is_set()
