"""Injects failures into a running engine, for tests. Only the option `fault_dir` enables the injection."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rl_memory_plugins.memory.allocator import Allocator, Reservation, out_of_device_memory


class FaultyAllocator:
    """Forwards everything to `inner`, except a `reserve` or `release` that a test makes fail.

    The test creates a file `reserve.<rank>` or `release.<rank>` in `directory`. The next such call on that rank removes
    the file and raises `DeviceMemoryError` before it changes anything.
    """

    def __init__(self, inner: Allocator, directory: Path, rank: int) -> None:
        self._inner = inner
        self._directory = directory
        self._rank = rank

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def release(self, tag: str) -> int:
        self._fail_if_asked("release")
        return self._inner.release(tag)

    def reserve(self, tag: str) -> Reservation:
        self._fail_if_asked("reserve")
        return self._inner.reserve(tag)

    def _fail_if_asked(self, operation: str) -> None:
        try:
            (self._directory / f"{operation}.{self._rank}").unlink()
        except FileNotFoundError:
            return
        free, _ = self.device.memory_info()
        raise out_of_device_memory(f"injected failure of {operation} on rank {self._rank}", free, injected=True)
