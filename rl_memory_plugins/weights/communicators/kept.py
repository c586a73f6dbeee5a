"""Communicators that outlive an update: making one takes longer than a small update.

One lives as long as the connection of the update that used it last, which both ends keep open. So each end notices
when the other has died, and the memory of the communicator is free again. If the other's host is gone, nothing says so:
the kernel's probes (`keepalive`) then end the connection.
"""

from __future__ import annotations

import select
import threading
from collections.abc import Iterable

from rl_memory_plugins.weights.communicators import Communicator
from rl_memory_plugins.weights.wire import Connection

MAX_NAMES = 128
"""The communicators that a rank keeps and names to each process of a trainer, which knows at most one of them."""


class KeptCommunicators:
    """The communicators of one end between updates.

    Args:
        most: Keep only so many, the latest. Both ends of the others are closed.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._kept: dict[str, tuple[Communicator, Connection]] = {}
        self._former: dict[str, Connection] = {}  # of communicators in use

    def names(self) -> list[str]:
        with self._lock:
            return list(self._kept)

    def take(self, name: str, transport: str) -> Communicator | None:
        """A kept communicator for an update; `None` if there is none. The caller keeps or drops it."""
        with self._lock:
            if name not in self._kept or self._kept[name][0].transport != transport:
                return None
            communicator, self._former[name] = self._kept.pop(name)
            return communicator

    def keep(self, communicator: Communicator, connection: Connection) -> None:
        """Keep a communicator until the peer closes `connection`. This object owns both from now on."""
        communicator.settle()
        with self._lock:
            self._kept[communicator.name] = communicator, connection
            surplus = 0 if self._most is None else max(len(self._kept) - self._most, 0)
            oldest = [self._kept.pop(name) for name in list(self._kept)[:surplus]]
        _close(oldest)
        self._end_former(communicator)
        watch = threading.Thread(
            target=self._watch, args=(communicator.name, connection), name="rl-memory-communicator", daemon=True
        )
        try:
            watch.start()
        except RuntimeError:  # this process cannot start more threads: the next update makes a new communicator
            self._end(communicator.name, connection)

    def drop(self, communicator: Communicator) -> None:
        """Close a communicator that is not kept: its update has failed."""
        communicator.close()
        self._end_former(communicator)

    def close(self) -> None:
        """Close all kept communicators at both ends."""
        with self._lock:
            kept, self._kept = list(self._kept.values()), {}
        _close(kept)

    def _end_former(self, communicator: Communicator) -> None:
        """End the connection of the update before the current one."""
        with self._lock:
            former = self._former.pop(communicator.name, None)
        if former is not None:
            former.finish()  # the peer closes its end, and `_watch` then this one

    def _watch(self, name: str, connection: Connection) -> None:
        poll = select.poll()
        poll.register(connection.fileno(), select.POLLRDHUP)
        poll.poll()
        self._end(name, connection)

    def _end(self, name: str, connection: Connection) -> None:
        """Close a connection, and the communicator if no later update has it."""
        with self._lock:
            communicator, current = self._kept.get(name, (None, None))
            if current is connection:
                del self._kept[name]
        if communicator is not None and current is connection:
            communicator.close()
        connection.close()


def _close(kept: Iterable[tuple[Communicator, Connection]]) -> None:
    """Close both ends."""
    for communicator, connection in kept:
        communicator.close()
        connection.finish()


OF_TRAINER = KeptCommunicators()
"""Those of this process as a trainer."""


def close_communicators() -> None:
    """Close the communicators of this process to all engines, which free their memory. The next update makes one."""
    OF_TRAINER.close()
