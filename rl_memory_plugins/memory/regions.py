"""Shared code of the allocators on top of torch's memory pools: nested regions, and objects that outlive Python."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any


class RegionStack(threading.local):
    """Makes the inner of two nested regions win.

    torch's versions differ in which of a thread's active pools they prefer, and all of them refuse to enter a pool
    twice. The stack therefore keeps at most one pool active: it leaves the outer region while an inner region is open.
    """

    def __init__(self) -> None:
        self._open: list[Callable[[], AbstractContextManager[Any]]] = []
        self._active = ExitStack()  # the entered context of the innermost open region

    @contextmanager
    def enter(self, activate: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
        """Make a region active.

        Args:
            activate: Returns a new context that directs allocations to the region. Called at each entry.
        """
        outer = len(self._open)
        try:
            self._active.close()
            self._open.append(activate)
            self._active.enter_context(activate())
            yield
        finally:
            try:
                self._active.close()
            finally:
                del self._open[outer:]  # also if an interrupt came before or behind `append`
                if self._open:
                    self._active.enter_context(self._open[-1]())


class DeviceRegions:
    """The open regions of all allocators of one GPU.

    torch directs a thread's allocations by device, and so do the regions: that of one allocator may be open inside that
    of another. And it aborts the process if a pool is destroyed while any region of the device is open.

    Attributes:
        stack: The regions of this thread.
        lock: Held while a region opens, and while a pool is destroyed.
        open: An object for each open region, in all threads. A region that closes waits for no lock: an interrupt of
            the wait would leave it open for ever.
    """

    def __init__(self) -> None:
        self.stack = RegionStack()
        self.lock = threading.Lock()
        self.open: set[object] = set()


_devices: dict[int, DeviceRegions] = {}


def regions_of(index: int) -> DeviceRegions:
    """Those of the GPU with this ordinal of torch."""
    return _devices.setdefault(index, DeviceRegions())


def keep_forever(thing: object) -> None:
    """Keep an object alive through the interpreter's shutdown, which drops the globals of modules."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
