"""The status board: one page of shared memory on which an engine's controller shows its status.

Server processes read it for every request, so a request is refused without a round trip, and `is_sleeping`
and `memory_status` answer at once even while the engine is busy with a transition. The controller is the only
writer. A sequence number before the payload is odd while a write is under way. A checksum of the payload finds what the
sequence number cannot: a processor that orders memory weakly (Arm) may show its end before the payload's.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
import tempfile
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from rl_memory_plugins.errors import EngineFaultError
from rl_memory_plugins.private_directory import one_at_a_time, private_directory, try_lock
from rl_memory_plugins.records import EngineStatus

_HEADER = struct.Struct("=QQI")  # sequence number, payload length, checksum of both and the payload
_SIZE = 1 << 20
_LOCK_TIMEOUT_S = 10.0
_WRITE_TIMEOUT_S = 1.0  # a write takes microseconds
TOLD_S = 1.0
"""For so long the status that an engine on another host told is taken for true."""


class StatusBoard:
    """The writer's side. The file lies in a directory that only this user can enter."""

    def __init__(self) -> None:
        directory = private_directory()
        with one_at_a_time("boards", _LOCK_TIMEOUT_S):  # a board that is not locked yet looks like a dead process's
            _remove_boards_of_dead_processes(directory)
            self._handle, self.path = tempfile.mkstemp(prefix=f"{os.getpid()}-", suffix=".board", dir=directory)
            try_lock(self._handle)  # held as long as this process lives, which shows that it does
        self._owner = os.getpid()
        os.ftruncate(self._handle, _SIZE)
        self._memory = mmap.mmap(self._handle, _SIZE)
        self._sequence = 0
        self._encoder = msgspec.msgpack.Encoder()

    def publish(self, status: EngineStatus) -> None:
        payload = self._encoder.encode(status)
        if _HEADER.size + len(payload) > _SIZE:  # found out half-way, it would leave readers waiting for ever
            raise ValueError(f"a status of {len(payload)} bytes does not fit the board")
        self._memory[: _HEADER.size] = _HEADER.pack(self._sequence + 1, len(payload), 0)
        self._memory[_HEADER.size : _HEADER.size + len(payload)] = payload
        self._sequence += 2
        checksum = _checksum(self._sequence, payload)
        self._memory[: _HEADER.size] = _HEADER.pack(self._sequence, len(payload), checksum)

    def close(self) -> None:
        if os.getpid() == self._owner and self._handle >= 0:
            Path(self.path).unlink(missing_ok=True)
            os.close(self._handle)
            self._handle = -1


class BoardReader:
    """The reader's side; an unchanged board costs one comparison."""

    def __init__(self, path: str) -> None:
        self.path = path
        with Path(path).open("rb") as file:
            self._memory = mmap.mmap(file.fileno(), _SIZE, prot=mmap.PROT_READ)
        self._decoder = msgspec.msgpack.Decoder(EngineStatus)
        self._seen = -1
        self._status: EngineStatus | None = None

    def read(self) -> EngineStatus:
        """The status as it is now.

        Raises:
            EngineFaultError: the writer died in the middle of a write.
        """
        deadline = None
        while True:
            sequence, length, checksum = _HEADER.unpack_from(self._memory)
            if sequence == self._seen and self._status is not None:
                return self._status
            payload = self._memory[_HEADER.size : _HEADER.size + length]
            if sequence % 2 == 0 and sequence > 0 and checksum == _checksum(sequence, payload):
                self._status = self._decoder.decode(payload)
                self._seen = sequence
                return self._status
            deadline = deadline or time.monotonic() + _WRITE_TIMEOUT_S
            if time.monotonic() > deadline:
                raise EngineFaultError("the engine's status board is not being written to the end", path=self.path)
            time.sleep(0)


def _checksum(sequence: int, payload: bytes) -> int:
    """Of one state of the board; with the sequence number in it, a payload of another state does not fit."""
    return zlib.crc32(payload, sequence & 0xFFFFFFFF)


class Boards:
    """The status of several engines: read from their boards, or the last that they told from another host.

    Args:
        told: Each engine's answer to `commands.Hello`.
    """

    def __init__(self, told: Sequence[dict[str, Any]]) -> None:
        self.complete = True
        self._told_at = time.monotonic()
        self._engines: list[BoardReader | EngineStatus] = []
        for engine in told:
            try:
                self._engines.append(BoardReader(engine["board"]))
            except OSError:
                self._engines.append(msgspec.convert(engine["status"], EngineStatus))
                self.complete = False

    @property
    def outdated(self) -> bool:
        """Whether what was told may no longer be so: others may have changed it through another server."""
        return not self.complete and time.monotonic() > self._told_at + TOLD_S

    def expire(self) -> None:
        """What was told is no longer so."""
        self._told_at = -math.inf

    def read(self, busy: str = "") -> list[EngineStatus]:
        """
        Args:
            busy: What keeps the engines of other hosts busy, as far as the reader knows, where they did not say it.
        """
        return [engine.read() if isinstance(engine, BoardReader) else _told(engine, busy) for engine in self._engines]


def _told(status: EngineStatus, busy: str) -> EngineStatus:
    return msgspec.structs.replace(status, busy=busy) if busy else status


def _remove_boards_of_dead_processes(directory: Path) -> None:
    """Containers may share the directory and not their processes' numbers, so it is the locks that count."""
    for board in directory.glob("*.board"):
        with suppress(FileNotFoundError), board.open("rb") as file:
            if try_lock(file.fileno()):
                board.unlink(missing_ok=True)
