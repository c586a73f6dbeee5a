"""`gloo`: a process group of torch for two processes that share no launcher."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rl_memory_plugins.errors import RLMemoryError, UnsupportedError
from rl_memory_plugins.weights import wire


class GlooCommunicator:
    """See `Communicator`. The ends find each other over the connection of the update: no further port is opened for it.

    Gloo trusts its peer: a transfer that is longer than a slot ends the process.
    """

    transport = "gloo"
    device: torch.device | None = None

    def __init__(self, name: str, connection: wire.Connection, end: int, timeout_s: float) -> None:
        if not (dist.is_available() and dist.is_gloo_available()):
            raise UnsupportedError("this torch is built without Gloo")
        self.name = name
        self._peer = 1 - end
        self._count = 0  # of the transfers so far, the same at both ends
        self._sent: dict[int, Any] = {}  # by the address of the slot
        self._receiving: deque[Any] = deque()  # the transfers that have begun, in order
        self._group: Any = _joined(_Meeting(connection, timeout_s), connection, end, timeout_s)

    def send(self, data: torch.Tensor, connection: wire.Connection, timeout_s: float) -> None:
        try:
            work = self._group.send([data], self._peer, self._count)
        except RuntimeError as error:
            raise ConnectionError(_first_line(error)) from None
        self._count += 1
        self._sent[data.data_ptr()] = work, data  # the former transfer from this slot was acknowledged

    def begin_receive(self, slot: torch.Tensor, nbytes: int, connection: wire.Connection, timeout_s: float) -> None:
        try:
            # the whole slot: what is longer than the memory would end the process
            self._receiving.append(self._group.recv([slot], self._peer, self._count))
        except RuntimeError as error:
            raise ConnectionError(_first_line(error)) from None
        self._count += 1

    def await_received(
        self, connection: wire.Connection, timeout_s: float, meanwhile: Callable[[], None] = lambda: None
    ) -> None:
        problems: list[str] = []
        work = self._receiving.popleft()

        def wait() -> None:
            try:
                work.wait(timedelta(seconds=timeout_s))
            except RuntimeError as error:
                problems.append(_first_line(error))

        deadline = wire.Deadline(timeout_s)
        if not _run(wait, connection, deadline, meanwhile) or problems:
            if not deadline.remaining():
                raise TimeoutError
            raise ConnectionError(problems[0] if problems else "the peer has closed the connection")

    def settle(self) -> None:
        self._sent.clear()

    def close(self) -> None:
        self._sent.clear()
        self._receiving.clear()
        self._group = _Closed()  # Gloo closes its connections with the group, which breaks the peer's transfers


def _joined(meeting: _Meeting, connection: wire.Connection, end: int, timeout_s: float) -> Any:
    """The process group of both ends. See `communicators.join`."""
    made: list[Any] = []

    def make() -> None:
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        options._threads = 1
        try:
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=connection.own_host())]
            made.append(dist.ProcessGroupGloo(meeting, end, 2, options))
        except Exception as error:
            made.append(meeting.error or UnsupportedError(f"Gloo cannot join the two ends: {_first_line(error)}"))

    _run(make, connection, wire.Deadline(timeout_s))
    meeting.is_over = True
    if not made and connection.is_ended():
        connection.raise_cause("left while the two ends were joined")
    found = made[0] if made else UnsupportedError(f"Gloo did not join the two ends within {timeout_s:g} s")
    try:
        if isinstance(found, Exception):
            raise found
        return found
    finally:
        del found  # breaks the reference cycle between the error and this frame


def _run(
    call: Callable[[], None],
    connection: wire.Connection,
    deadline: wire.Deadline,
    meanwhile: Callable[[], None] = lambda: None,
) -> bool:
    """Call something that waits for the peer. Returns whether it ended before the deadline and the connection did.

    Gloo may notice neither the end of a peer nor its own timeout. Its thread is then left behind, and ends by itself.
    """
    thread = threading.Thread(target=call, name="rl-memory-gloo", daemon=True)
    thread.start()
    while thread.is_alive() and deadline.remaining() and not connection.is_ended():
        meanwhile()
        thread.join(0.02)
    thread.join(min(deadline.remaining(), 0.5))  # what ended the connection may end the call too
    return not thread.is_alive()


class _Closed:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("the communicator is closed")


class _Meeting(dist.Store):  # type: ignore[misc]
    """The store in which two ends leave their addresses: each sends its own to the other.

    Attributes:
        error: The error of the connection; also the peer's, if it gave up.
        is_over: Nobody waits any longer, and the connection is used otherwise.
    """

    def __init__(self, connection: wire.Connection, timeout_s: float) -> None:
        super().__init__()
        self._connection = connection
        self._timeout_s = timeout_s
        self._values: dict[str, bytes] = {}
        self.error: RLMemoryError | None = None
        self.is_over = False

    def set(self, key: str, value: bytes | str) -> None:
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)
        self._try(lambda: self._connection.send(wire.Meet(key, self._values[key]), self._timeout_s))

    def get(self, key: str) -> bytes:
        while key not in self._values:
            self._try(self._learn)
        return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def _learn(self) -> None:
        message = self._connection.receive(wire.Meet, wire.Unopened, timeout_s=self._timeout_s)
        if isinstance(message, wire.Unopened):
            raise UnsupportedError(message.reason, declined=True)
        assert isinstance(message, wire.Meet)
        self._values[message.key] = message.value

    def _try(self, run: Any) -> None:
        if self.is_over:
            raise TimeoutError
        try:
            run()
        except RLMemoryError as error:
            self.error = error
            raise


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rpartition("] ")[2] or type(error).__name__
