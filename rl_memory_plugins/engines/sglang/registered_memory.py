"""The memory of the weights that SGLang has registered with Mooncake's TransferEngine, over sleeps and wakes.

A registration refers to physical pages, which a sleep gives back. So the registrations end before a sleep releases the
weights, and begin again after the wake, at the same addresses. Meanwhile the transfers of peers fail.
"""

from __future__ import annotations

from typing import Any

from rl_memory_plugins.errors import EngineFaultError


class RegisteredMemory:
    """The memory of the weights that this process has registered."""

    def __init__(self) -> None:
        self._ranges: list[tuple[Any, int, int]] = []  # engine, address, bytes
        self._suspended: list[tuple[Any, int, int]] = []

    def note(self, engine: Any, address: int, nbytes: int) -> None:
        """Note a registration that SGLang has made."""
        self._ranges.append((engine, address, nbytes))

    def suspend(self) -> None:
        """End all registrations.

        Raises:
            EngineFaultError: a registration could not be ended; all others are as before.
        """
        while self._ranges:
            engine, address, nbytes = one = self._ranges[-1]
            if engine.unregister_memory(address) != 0:
                self.resume()
                raise EngineFaultError(
                    f"the TransferEngine keeps {nbytes} bytes of the weights registered, so they cannot be released",
                    address=address,
                    bytes=nbytes,
                )
            self._ranges.pop()
            self._suspended.append(one)

    def resume(self) -> None:
        """Register again what `suspend` has ended. Does nothing to what is registered.

        Raises:
            EngineFaultError: a registration failed. A later call tries it again.
        """
        while self._suspended:
            engine, address, nbytes = one = self._suspended[-1]
            if engine.register_memory(address, nbytes) != 0:
                raise EngineFaultError(
                    f"the TransferEngine cannot register {nbytes} bytes of the weights again",
                    address=address,
                    bytes=nbytes,
                )
            self._suspended.pop()
            self._ranges.append(one)
