"""The status board: one page of shared memory on which an engine's controller shows its status.

Server processes read it for every request, so a request is refused without a round trip, and `is_sleeping`
and `memory_status` answer at once even while the engine is busy with a transition. The controller is the only
writer. A sequence number before the payload is odd while a write is under way.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rl_memory_plugins.errors import EngineFaultError
from rl_memory_plugins.records import EngineStatus

_HEADER = struct.Struct("=QQ")  # sequence number, payload length
_SIZE = 1 << 20
_WRITE_TIMEOUT_S = 1.0  # a write takes microseconds


class StatusBoard:
    """The writer's side. The file lies in a directory that only this user can enter."""

    def __init__(self) -> None:
        directory = Path(tempfile.gettempdir(), f"rl-memory-{os.getuid()}")
        directory.mkdir(mode=0o700, exist_ok=True)
        if directory.stat().st_uid != os.getuid():
            raise PermissionError(f"{directory} belongs to another user")
        directory.chmod(0o700)
        _remove_boards_of_dead_processes(directory)
        handle, name = tempfile.mkstemp(prefix=f"{os.getpid()}-", suffix=".board", dir=directory)
        self.path = name
        self._owner = os.getpid()
        os.ftruncate(handle, _SIZE)
        self._memory = mmap.mmap(handle, _SIZE)
        os.close(handle)
        self._sequence = 0
        self._encoder = msgspec.msgpack.Encoder()

    def publish(self, status: EngineStatus) -> None:
        payload = self._encoder.encode(status)
        if _HEADER.size + len(payload) > _SIZE:  # found out half-way, it would leave readers waiting for ever
            raise ValueError(f"a status of {len(payload)} bytes does not fit the board")
        self._memory[: _HEADER.size] = _HEADER.pack(self._sequence + 1, len(payload))
        self._memory[_HEADER.size : _HEADER.size + len(payload)] = payload
        self._sequence += 2
        self._memory[: _HEADER.size] = _HEADER.pack(self._sequence, len(payload))

    def close(self) -> None:
        if os.getpid() == self._owner:
            Path(self.path).unlink(missing_ok=True)


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
            sequence, length = _HEADER.unpack_from(self._memory)
            if sequence == self._seen and self._status is not None:
                return self._status
            payload = self._memory[_HEADER.size : _HEADER.size + length]
            if sequence % 2 == 0 and sequence > 0 and _HEADER.unpack_from(self._memory)[0] == sequence:
                self._status = self._decoder.decode(payload)
                self._seen = sequence
                return self._status
            deadline = deadline or time.monotonic() + _WRITE_TIMEOUT_S
            if time.monotonic() > deadline:
                raise EngineFaultError("the engine's status board is not being written to the end", path=self.path)
            time.sleep(0)


class Boards:
    """The status of several engines: read from their boards, or as last told where a board is on another host.

    Args:
        told: Each engine's answer to `commands.Hello`.
    """

    def __init__(self, told: Sequence[dict[str, Any]]) -> None:
        self.complete = True  # else ask again after a transition
        self._readers: list[Callable[[], EngineStatus]] = []
        for engine in told:
            try:
                self._readers.append(BoardReader(engine["board"]).read)
            except OSError:
                status = msgspec.convert(engine["status"], EngineStatus)
                self._readers.append(lambda status=status: status)  # type: ignore[misc]
                self.complete = False

    def read(self) -> list[EngineStatus]:
        return [read() for read in self._readers]


def _remove_boards_of_dead_processes(directory: Path) -> None:
    for board in directory.glob("*.board"):
        pid = board.name.split("-", 1)[0]
        if pid.isdigit() and not Path("/proc", pid).exists():
            board.unlink(missing_ok=True)
