"""The list of shared buffers that processes of this user have open on this host.

Each open buffer has an empty file `PID-FD` in the user's private directory. The process that made the file holds its
lock, so a file whose lock is free belongs to a process that has died. The caller holds `turn` around every call.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from rl_memory_plugins.memory.shared_buffer import SharedBuffer
from rl_memory_plugins.private_directory import one_at_a_time, private_directory, try_lock, unlock

TURN_S = 10.0  # a turn takes milliseconds; locks of the buffers protect their content also without a turn


def turn() -> AbstractContextManager[None]:
    """One process at a time looks for a buffer and takes it."""
    return one_at_a_time("host-copies", TURN_S)


class Entry:
    """The file of one buffer that this process has open."""

    def __init__(self, buffer: SharedBuffer) -> None:
        self._path = _directory() / f"{os.getpid()}-{buffer.fd}"
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self._is_locked = False
        with suppress(OSError):  # without locks no process takes any entry for left over
            self._is_locked = try_lock(self._fd)

    def remove(self) -> None:
        with suppress(FileNotFoundError):  # temporary directories are cleaned
            self._path.unlink()
        if self._is_locked:
            unlock(self._fd)
        os.close(self._fd)


def others() -> Iterator[SharedBuffer]:
    """Open the buffers of other processes; the caller closes them. Files of processes that have died are removed."""
    for path in list(_directory().iterdir()):
        pid, _, number = path.name.partition("-")
        if pid == str(os.getpid()) or not (pid.isdecimal() and number.isdecimal()) or _is_left_over(path):
            continue
        buffer = SharedBuffer.open(int(pid), int(number))
        if buffer is not None:
            yield buffer


def _is_left_over(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        try:
            if not try_lock(fd):
                return False
        except OSError:  # there are no locks here; `SharedBuffer.open` sees by itself whether the buffer is there
            return False
        path.unlink(missing_ok=True)
        return True
    finally:
        os.close(fd)


def _directory() -> Path:
    directory = private_directory() / "host-copies"
    directory.mkdir(mode=0o700, exist_ok=True)
    return directory
