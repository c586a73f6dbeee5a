"""A directory of this user's processes on this host, and locks in it that end with the process that holds them."""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)

POLL_S = 0.02


def private_directory() -> Path:
    """The directory; it is made if it is not there.

    Raises:
        PermissionError: somebody else has made it.
    """
    directory = Path(tempfile.gettempdir(), f"rl-memory-{os.getuid()}")
    directory.mkdir(mode=0o700, exist_ok=True)
    if directory.stat().st_uid != os.getuid():
        raise PermissionError(f"{directory} belongs to another user")
    directory.chmod(0o700)
    return directory


@contextmanager
def one_at_a_time(what: str, timeout_s: float) -> Iterator[None]:
    """Wait for other processes that do `what`, for as long as that; then go on all the same, with a warning."""
    with (private_directory() / f"{what}.lock").open("w") as file:
        deadline = time.monotonic() + timeout_s
        while not try_lock(file.fileno()):
            if time.monotonic() > deadline:
                logger.warning("another process holds the lock %s for more than %g s", file.name, timeout_s)
                break
            time.sleep(POLL_S)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # a fork may have the file open too, so closing it here is not enough


def try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
