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
from functools import cache
from pathlib import Path

from rl_memory_plugins.errors import UnsupportedError

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


def directory_with_locks() -> Path:
    """The private directory, for what tells by a lock whether a process lives.

    Raises:
        PermissionError: see `private_directory`.
        UnsupportedError: its file system has no locks.
    """
    directory = private_directory()
    with tempfile.TemporaryFile(dir=directory) as file:
        try:
            try_lock(file.fileno())
        except OSError as error:
            raise UnsupportedError(_no_locks(directory, error)) from error
    return directory


@contextmanager
def one_at_a_time(name: str, timeout_s: float, keep_waiting: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Hold the lock `name` in the body. Waits for other processes, but not longer than `timeout_s` seconds.

    If the file system has no locks, the body runs at once, without the lock, and the first such call warns.

    Args:
        keep_waiting: Called between two attempts. If it returns `False`, or the time is over, the body runs without
            the lock.
    """
    directory = private_directory()
    path = directory / f"{name}.lock"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            is_mine = _await_lock(fd, path, timeout_s, keep_waiting)
        except OSError as error:
            _warn_of_no_locks(_no_locks(directory, error))
            is_mine = False
        try:
            yield
        finally:
            if is_mine:
                unlock(fd)
    finally:
        os.close(fd)


def _await_lock(fd: int, path: Path, timeout_s: float, keep_waiting: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + timeout_s
    while not try_lock(fd):
        if not keep_waiting():
            return False
        if time.monotonic() > deadline:
            logger.warning("another process holds the lock %s for more than %g s", path, timeout_s)
            return False
        time.sleep(POLL_S)
    return True


def _no_locks(directory: Path, error: OSError) -> str:
    return f"{directory} has no locks ({error.strerror}): set TMPDIR to a directory of a local disk"


@cache
def _warn_of_no_locks(message: str) -> None:
    logger.warning("%s. Until then processes of this host do not wait for each other", message)


def try_lock(fd: int, *, shared: bool = False) -> bool:
    """Take the lock of an open file. Returns `False` if another holds it.

    Raises:
        OSError: nobody can lock the file: its file system has no locks, as some mounts of Lustre and NFS. That says
            nothing about other processes.
    """
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(fd: int) -> None:
    fcntl.flock(fd, fcntl.LOCK_UN)  # closing would keep the lock if a fork has the file open too
