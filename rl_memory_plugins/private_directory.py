"""A directory of this user's processes on this host, and locks in it that end with the process that holds them."""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

logger = logging.getLogger(__name__)

POLL_S = 0.02


def private_directory() -> Path:
    """Create the directory if it does not exist. Only this user can enter it.

    Raises:
        PermissionError: the path leads to another user's directory, a file or a symbolic link. Nothing was changed.
    """
    directory = Path(tempfile.gettempdir(), f"rl-memory-{os.getuid()}")
    with suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise PermissionError(
            f"{directory} cannot be opened as a directory ({error.strerror}): remove it, or set TMPDIR to another place"
        ) from error
    try:  # checks the opened directory; the path may lead elsewhere by now
        found = os.fstat(fd)
        if found.st_uid != os.getuid():
            raise PermissionError(f"{directory} belongs to another user: set TMPDIR to another place")
        if stat.S_IMODE(found.st_mode) != 0o700:
            os.fchmod(fd, 0o700)
    finally:
        os.close(fd)
    return directory


@contextmanager
def one_at_a_time(name: str, timeout_s: float, keep_waiting: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Hold the lock `name` in the body. Waits for other processes, but not longer than `timeout_s` seconds.

    Args:
        keep_waiting: Called between two attempts. If it returns `False`, or the time is over, the body runs without
            the lock.
    """
    path = private_directory() / f"{name}.lock"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + timeout_s
        while not try_lock(fd) and keep_waiting():
            if time.monotonic() > deadline:
                logger.warning("another process holds the lock %s for more than %g s", path, timeout_s)
                break
            time.sleep(POLL_S)
        try:
            yield
        finally:
            unlock(fd)
    finally:
        os.close(fd)


def try_lock(fd: int, *, shared: bool = False) -> bool:
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def unlock(fd: int) -> None:
    fcntl.flock(fd, fcntl.LOCK_UN)  # closing would keep the lock if a fork has the file open too
