"""Strangers at a trainer's TCP sockets. None of them holds up the others."""

from __future__ import annotations

import contextlib
import queue
import socket
import ssl
import threading
from collections.abc import Callable

from rl_memory_plugins.errors import RLMemoryError
from rl_memory_plugins.memory.threads import await_end
from rl_memory_plugins.weights import wire

HELLO_S = 10.0
"""How long a stranger may take for its `Hello`, TLS included."""

MAX_STRANGERS = 64
"""Connections without a `Hello` at a time, beside as many as there are ranks to come. A further one ends the oldest, so
that silent ones lock no rank out."""


class Greeter:
    """Receives the `Hello` of each connection in a thread of its own. A selector can wait for it.

    A Unix socket needs no greeter: the private directory keeps strangers away.

    Args:
        prepare: Prepares an accepted connection; see `Doors.prepare`.
        ranks: How many ranks are to come: all of them may greet at a time.
    """

    def __init__(self, prepare: Callable[[socket.socket], socket.socket], ranks: int) -> None:
        self._prepare = prepare
        self.ranks = ranks
        self._greeted: queue.SimpleQueue[tuple[wire.Connection, wire.Hello]] = queue.SimpleQueue()
        self._signal, self._waiting = socket.socketpair()
        self._waiting.setblocking(False)
        self._lock = threading.Lock()
        self._strangers: dict[threading.Thread, socket.socket] = {}

    def fileno(self) -> int:
        return self._waiting.fileno()

    def greet(self, sock: socket.socket) -> None:
        """Begin with an accepted connection. The greeter owns it."""
        sock.settimeout(HELLO_S)
        thread = threading.Thread(target=self._greet, args=(sock,), name="rl-memory-greeter", daemon=True)
        with self._lock:
            if len(self._strangers) >= MAX_STRANGERS + self.ranks:
                _end(self._strangers.pop(next(iter(self._strangers))))
            with contextlib.suppress(RuntimeError):  # this process cannot start more threads
                thread.start()
                self._strangers[thread] = sock
                return
        sock.close()

    def take(self) -> list[tuple[wire.Connection, wire.Hello]]:
        """The connections that have said `Hello` since the last call. The caller owns them."""
        with contextlib.suppress(BlockingIOError):
            self._waiting.recv(4096)
        taken = []
        with contextlib.suppress(queue.Empty):
            while True:
                taken.append(self._greeted.get_nowait())
        return taken

    def close(self) -> None:
        """Close all connections that nobody has taken. May be called more than once."""
        with self._lock:
            strangers = dict(self._strangers)
            for sock in strangers.values():
                _end(sock)
        for thread in strangers:
            await_end(thread)
        if self._waiting.fileno() >= 0:
            for connection, _ in self.take():
                connection.close()
        self._signal.close()
        self._waiting.close()

    def _greet(self, sock: socket.socket) -> None:
        own: socket.socket | None = sock
        try:
            deadline = wire.Deadline(HELLO_S)
            own = prepared = self._prepare(sock)
            with self._lock:
                if threading.current_thread() not in self._strangers:
                    return  # a further connection has ended this one
                self._strangers[threading.current_thread()] = prepared
            if isinstance(prepared, ssl.SSLSocket):
                prepared.do_handshake()
            connection = wire.Connection(prepared, "a connecting process")
            try:
                hello = connection.receive(wire.Hello, timeout_s=deadline.remaining(), limit=wire.MAX_HELLO_BYTES)
            except RLMemoryError as error:
                connection.fail(error)
                return
            self._greeted.put((connection, hello))
            own = None
            self._signal.send(b"x")
        except (OSError, ValueError):
            return  # no TLS, gone, or closed by `close`
        finally:
            if own is not None:
                own.close()
            with self._lock:
                self._strangers.pop(threading.current_thread(), None)


def _end(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closes the connection
