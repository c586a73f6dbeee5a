"""The trainer's socket for one update: it authenticates receivers and collects their messages."""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import selectors
import shutil
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl_memory_plugins.errors import AuthenticationError, InvalidRequestError, RLMemoryError, WeightUpdateError
from rl_memory_plugins.weights import wire


class ConnectedRank:
    """A rank whose `Hello` was accepted, and the slots that it has not acknowledged."""

    def __init__(self, connection: wire.Connection, hello: wire.Hello) -> None:
        self.connection = connection
        self.rank = hello.rank
        self.device = hello.device
        self.unacknowledged: list[int] = []
        self.candidate_transports: list[str] = []  # the remaining ones, best first
        self.refused: list[dict[str, str]] = []
        connection.peer = f"rank {hello.rank} on {hello.device}"
        connection.details = {"rank": hello.rank, "device": hello.device}


class Listener:
    """A Unix socket in a new private directory. The arguments are those of `WeightSender`.

    Raises:
        InvalidRequestError: no socket can be created in `directory`.
    """

    def __init__(
        self,
        receivers: int | Sequence[str],
        timeout_s: float,
        directory: str | os.PathLike[str] | None = None,
        token: str | None = None,
    ) -> None:
        self._count = receivers if isinstance(receivers, int) else len(receivers)
        self._missing = None if isinstance(receivers, int) else list(receivers)  # devices that have not connected
        self.timeout_s = timeout_s
        self.token = token or secrets.token_urlsafe(32)
        self.ranks: list[ConnectedRank] = []
        self._cancelled: RLMemoryError | None = None
        self._cancel_sender, self._cancel_receiver = socket.socketpair()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._directory: str | None = None
        try:
            self._directory = tempfile.mkdtemp(prefix="rl-memory-", dir=directory)  # mode 0700
            path = str(Path(self._directory) / "weights.sock")
            self._listener.bind(path)
            self._listener.listen(self._count + 8)
            self._listener.setblocking(False)
        except OSError as error:
            self.close()
            where = str(self._directory or directory or "the directory for temporary files")
            raise InvalidRequestError(
                f"cannot create a socket in {where}: {error}", field="directory", got=where
            ) from None
        self.endpoints: dict[str, str] = dict.fromkeys(["*"] if self._missing is None else self._missing, path)

    def close(self) -> None:
        """Close all connections and remove the socket. May be called more than once."""
        for rank in self.ranks:
            rank.connection.close()
        self.ranks = []
        self._listener.close()
        self._cancel_sender.close()
        self._cancel_receiver.close()
        self._cancelled = None  # its traceback may refer to this object
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def cancel(self, error: RLMemoryError) -> None:
        """Make the current or next wait in another thread raise `error`."""
        self._cancelled = error
        try:
            self._cancel_sender.send(b"x")
        except OSError:  # closed: nothing waits
            self._cancelled = None

    def connect(self) -> None:
        """Wait until all receivers have connected. Turns other processes away.

        Raises:
            WeightUpdateError: not all receivers have connected within `timeout_s`.
        """
        deadline = wire.Deadline(self.timeout_s)
        newcomers: list[wire.Connection] = []
        try:
            while len(self.ranks) < self._count:
                ready = self._select([self._listener, *newcomers], deadline.remaining())
                if not ready:
                    absent = self._count - len(self.ranks)
                    raise WeightUpdateError(
                        f"{absent} of {self._count} receivers did not connect within {self.timeout_s:g} s",
                        reason="stalled",
                        timeout_s=self.timeout_s,
                        connected=[rank.device for rank in self.ranks],
                        missing=self._missing,
                    )
                for one in ready:
                    if isinstance(one, wire.Connection):
                        newcomers.remove(one)
                        self._authenticate(one)
                    else:
                        with contextlib.suppress(BlockingIOError):
                            sock, _ = self._listener.accept()
                            newcomers.append(wire.Connection(sock, "a connecting process"))
        finally:
            for newcomer in newcomers:
                newcomer.close()

    def _authenticate(self, connection: wire.Connection) -> None:
        try:
            hello = connection.receive(wire.Hello, timeout_s=1.0, limit=wire.MAX_HELLO_BYTES)
            if hello.protocol != wire.PROTOCOL:
                raise WeightUpdateError(
                    f"the trainer uses protocol {wire.PROTOCOL} and the engine {hello.protocol}: install the "
                    "same version of rl_memory_plugins on both sides",
                    reason="protocol",
                )
            if not hmac.compare_digest(hello.token.encode(), self.token.encode()):
                raise AuthenticationError("the token does not belong to this update")
            if self._missing is not None and hello.device not in self._missing:
                raise WeightUpdateError(
                    f"no receiver is expected on device {hello.device}, or it has already connected",
                    device=hello.device,
                    awaited=self._missing,
                )
            if len(self.ranks) == self._count:
                raise WeightUpdateError(f"all {self._count} receivers have already connected", device=hello.device)
        except RLMemoryError as error:
            connection.fail(error)
            connection.close()
            return
        self.ranks.append(ConnectedRank(connection, hello))
        if self._missing is not None:
            self._missing.remove(hello.device)

    def gather(self, ranks: Sequence[ConnectedRank], *types: type[wire.M]) -> list[tuple[ConnectedRank, wire.M]]:
        """Receive one message from each rank. The failure of one rank ends the wait for all.

        Raises:
            WeightUpdateError: a rank stalled, disconnected, or sent another message.
            RLMemoryError: the error of a rank, or that of `cancel`.
        """
        waiting = {rank.connection: rank for rank in ranks}
        messages: dict[int, wire.M] = {}
        deadline = wire.Deadline(self.timeout_s)
        while waiting:
            ready = self._select(list(waiting), deadline.remaining())
            if not ready:
                wanted = " or ".join(expected.__name__ for expected in types)
                error = next(iter(waiting)).stalled(f"did not send {wanted}", self.timeout_s)
                error.details["stalled_ranks"] = sorted(rank.rank for rank in waiting.values())
                raise error
            for connection in ready:
                rank = waiting.pop(connection)
                messages[id(rank)] = connection.receive(*types, timeout_s=self.timeout_s)
        return [(rank, messages[id(rank)]) for rank in ranks]

    def _select(self, waiting: Sequence[Any], timeout_s: float) -> list[Any]:
        """The sockets and connections that can be read; empty after `timeout_s`.

        Raises:
            RLMemoryError: the error of `cancel`.
        """
        selector = selectors.PollSelector()  # select() cannot watch descriptors above 1023
        for one in (self._cancel_receiver, *waiting):
            selector.register(one, selectors.EVENT_READ)
        ready = [key.fileobj for key, _ in selector.select(timeout_s)]
        # Messages of receivers come first: they are closer to the cause than the error of `cancel`.
        if ready == [self._cancel_receiver]:
            raise self._cancelled or WeightUpdateError("the update was cancelled")
        return [one for one in ready if one is not self._cancel_receiver]
