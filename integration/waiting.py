"""Wait for a condition instead of a fixed time."""

from __future__ import annotations

import time
from collections.abc import Callable

POLL_S = 0.01
AT_ONCE_S = 20  # what a busy machine may take for something that waits for nothing; what hangs takes much longer


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    """Ask again and again.

    Raises:
        TimeoutError: it was not so within `timeout_s` seconds; the message names `what`.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not so within {timeout_s:g} s")
        time.sleep(POLL_S)
