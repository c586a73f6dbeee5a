"""A wait for work on a GPU that may depend on the peer: CUDA's own waits have no deadline."""

from __future__ import annotations

import time
from collections.abc import Callable

from rl_memory_plugins.weights.wire import Connection, Deadline

_POLL_S = 20e-6
"""The first pause between two questions. Each is longer than the last, up to 1 ms: a bucket travels for less."""


def await_done(
    is_done: Callable[[], bool],
    deadline: Deadline,
    connection: Connection,
    meanwhile: Callable[[], None] = lambda: None,
) -> None:
    """Ask until it is done.

    Args:
        meanwhile: Is called after each question that was answered with no.

    Raises:
        TimeoutError: it is not done by the deadline.
        ConnectionError: the peer has closed the connection.
    """
    pause = _POLL_S
    while not is_done():
        meanwhile()
        if not deadline.remaining():
            raise TimeoutError
        if connection.is_ended():
            raise ConnectionError("the peer has closed the connection")
        time.sleep(pause)
        pause = min(1.05 * pause, 1e-3)
