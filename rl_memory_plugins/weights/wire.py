"""The messages between a trainer and a receiver, and the connection that carries them.

The connection is a Unix stream socket. A message is a 4-byte big-endian length and that many bytes of tagged msgpack.
File descriptors travel with the first byte of a message. Every wait has a deadline.

    receiver                              trainer
    Hello(protocol, device, token)   →
                                     ←    Ask(manifest)
    Accept(unused) | Reject(…)       →         … repeated, if the trainer can change what it sends
                                     ←    Offer(manifest, buffer) + descriptors
    Unopened(reason)                 →         … then an Offer of another kind of buffer
    Accept(unused) | Reject(…)       →
                                     ←    Bucket(slot, entries)
    Ack(slot)                        →         … repeated; the trainer reuses a slot after its Ack
                                     ←    Commit
    Done(report)                     →

Either side may send `Failure` at any time and close the connection.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from rl_memory_plugins.errors import RLMemoryError, WeightUpdateError, from_record
from rl_memory_plugins.weights.manifest import BucketEntry, Manifest, Mismatch

PROTOCOL = 3
MAX_MESSAGE_BYTES = 64 << 20
MAX_HELLO_BYTES = 4096
MAX_DESCRIPTORS = 4

_LENGTH = struct.Struct("!I")


class Message(msgspec.Struct, tag=True, frozen=True):
    """Base of all messages."""


class Hello(Message, frozen=True):
    protocol: int
    device: str
    token: str
    rank: int


class Offer(Message, frozen=True):
    manifest: Manifest
    buffer: dict[str, Any]  # for `buffers.attach`


class Ask(Message, frozen=True):
    """Whether a manifest fits. Nothing follows from the answer."""

    manifest: Manifest


class Answer(Message, frozen=True):
    unused: list[str]  # names that this rank's loader ignored and may not ignore
    skipped: list[str] = []  # names that it skips by itself
    nearest: dict[str, str] = {}  # for unused names, similar names that it knows


class Accept(Answer, frozen=True):
    pass


class Reject(Answer, frozen=True, kw_only=True):
    mismatches: list[Mismatch]


class Unopened(Message, frozen=True):
    """The receiver cannot open the offered buffer."""

    reason: str


class Bucket(Message, frozen=True):
    slot: int
    entries: list[BucketEntry]


class Ack(Message, frozen=True):
    slot: int


class Commit(Message, frozen=True):
    unused: list[str] = []  # names that every rank skips


class Done(Message, frozen=True):
    report: dict[str, Any]


class Failure(Message, frozen=True):
    """The sender of this message has given up. `error` is an error record (`RLMemoryError.to_record`)."""

    error: dict[str, Any]


_decode = msgspec.msgpack.Decoder(
    Hello | Ask | Offer | Unopened | Accept | Reject | Bucket | Ack | Commit | Done | Failure
).decode
_encode = msgspec.msgpack.Encoder().encode

M = TypeVar("M", bound=Message)


class Deadline:
    """The point in time at which waits end."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def remaining(self) -> float:
        return max(self._end - time.monotonic(), 0.0)

    def limit(self, sock: socket.socket) -> None:
        """Make the next wait of a socket end at the deadline. Raises `TimeoutError` after the deadline."""
        left = self.remaining()
        if left <= 0:  # as a timeout of a socket, 0 would mean not to wait
            raise TimeoutError
        sock.settimeout(left)


class Connection:
    """One end of a session.

    Args:
        sock: A connected Unix stream socket; the connection owns it.
        peer: The name of the other side in errors, e.g. `"the trainer"`.
        **details: Fields that identify the peer in the details of errors (`rank`, `device`).
    """

    def __init__(self, sock: socket.socket, peer: str, **details: Any) -> None:
        self._sock = sock
        self.peer = peer
        self.details = details

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, message: Message, timeout_s: float, fds: Sequence[int] = ()) -> None:
        """Send one message, with file descriptors.

        Raises:
            WeightUpdateError: the peer does not read, or has disconnected.
            RLMemoryError: the peer's own error, if it sent a `Failure` before it disconnected.
        """
        payload = _encode(message)
        if len(payload) > MAX_MESSAGE_BYTES:
            raise WeightUpdateError(f"a {type(message).__name__} message of {len(payload)} bytes is too large to send")
        data = memoryview(_LENGTH.pack(len(payload)) + payload)
        deadline = Deadline(timeout_s)
        try:
            if fds:
                deadline.limit(self._sock)
                data = data[socket.send_fds(self._sock, [data], list(fds)) :]
            while data:
                deadline.limit(self._sock)
                data = data[self._sock.send(data) :]
        except TimeoutError:
            raise self.stalled(f"did not read {type(message).__name__}", timeout_s) from None
        except OSError:
            while True:  # until `receive` raises the peer's own error, or the loss of the connection
                self.receive(Message, timeout_s=1.0)

    def receive(self, *types: type[M], timeout_s: float, limit: int = MAX_MESSAGE_BYTES) -> M:
        """`receive_with_fds` for a message without file descriptors."""
        message, fds = self.receive_with_fds(*types, timeout_s=timeout_s, limit=limit)
        if fds:
            close_fds(fds)
            raise self._error("sent unexpected file descriptors")
        return message

    def receive_with_fds(
        self, *types: type[M], timeout_s: float, limit: int = MAX_MESSAGE_BYTES
    ) -> tuple[M, list[int]]:
        """Receive a message of one of `types`, and its file descriptors. The caller closes them.

        Args:
            limit: The largest message to accept, in bytes.

        Raises:
            WeightUpdateError: the peer stalled, disconnected, or violated the protocol.
            RLMemoryError: the peer's own error, if it sent a `Failure`.
        """
        fds: list[int] = []
        wanted = " or ".join(expected.__name__ for expected in types)
        try:
            message = self._receive(Deadline(timeout_s), limit, fds)
            if isinstance(message, Failure):
                raise self._peer_error(message)
            if not isinstance(message, types):
                raise self._error(f"sent {type(message).__name__} instead of {wanted}")
            received, fds = fds, []
            return message, received
        except TimeoutError:
            raise self.stalled(f"did not send {wanted}", timeout_s) from None
        except OSError as error:
            raise self._error(f"closed the connection during an update ({error.args[-1]})", reason="lost") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self._error(f"sent an invalid message: {error}") from None
        finally:
            close_fds(fds)

    def _receive(self, deadline: Deadline, limit: int, fds: list[int]) -> Any:
        header = b""
        while len(header) < _LENGTH.size:
            deadline.limit(self._sock)
            part, received, flags = _receive_fds(self._sock, _LENGTH.size - len(header))
            fds += received
            if flags & socket.MSG_CTRUNC:
                raise self._error("sent file descriptors that were lost: this process cannot open more files")
            if not part:
                raise ConnectionResetError("end of stream")
            header += part
        (length,) = _LENGTH.unpack(header)
        if length > limit:
            raise self._error(f"announced a message of {length} bytes; the limit is {limit} bytes")
        payload = bytearray(length)
        view = memoryview(payload)
        while view:
            deadline.limit(self._sock)
            count = self._sock.recv_into(view)
            if not count:
                raise ConnectionResetError("end of stream")
            view = view[count:]
        return _decode(payload)

    def _error(self, problem: str, **details: Any) -> WeightUpdateError:
        return WeightUpdateError(f"{self.peer} {problem}", **details, **self.details)

    def stalled(self, problem: str, timeout_s: float) -> WeightUpdateError:
        return self._error(f"stalled: it {problem} within {timeout_s:g} s", reason="stalled", timeout_s=timeout_s)

    def _peer_error(self, failure: Failure) -> RLMemoryError:
        """The error that the peer sent. A variable in the frame that raises this error would form a reference cycle."""
        error = from_record(failure.error)
        for key, value in self.details.items():
            error.details.setdefault(key, value)
        return error

    def fail(self, error: RLMemoryError, timeout_s: float = 1.0) -> None:
        """Try to send the peer the error that ends the update on this side."""
        with contextlib.suppress(Exception):
            self.send(Failure(error.to_record()), timeout_s)

    def peer_process(self) -> str:
        """Identifies the peer's process and its role."""
        pid, _, _ = struct.unpack("3i", self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return f"{pid}: {self.peer}"

    def finish(self) -> None:
        """End the sending direction."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def await_end(self, timeout_s: float) -> None:
        """Wait until the peer has closed its end.

        Raises:
            WeightUpdateError: the peer did not close it within `timeout_s`.
        """
        deadline = Deadline(timeout_s)
        try:
            deadline.limit(self._sock)
            while self._sock.recv(4096):
                deadline.limit(self._sock)
        except TimeoutError:
            raise self.stalled("did not close the connection", timeout_s) from None
        except OSError:
            return

    def close(self) -> None:
        self._sock.close()


def _receive_fds(sock: socket.socket, nbytes: int) -> tuple[bytes, list[int], int]:
    """Like `socket.recv_fds`, with close-on-exec: some Python versions of `recv_fds` drop their flags."""
    part, ancillary, flags, _ = sock.recvmsg(nbytes, socket.CMSG_SPACE(MAX_DESCRIPTORS * 4), socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) // fds.itemsize * fds.itemsize])
    return part, list(fds), flags


def close_fds(fds: Sequence[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


def as_update_error(error: BaseException, **details: Any) -> RLMemoryError:
    """`error` itself if it is an `RLMemoryError`, else a `WeightUpdateError` that names its type."""
    if isinstance(error, RLMemoryError):
        return error
    return WeightUpdateError(f"{type(error).__name__}: {error}", type=type(error).__name__, **details)
