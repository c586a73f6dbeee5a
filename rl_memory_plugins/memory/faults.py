"""Injects failures into a running engine, for tests. Only an option enables it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from rl_memory_plugins.errors import DeviceMemoryError
from rl_memory_plugins.memory.allocator import Allocator, Block, Reservation
from rl_memory_plugins.tags import Tag


class FaultyAllocator:
    """Forwards all calls to `inner`, except a `reserve` or `release` that a test makes fail.

    The test creates a file `reserve.<rank>` or `release.<rank>` in `directory`. The next such call on that rank removes
    the file and raises `DeviceMemoryError` before it changes anything.
    """

    def __init__(self, inner: Allocator, directory: Path, rank: int) -> None:
        self._inner = inner
        self._directory = directory
        self._rank = rank
        self.name = inner.name
        self.maps_zeroed = inner.maps_zeroed
        self.device = inner.device

    def region(self, tag: Tag) -> AbstractContextManager[None]:
        return self._inner.region(tag)

    def blocks(self, tag: Tag) -> list[Block]:
        return self._inner.blocks(tag)

    def held(self, tag: Tag) -> AbstractContextManager[list[Block]]:
        return self._inner.held(tag)

    def residual_memory(self) -> dict[str, int]:
        return self._inner.residual_memory()

    def reclaim(self) -> None:
        self._inner.reclaim()

    def release(self, tag: Tag) -> int:
        self._fail_if_asked("release")
        return self._inner.release(tag)

    def reserve(self, tag: Tag) -> Reservation:
        self._fail_if_asked("reserve")
        return self._inner.reserve(tag)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)  # methods of one allocator only, such as `adopt`

    def _fail_if_asked(self, operation: str) -> None:
        try:
            (self._directory / f"{operation}.{self._rank}").unlink()
        except FileNotFoundError:
            return
        free, _ = self.device.memory_info()
        raise DeviceMemoryError(
            f"injected failure of {operation} on rank {self._rank}",
            needed_bytes=0,
            free_bytes=free,
            margin_bytes=0,
            injected=True,
        )
