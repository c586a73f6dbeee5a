"""What a sleep leaves for some tenths of a second later: it takes tens of milliseconds, and nobody waits for it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from rl_memory_plugins.memory.threads import on_this_gpu

logger = logging.getLogger(__name__)

#: The driver has scrubbed 80 GB by then (`integration/bench_driver.py`).
DELAY_S = 0.3


class Reclaim:
    """Calls `reclaim` in a thread, `DELAY_S` from now. Whoever changes what is resident calls `end` first."""

    def __init__(self, reclaim: Callable[[], None]) -> None:
        self._reclaim = reclaim
        # Not a daemon: Python's end waits for it, so it is in no call of torch or CUDA when these go.
        self._timer = threading.Timer(DELAY_S, on_this_gpu(self._run))
        self._timer.name = "rl-memory-reclaim"
        self._timer.start()

    def end(self) -> None:
        """Give it up, or wait for its end where it has begun."""
        self._timer.cancel()
        self._timer.join()

    def _run(self) -> None:
        if not threading.main_thread().is_alive():
            return
        try:
            self._reclaim()
        except Exception:
            logger.exception("memory that a sleep has released was not reclaimed early; a wake does it")
