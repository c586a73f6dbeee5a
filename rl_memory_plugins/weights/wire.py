"""The messages between a trainer and a receiver, and the connection that carries them.

The connection is a Unix or TCP stream socket, the latter also with TLS. A message is a 4-byte big-endian length and
that many bytes of tagged msgpack. File descriptors travel with the first byte of a message, over Unix sockets only.
The bytes of a bucket may follow its message (`buffers/streamed.py`), or travel over a communicator. Every wait has a
deadline.

    receiver                              trainer
    Hello(protocol, device, token)   →
                                     ←    Ask(manifest)
    Accept(unused) | Reject(…)       →         … repeated, if the trainer can change what it sends
                                     ←    Offer(manifest, buffer) + descriptors
    Meet(key, value)                 ↔         … while the two ends make a communicator
    Unopened(reason)                 →         … then an Offer of another kind of buffer
    Accept(unused) | Reject(…)       →
                                     ←    Divide(layouts, places)    … if other processes send their shards
    Accept()                         →         … once it is connected with all of them
                                     ←    Bucket(slot, entries)
    Ack(slot)                        →         … repeated; the trainer reuses a slot after its Ack, which the rank
                                               sends once it has loaded the bucket, or has it in memory of its own
                                     ←    Commit
    Done(report)                     →

After a `Divide` the rank connects to the other processes, too. There it says `Hello` with its number in the `Divide`,
and gets a `Link` instead of an offer. The first process then announces each bucket, and each process sends a `Bucket`
with its parts, and their bytes, to the ranks for which it has some. A rank acknowledges every bucket to every process.

Either side may send `Failure` at any time and close the connection.
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import ssl
import struct
import time
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, TypeVar

import msgspec

from rl_memory_plugins import keepalive
from rl_memory_plugins.errors import RLMemoryError, WeightUpdateError, from_record
from rl_memory_plugins.weights.manifest import BucketEntry, Manifest, Mismatch
from rl_memory_plugins.weights.shards import Layouts
from rl_memory_plugins.weights.slices import Slice

PROTOCOL = 6
MAX_MESSAGE_BYTES = 64 << 20
MAX_HELLO_BYTES = 4096
MAX_DESCRIPTORS = 4

PART_BYTES = 4 << 20
"""The bytes of a bucket that must pass within one timeout. A deadline for the whole would be too short on a slow link,
and one for each byte would let a peer hold up the engine forever."""

_LENGTH = struct.Struct("!I")


class Message(msgspec.Struct, tag=True, frozen=True):
    """Base of all messages."""


class Hello(Message, frozen=True):
    protocol: int
    device: str
    token: str
    rank: int
    held: list[str] = []  # the names of the communicators that this rank has kept
    nccl: dict[str, str] = {}  # see `over_nccl.settings`
    number: int = -1  # what a `Divide` has told this rank; -1 before


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
    slices: list[Slice | None] = []  # what this rank needs of each tensor, if the offer asks for it
    divisible: bool = False  # a `Divide` may follow


class Reject(Answer, frozen=True, kw_only=True):
    mismatches: list[Mismatch]


class Divide(Message, frozen=True):
    """The processes of the trainer send their shards. Parts of a bucket come from all of them."""

    layouts: Layouts
    process: int  # the one at the other end of this connection; it also sends the tensors without a layout
    number: int  # of this rank among those of all engines
    ranks: int  # of all engines
    places: list[list[str]]  # of each process; none for one that has nothing for this rank
    slot_bytes: int  # the largest bucket of this rank


class Link(Message, frozen=True):
    """What another process of the trainer sends its parts with."""

    buffer: dict[str, Any]  # for `buffers.attach`


class Meet(Message, frozen=True):
    """What one end of a new communicator tells the other."""

    key: str
    value: bytes


class Unopened(Message, frozen=True):
    """The receiver cannot open the offered buffer."""

    reason: str


class Bucket(Message, frozen=True):
    slot: int
    entries: list[BucketEntry]
    seal: bytes = b""  # with a communicator, what follows the last of the entries in the slot
    checksum: int | None = None  # of what this process sends, if several do


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
    Hello | Ask | Offer | Meet | Unopened | Accept | Reject | Divide | Link | Bucket | Ack | Commit | Done | Failure
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
        sock: A connected Unix or TCP stream socket, with TLS or without; the connection owns it.
        peer: The name of the other side in errors, e.g. `"the trainer"`.
        **details: Fields that identify the peer in the details of errors (`rank`, `device`).

    Attributes:
        is_local: Whether the socket is a Unix socket, which carries file descriptors.
    """

    def __init__(self, sock: socket.socket, peer: str, **details: Any) -> None:
        self._sock = sock
        self.peer = peer
        self.details = details
        self.is_local = sock.family == socket.AF_UNIX
        self._is_cut = False  # a part of something was sent, and its rest never will be
        self._is_unbroken = False  # inside `unbroken`, or left by an error there
        self.sent_bytes = 0

    def fileno(self) -> int:
        return self._sock.fileno()

    def own_host(self) -> str:
        """The address at which the peer's host reaches this one."""
        return "127.0.0.1" if self.is_local else str(self._sock.getsockname()[0])

    def is_ended(self) -> bool:
        """Whether the peer has closed its end. What it sent before may still be unread."""
        poll = select.poll()
        poll.register(self._sock, select.POLLRDHUP)
        return bool(poll.poll(0))

    def watch_host(self) -> None:
        """Have the kernel end a connection that carries nothing any more once the peer's host is gone."""
        if not self.is_local:
            keepalive.end_unacknowledged(self._sock)

    def has_message(self) -> bool:
        """Whether the peer has sent something, or has closed its end. Not for TLS, see `has_decrypted`."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(0))

    @property
    def has_decrypted(self) -> bool:
        """Whether bytes wait in this process, where no selector sees them."""
        return isinstance(self._sock, ssl.SSLSocket) and self._sock.pending() > 0

    def send(self, message: Message, timeout_s: float, fds: Sequence[int] = ()) -> None:
        """Send one message, with file descriptors.

        Raises:
            WeightUpdateError: the peer does not read, or has disconnected.
            RLMemoryError: the peer's own error, if it sent a `Failure` before it disconnected.
        """
        payload = _encode(message)
        if len(payload) > MAX_MESSAGE_BYTES:
            raise WeightUpdateError(f"a {type(message).__name__} message of {len(payload)} bytes is too large to send")
        self._send(memoryview(_LENGTH.pack(len(payload)) + payload), type(message).__name__, timeout_s, fds)

    @contextlib.contextmanager
    def unbroken(self) -> Iterator[None]:
        """What is sent inside belongs together. If an error ends it early, `fail` sends nothing more."""
        self._is_unbroken = True
        yield
        self._is_unbroken = False

    def send_bytes(self, data: memoryview, timeout_s: float) -> None:
        """Send the bytes that a message has announced. Every `PART_BYTES` must pass within `timeout_s`.

        Raises:
            WeightUpdateError, RLMemoryError: as for `send`.
        """
        for start in range(0, len(data), PART_BYTES):
            self._send(data[start : start + PART_BYTES], "the bytes of a bucket", timeout_s)

    def _send(self, data: memoryview, what: str, timeout_s: float, fds: Sequence[int] = ()) -> None:
        deadline = Deadline(timeout_s)
        self._is_cut = True
        try:
            while data:
                deadline.limit(self._sock)
                count = socket.send_fds(self._sock, [data], list(fds)) if fds else self._sock.send(data)
                data, fds = data[count:], ()
                self.sent_bytes += count
        except TimeoutError:
            raise self.stalled(f"did not read {what}", timeout_s) from None
        except OSError:
            while True:  # until `receive` raises the peer's own error, or the loss of the connection
                self.receive(Message, timeout_s=1.0)
        self._is_cut = False

    def receive(self, *types: type[M], timeout_s: float, limit: int = MAX_MESSAGE_BYTES) -> M:
        """`receive_with_fds` for a message without file descriptors."""
        message, fds = self.receive_with_fds(*types, timeout_s=timeout_s, limit=limit)
        if fds:
            close_fds(fds)
            raise self.error("sent unexpected file descriptors")
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
                raise self.error(f"sent {type(message).__name__} instead of {wanted}")
            received, fds = fds, []
            return message, received
        except TimeoutError:
            raise self.stalled(f"did not send {wanted}", timeout_s) from None
        except OSError as error:
            raise self._lost(error) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self.error(f"sent an invalid message: {error}") from None
        finally:
            close_fds(fds)

    def _receive(self, deadline: Deadline, limit: int, fds: list[int]) -> Any:
        header = b""
        while len(header) < _LENGTH.size:
            deadline.limit(self._sock)
            if self.is_local:
                part, received, flags = _receive_fds(self._sock, _LENGTH.size - len(header))
            else:
                part, received, flags = self._sock.recv(_LENGTH.size - len(header)), [], 0
            fds += received
            if flags & socket.MSG_CTRUNC:
                raise self.error("sent file descriptors that were lost: this process cannot open more files")
            if not part:
                raise ConnectionResetError("end of stream")
            header += part
        (length,) = _LENGTH.unpack(header)
        if length > limit:
            raise self.error(f"announced a message of {length} bytes; the limit is {limit} bytes")
        payload = bytearray(length)
        self._fill(memoryview(payload), deadline)
        return _decode(payload)

    def receive_bytes(self, memory: memoryview, timeout_s: float) -> None:
        """Fill `memory` with the bytes that a message has announced. Every `PART_BYTES` must come within `timeout_s`.

        Raises:
            WeightUpdateError: the peer stalled or disconnected.
        """
        try:
            for start in range(0, len(memory), PART_BYTES):
                self._fill(memory[start : start + PART_BYTES], Deadline(timeout_s))
        except TimeoutError:
            raise self.stalled("did not send the bytes of a bucket", timeout_s) from None
        except OSError as error:
            raise self._lost(error) from None

    def raise_cause(self, problem: str) -> NoReturn:
        """Raise the error that the peer has sent or is about to send; without one, an error that states `problem`."""
        try:
            while True:
                self.receive(Message, timeout_s=1.0)
        except WeightUpdateError as error:
            if error.details.get("reason") != "stalled":
                raise
        raise self.error(problem, reason="lost")

    def _fill(self, memory: memoryview, deadline: Deadline) -> None:
        while memory:
            deadline.limit(self._sock)
            count = self._sock.recv_into(memory)
            if not count:
                raise ConnectionResetError("end of stream")
            memory = memory[count:]

    def error(self, problem: str, **details: Any) -> WeightUpdateError:
        return WeightUpdateError(f"{self.peer} {problem}", **details, **self.details)

    def _lost(self, error: OSError) -> WeightUpdateError:
        return self.error(f"closed the connection during an update ({error.args[-1]})", reason="lost")

    def stalled(self, problem: str, timeout_s: float) -> WeightUpdateError:
        return self.error(f"stalled: it {problem} within {timeout_s:g} s", reason="stalled", timeout_s=timeout_s)

    def _peer_error(self, failure: Failure) -> RLMemoryError:
        """The error that the peer sent. A variable in the frame that raises this error would form a reference cycle."""
        error = from_record(failure.error)
        for key, value in self.details.items():
            error.details.setdefault(key, value)
        return error

    def fail(self, error: RLMemoryError, timeout_s: float = 1.0) -> None:
        """Try to send the peer the error that ends the update on this side."""
        if self._is_cut or self._is_unbroken:  # the peer would take the message for the rest of what was cut
            return
        with contextlib.suppress(Exception):
            self.send(Failure(error.to_record()), timeout_s)

    def peer_process(self) -> str:
        """Identifies the peer's process and its role."""
        pid, _, _ = struct.unpack("3i", self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return f"{pid}: {self.peer}"

    def cut(self) -> None:
        """End both directions at once if something is being sent: the thread that sends it gets an error."""
        if self._is_cut or self._is_unbroken:
            self._shut(socket.SHUT_RDWR)

    def finish(self) -> None:
        """End the sending direction."""
        self._shut(socket.SHUT_WR)

    def _shut(self, direction: int) -> None:
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._sock, direction)  # after that of TLS all would go on in clear text

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
