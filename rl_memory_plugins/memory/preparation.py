"""Host memory for a copy of all weights: whether it is wanted, and how it is made before anybody waits for it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Literal

from rl_memory_plugins.errors import RLMemoryError

logger = logging.getLogger(__name__)

#: When it is made; `config.py` says what each does.
Prepares = Literal["auto", "start", "first_use"]

#: How many times larger than needed a buffer may be: one for all weights must not go to the scraps of a cache, or else
#: the weights need another.
WASTE = 2
#: Sleeps in a row that discard the weights, after which a copy that was needed before is needed no more.
PATIENCE = 3
#: Between two steps that nobody waits for, so that another process, which polls for its turn, gets one.
PAUSE_S = 0.03
_POLL_S = 0.01


class GivenUp(Exception):
    """Nobody wants the buffer any more that was being made."""


def always() -> bool:
    return True


class Demand:
    """Whether sleeps need memory for all weights, as far as it can be known from those that there were.

    Args:
        prepares: The option.
    """

    def __init__(self, prepares: Prepares) -> None:
        self.prepares = prepares
        self._preserved = False
        self._discarded = 0  # sleeps in a row

    def note(self, preserving: bool) -> None:
        """A sleep preserves the weights, or discards them."""
        if preserving:
            self._preserved, self._discarded = True, 0
        else:
            self._discarded += 1

    @property
    def is_gone(self) -> bool:
        """At the first sleep that discards, if none has preserved: the memory was made on a guess that was wrong."""
        return self.prepares == "auto" and self._discarded >= (PATIENCE if self._preserved else 1)


class _Buffer:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.done = threading.Event()  # it is there, or will not be


class Preparation:
    """Buffers that a thread makes one after the other, in steps, until it is told to end. The smallest comes first:
    sleeps of every level need it.

    Args:
        sizes: Theirs.
        make: Makes a buffer of a size, and asks its second argument between steps whether to go on.

    Raises:
        RuntimeError: there are no more threads.
    """

    def __init__(self, sizes: Sequence[int], make: Callable[[int, Callable[[], bool]], None]) -> None:
        self._make = make
        self._buffers = [_Buffer(nbytes) for nbytes in sorted(sizes) if nbytes]
        self._ended = threading.Event()
        self._awaited = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rl-memory-arena", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def end(self) -> None:
        """Make no more; what is unfinished is given back within a step. Does not wait."""
        self._ended.set()

    def join(self) -> None:
        self._thread.join()

    def await_buffer(self, nbytes: int, go_on: Callable[[], bool]) -> None:
        """Wait for the buffer that is meant for so many bytes, if one is still to come.

        Raises:
            GivenUp: `go_on` said no.
        """
        for buffer in self._buffers:
            if nbytes <= buffer.nbytes <= WASTE * nbytes and not buffer.done.is_set() and not self._ended.is_set():
                self._awaited.set()
                while not buffer.done.wait(_POLL_S):
                    if not go_on():
                        raise GivenUp
                return

    def _run(self) -> None:
        for buffer in self._buffers:
            try:
                if not self._ended.is_set():
                    self._make(buffer.nbytes, self._go_on)
            except GivenUp:
                pass
            except RLMemoryError as error:
                logger.warning("host memory is not made in advance, the first sleep that needs it does it: %s", error)
            except Exception:
                logger.exception("host memory is not made in advance, the first sleep that needs it does it")
            finally:
                buffer.done.set()

    def _go_on(self) -> bool:
        if not self._awaited.is_set():
            self._ended.wait(PAUSE_S)
        return not self._ended.is_set()
