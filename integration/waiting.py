"""Wait for a condition instead of a fixed time."""

from __future__ import annotations

import time
from collections.abc import Callable

POLL_S = 0.01
AT_ONCE_S = 20  # the most that a busy machine needs for an action that waits for nothing


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    """Poll `condition` until it holds.

    Raises:
        TimeoutError: it did not hold within `timeout_s` seconds; the message names `what`.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"still not after {timeout_s:g} s: {what}")
        time.sleep(POLL_S)
