"""Turns of several engines on the same GPUs: at most one of them is awake.

A lease is two locks for each GPU, in files that all processes of this user find by the name of the GPU. Who holds
`awake` has its engine awake. Who waits for it holds `next`, by which the holder sees that somebody waits. A lock ends
with its process, however that ends.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Iterable

from rl_memory_plugins.private_directory import POLL_S, directory_with_locks, try_lock, unlock

TOUCH_S = 3600.0
"""Between two touches of the files."""


class GpuLease:
    """The lease of some GPUs for one process.

    Args:
        devices: Their names (`RankStatus.device`). All processes lock them in the same order.

    Attributes:
        held: Whether this process holds `awake` of all GPUs.

    Raises:
        UnsupportedError: the private directory has no locks, so no turn would ever come.
    """

    def __init__(self, devices: Iterable[str]) -> None:
        directory = directory_with_locks()
        names = sorted({re.sub(r"[^\w.-]", "_", device) for device in devices})
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._awake = [os.open(directory / f"{name}.awake.lock", flags, 0o600) for name in names]
        self._next = [os.open(directory / f"{name}.next.lock", flags, 0o600) for name in names]
        self._acquiring = asyncio.Lock()  # a process does not lock out itself
        self.held = False
        self._touch_at = 0.0
        self._touch()

    def close(self) -> None:
        for fd in (*self._awake, *self._next):
            unlock(fd)
            os.close(fd)
        self._awake, self._next = [], []
        self.held = False

    def try_acquire(self) -> bool:
        """Take the lease if no other process has one of its GPUs, or waits for one."""
        if not self.held and not self.is_wanted():
            self.held = _all_or_none(self._awake)
        return self.held

    async def acquire(self, timeout_s: float) -> bool:
        """Wait for the lease. Returns whether this process has it."""
        deadline = time.monotonic() + timeout_s
        async with self._acquiring:
            if self.held:
                return True
            taken: list[int] = []
            try:
                for fd in (*self._next, *self._awake):
                    while not try_lock(fd):
                        if time.monotonic() >= deadline:
                            return False
                        await asyncio.sleep(POLL_S)
                    taken.append(fd)
                self.held = True
                return True
            finally:
                for fd in taken:
                    if fd in self._next or not self.held:
                        unlock(fd)

    def release(self) -> None:
        """Give the lease up, if this process has it. A wait for it goes on."""
        if self.held:
            for fd in self._awake:
                unlock(fd)
            self.held = False

    def is_wanted(self) -> bool:
        """Whether another process waits for one of the GPUs."""
        self._touch()
        free = _all_or_none(self._next)
        if free:
            for fd in self._next:
                unlock(fd)
        return not free

    def _touch(self) -> None:
        """Keep the files young: a cleaner of temporary files would take old ones away, and others make new ones."""
        if time.monotonic() >= self._touch_at:
            self._touch_at = time.monotonic() + TOUCH_S
            for fd in (*self._awake, *self._next):
                os.utime(fd)


def _all_or_none(fds: list[int]) -> bool:
    taken: list[int] = []
    for fd in fds:
        if not try_lock(fd):
            for one in taken:
                unlock(one)
            return False
        taken.append(fd)
    return True
