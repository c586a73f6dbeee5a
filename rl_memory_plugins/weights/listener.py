"""The trainer's end of one update: it authenticates receivers and collects their messages."""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import selectors
import socket
from collections.abc import Collection, Sequence
from typing import Any

from rl_memory_plugins.errors import AuthenticationError, RLMemoryError, WeightUpdateError
from rl_memory_plugins.weights import wire
from rl_memory_plugins.weights.addresses import Endpoints
from rl_memory_plugins.weights.communicators import joining
from rl_memory_plugins.weights.connected_rank import ConnectedRank
from rl_memory_plugins.weights.doors import Advertise, Doors
from rl_memory_plugins.weights.greeter import Greeter
from rl_memory_plugins.weights.tls import Tls


class Listener:
    """The sockets of one update, and the ranks that have connected. The arguments are those of `WeightSender`.

    Args:
        local: Whether to listen on a Unix socket.

    Raises:
        InvalidRequestError: a socket cannot be opened; see `Doors`.
        WeightUpdateError: this process can open no more files.
    """

    def __init__(
        self,
        receivers: int | Sequence[str],
        timeout_s: float,
        directory: str | os.PathLike[str] | None = None,
        token: str | None = None,
        *,
        advertise: Advertise | None = None,
        tls: Tls = False,
        local: bool = True,
    ) -> None:
        self._count = receivers if isinstance(receivers, int) else len(receivers)
        self._missing = None if isinstance(receivers, int) else list(receivers)  # devices that have not connected
        self.timeout_s = timeout_s
        self.token = token or secrets.token_urlsafe(32)
        self.ranks: list[ConnectedRank] = []
        self._cancelled: RLMemoryError | None = None
        self._numbers: set[int] | None = None  # of ranks that may connect besides
        self._doors = Doors(self._count + 128, directory=directory, advertise=advertise, local=local, tls=tls)
        try:
            self._greeter = Greeter(self._doors.prepare, self._count)
            self._cancel_sender, self._cancel_receiver = socket.socketpair()
        except OSError as error:  # this process can open no more files
            self._doors.close()
            raise WeightUpdateError(f"cannot open the sockets of an update: {error}", reason="source") from None
        self.places = places = self._doors.places
        self.endpoints: Endpoints = dict.fromkeys(
            ["*"] if self._missing is None else self._missing, places[0] if len(places) == 1 else places
        )

    def expect(self, numbers: Collection[int]) -> None:
        """Let ranks connect that other processes serve. Each says its number."""
        self._numbers = set(numbers)
        self._count += len(self._numbers)
        self._greeter.ranks = self._count

    def close(self) -> None:
        """Close all connections and sockets. May be called more than once."""
        for rank in self.ranks:
            rank.connection.close()
            joining.leave(rank)
        self.ranks = []
        self._doors.close()
        self._greeter.close()
        self._cancel_sender.close()
        self._cancel_receiver.close()
        self._cancelled = None  # its traceback may refer to this object

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
                ready = self._select([*self._doors.sockets, self._greeter, *newcomers], deadline.remaining())
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
                    elif isinstance(one, Greeter):
                        for connection, hello in one.take():
                            self._authenticate(connection, hello)
                    else:
                        with contextlib.suppress(BlockingIOError, ConnectionError):
                            sock, _ = one.accept()
                            if sock.family == socket.AF_UNIX:
                                newcomers.append(wire.Connection(sock, "a connecting process"))
                            else:
                                self._greeter.greet(sock)
        finally:
            for newcomer in newcomers:
                newcomer.close()

    def _authenticate(self, connection: wire.Connection, hello: wire.Hello | None = None) -> None:
        try:
            hello = hello or connection.receive(wire.Hello, timeout_s=1.0, limit=wire.MAX_HELLO_BYTES)
            if hello.protocol != wire.PROTOCOL:
                raise WeightUpdateError(
                    f"the trainer uses protocol {wire.PROTOCOL} and the engine {hello.protocol}: install the "
                    "same version of rl_memory_plugins on both sides",
                    reason="protocol",
                )
            if not hmac.compare_digest(hello.token.encode(), self.token.encode()):
                raise AuthenticationError("the token does not belong to this update")
            if self._numbers is not None:
                if hello.number not in self._numbers:
                    raise WeightUpdateError(f"no rank with the number {hello.number} is expected", device=hello.device)
            elif self._missing is not None and hello.device not in self._missing:
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
        if self._numbers is not None:
            self._numbers.remove(hello.number)
        elif self._missing is not None:
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
        decrypted = [one for one in waiting if isinstance(one, wire.Connection) and one.has_decrypted]
        if decrypted:
            return decrypted
        selector = selectors.PollSelector()  # select() cannot watch descriptors above 1023
        for one in (self._cancel_receiver, *waiting):
            selector.register(one, selectors.EVENT_READ)
        ready = [key.fileobj for key, _ in selector.select(timeout_s)]
        # Messages of receivers come first: they are closer to the cause than the error of `cancel`.
        if ready == [self._cancel_receiver]:
            raise self._cancelled or WeightUpdateError("the update was cancelled")
        return [one for one in ready if one is not self._cancel_receiver]
