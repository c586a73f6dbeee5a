"""An engine's processes: they start in a group of their own, and none is left when they have been stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from rl_memory_plugins.extras import needs

with needs("serve"):
    import psutil

STOP_S = 15.0
"""How long an engine may take to stop after SIGTERM. Then its processes are killed. Kubernetes' own limit is 30."""

LEFT_S = 1.0
"""How long the other processes of an engine may take to stop after its server."""

_POLL_S = 0.05


class ProcessTree:
    """A child process, and all that it starts.

    Args:
        command: The command line.
        environment: All variables.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._command = [*command]
        self._environment = {**environment}
        self._process: asyncio.subprocess.Process | None = None
        self._known: set[psutil.Process] = set()
        self.exit: asyncio.Task[int] | None = None  # the exit code; negative: the number of a signal

    async def start(self) -> None:
        """
        Raises:
            OSError: the program cannot be run.
            ValueError: the command line or a variable is none that a program can get.
        """
        # Where Python can, no new session: Linux schedules each session as one, and engines that compute on all cores
        # would keep the proxy from running.
        group: dict[str, Any] = {"process_group": 0} if sys.version_info >= (3, 11) else {"start_new_session": True}
        self._process = await asyncio.create_subprocess_exec(
            *self._command, env=self._environment, stdin=asyncio.subprocess.DEVNULL, **group
        )
        self._known = set()
        self.exit = asyncio.ensure_future(self._process.wait())

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def runs(self) -> bool:
        return self.exit is not None and not self.exit.done()

    def look(self) -> None:
        """Remember the processes that there are. They may outlive the first one, and leave its group."""
        if self.pid is not None:
            with suppress(psutil.Error):
                self._known.update(psutil.Process(self.pid).children(recursive=True))

    async def stop(self) -> None:
        """Stop all processes: ask first, and kill what has not ended in `STOP_S`."""
        if self._process is None or self.exit is None:
            return
        self.look()
        with suppress(ProcessLookupError):
            self._process.terminate()
        await asyncio.wait([self.exit], timeout=STOP_S)
        await self._gone(LEFT_S)
        await self.kill()

    async def kill(self) -> None:
        """Kill what is left, of a process that has ended too. Then they are forgotten: others get their numbers."""
        if self._process is None or self.exit is None:
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for process in alive(self._known):
            with suppress(psutil.Error):
                process.kill()
        await asyncio.wait([self.exit])
        await self._gone(STOP_S)
        self._process, self._known = None, set()

    async def _gone(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while alive(self._known) and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)


def alive(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that run: a zombie only waits to be reaped."""
    return [process for process in processes if _is_alive(process)]


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
