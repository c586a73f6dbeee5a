"""The status board: one page of shared memory on which an engine's controller shows its status.

Server processes read the board for every request. They refuse requests without a round trip, and `is_sleeping` and
`memory_status` answer at once during a transition. Only the controller writes. The sequence number before the payload
is odd during a write. The checksum covers the case that the sequence number cannot: a processor that orders memory
weakly (Arm) may show the end of the write before all of the payload.
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
from rl_memory_plugins.private_directory import directory_with_locks, one_at_a_time, try_lock, unlock
from rl_memory_plugins.records import EngineStatus

_HEADER = struct.Struct("=QQI")  # sequence number, payload length, checksum of both and the payload
_SIZE = 1 << 20
_LOCK_TIMEOUT_S = 10.0
_WRITE_TIMEOUT_S = 1.0  # a write takes microseconds
ANSWER_VALID_S = 1.0
"""How long the answer of an engine on another host counts as its status."""


class StatusBoard:
    """The writer's side. The file lies in a directory that only this user can enter.

    Raises:
        UnsupportedError: the directory has no locks, so nobody would see that the writer has died.
    """

    def __init__(self) -> None:
        directory = directory_with_locks()
        with one_at_a_time("boards", _LOCK_TIMEOUT_S):  # before its lock, a new board looks like that of a dead process
            _remove_boards_of_dead_processes(directory)
            self._handle, self.path = tempfile.mkstemp(prefix=f"{os.getpid()}-", suffix=".board", dir=directory)
            try_lock(self._handle)  # held until the process ends: shows that the process lives
        self._owner = os.getpid()
        os.ftruncate(self._handle, _SIZE)
        self._memory = mmap.mmap(self._handle, _SIZE)
        self._sequence = 0

    def publish(self, status: EngineStatus) -> None:
        payload = msgspec.msgpack.encode(status)
        if _HEADER.size + len(payload) > _SIZE:  # an error in the middle of the write would leave readers waiting
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
        self._file = Path(path).open("rb")  # noqa: SIM115 (open as long as the reader lives)
        self._memory = mmap.mmap(self._file.fileno(), _SIZE, prot=mmap.PROT_READ)
        self._seen = -1
        self._status = EngineStatus(ranks=[])

    def read(self) -> EngineStatus:
        """The status as it is now.

        Raises:
            EngineFaultError: the writer died in the middle of a write.
        """
        deadline = None
        while True:
            sequence, length, checksum = _HEADER.unpack_from(self._memory)
            if sequence == self._seen:
                return self._status
            payload = self._memory[_HEADER.size : _HEADER.size + length]
            if sequence % 2 == 0 and sequence > 0 and checksum == _checksum(sequence, payload):
                self._status = msgspec.msgpack.decode(payload, type=EngineStatus)
                self._seen = sequence
                return self._status
            deadline = deadline or time.monotonic() + _WRITE_TIMEOUT_S
            if time.monotonic() > deadline:
                raise EngineFaultError("the engine has not completed a write of its status board", path=self.path)
            time.sleep(0)

    def writer_lives(self) -> bool:
        """Whether the process that writes the board lives, however busy it is."""
        handle = self._file.fileno()
        try:
            if not try_lock(handle, shared=True):
                return True
        except OSError:  # this process cannot see locks here: nothing shows that the writer has died
            return True
        unlock(handle)
        return False


def _checksum(sequence: int, payload: bytes) -> int:
    """The checksum of the payload and its sequence number. The payload of another write does not match."""
    return zlib.crc32(payload, sequence & 0xFFFFFFFF)


class Boards:
    """The status of several engines: from their boards, or from the last answers of engines on other hosts.

    Args:
        answers: The answer of each engine to `commands.Hello`.

    Attributes:
        name: Of the first engine: the same for all who ask it, and another one for another engine.
    """

    def __init__(self, answers: Sequence[dict[str, Any]]) -> None:
        self._answered_at: float | None = None  # `None` if all engines have boards here
        self._engines: list[BoardReader | EngineStatus] = []
        self.name = Path(answers[0]["board"]).stem if answers else ""
        for answer in answers:
            try:
                self._engines.append(BoardReader(answer["board"]))
            except OSError:
                self._engines.append(msgspec.convert(answer["status"], EngineStatus))
                self._answered_at = time.monotonic()

    @property
    def outdated(self) -> bool:
        """Whether an answer may no longer hold: another server may have changed its engine."""
        return self._answered_at is not None and time.monotonic() > self._answered_at + ANSWER_VALID_S

    @property
    def elsewhere(self) -> int:
        """How many engines are on other hosts."""
        return sum(isinstance(engine, EngineStatus) for engine in self._engines)

    def expire(self) -> None:
        """Declare the answers outdated."""
        if self._answered_at is not None:
            self._answered_at = -math.inf

    def writers_live(self) -> bool:
        """Whether the processes that write the boards on this host live."""
        return all(engine.writer_lives() for engine in self._engines if isinstance(engine, BoardReader))

    def paths(self) -> list[tuple[str, bool]]:
        """The boards on this host: the path of each, and whether the process that writes it lives."""
        return [(one.path, one.writer_lives()) for one in self._engines if isinstance(one, BoardReader)]

    def read(self, busy: str = "") -> list[EngineStatus]:
        """
        Args:
            busy: `EngineStatus.busy` of engines on other hosts, if the reader knows more than their last answers say.
        """
        return [
            engine.read()
            if isinstance(engine, BoardReader)
            else msgspec.structs.replace(engine, busy=busy or engine.busy)
            for engine in self._engines
        ]


def _remove_boards_of_dead_processes(directory: Path) -> None:
    """Boards without a lock. Containers may share the directory but not process ids, so the names show nothing."""
    for board in directory.glob("*.board"):
        with suppress(OSError), board.open("rb") as file:  # e.g. it is gone, or cannot be locked
            if try_lock(file.fileno()):
                board.unlink(missing_ok=True)
