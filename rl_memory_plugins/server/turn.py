"""The turn of one server's engine on its GPUs: it has the lease, for some seconds at least."""

from __future__ import annotations

import time
from collections.abc import Iterable

from rl_memory_plugins.server.lease import GpuLease


class Turn:
    """
    Args:
        devices: The names of the engine's GPUs.
        least_s: The option `take_turns_s`.
    """

    def __init__(self, devices: Iterable[str], least_s: float) -> None:
        self._lease = GpuLease(devices)
        self._least_s = least_s
        self._began = 0.0

    async def begin(self, timeout_s: float) -> bool:
        """Wait for the turn. Returns whether this engine has it."""
        began = await self._lease.acquire(timeout_s)
        self.count_from_now()
        return began

    def count_from_now(self) -> None:
        """The engine's seconds count from now on."""
        self._began = time.monotonic()

    def is_over(self) -> bool:
        """Whether an awake engine must sleep: others wait for the GPUs, and it had its time; or others have them
        already. An engine that woke without a turn takes it here if it is free."""
        if not self._lease.held:
            if not self._lease.try_acquire():
                return True
            self.count_from_now()
        return self._lease.is_wanted() and time.monotonic() - self._began >= self._least_s

    def end(self) -> None:
        self._lease.release()

    def close(self) -> None:
        self._lease.close()
