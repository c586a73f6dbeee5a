"""Deferred work of a sleep. It takes tens of milliseconds, so a thread does it after the sleep has returned."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial

from rl_memory_plugins.memory.threads import await_end, on_this_gpu

logger = logging.getLogger(__name__)

#: Within this time the driver scrubs 80 GB (`integration/bench_driver.py`).
DELAY_S = 0.3


class Reclaim(threading.Timer):
    """Calls `reclaim` in a thread, `DELAY_S` from now. Call `end` before memory is released or mapped.

    Raises:
        RuntimeError: the thread cannot start.
    """

    def __init__(self, reclaim: Callable[[], None]) -> None:
        # Not a daemon: the interpreter waits for the thread at exit, so it makes no CUDA call while torch shuts down.
        super().__init__(DELAY_S, on_this_gpu(partial(_reclaim, reclaim)))
        self.name = "rl-memory-reclaim"
        self.start()

    def end(self) -> None:
        """Cancel the call, or wait for its end if it has begun."""
        self.cancel()
        await_end(self)


def _reclaim(reclaim: Callable[[], None]) -> None:
    if threading.main_thread().is_alive():
        try:
            reclaim()
        except Exception:
            logger.exception("released memory was not reclaimed early; the next wake reclaims it and takes longer")
