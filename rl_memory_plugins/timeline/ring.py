"""The latest events of a timeline, in a file that all server processes of an engine may share.

The file begins with a header: the name of the timeline, the number of the latest event, and the end of the events.
Each event is a line of JSON. Writers and readers hold a lock for a read or a write, and never during a transition.
"""

from __future__ import annotations

import fcntl
import os
import struct
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from rl_memory_plugins.timeline.records import Event

KEPT_BYTES = 4 << 20
"""The size of the file. Once it is full, the older half of the events is dropped."""

_HEADER = struct.Struct("=8sQQ")
_SEQ = b'{"seq":'  # how each line begins


class EventRing:
    """Numbers events from 1, and keeps the latest.

    Args:
        path: The file, if other processes share it.
        kept_bytes: See `KEPT_BYTES`.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: str | None = None, kept_bytes: int = KEPT_BYTES) -> None:
        if path is None:
            self._file: Any = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 (open as long as the ring lives)
        else:
            self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0)
        self._handle = self._file.fileno()
        self._kept_bytes = kept_bytes
        self._threads = threading.Lock()  # a lock of the file belongs to the process
        with self._locked():
            if os.fstat(self._handle).st_size < _HEADER.size:
                self._write(_HEADER.pack(uuid.uuid4().hex[:8].encode(), 0, _HEADER.size), 0)

    def append(self, event: Callable[[int], Event]) -> None:
        """Add the event that gets this number.

        Raises:
            OSError: the file cannot be written.
        """
        with self._locked():
            name, last, end = self._header()
            line = msgspec.json.encode(event(last + 1)) + b"\n"
            if end + len(line) > self._kept_bytes:
                kept = _newer_half(os.pread(self._handle, end - _HEADER.size, _HEADER.size))
                self._write(_HEADER.pack(name, last, _HEADER.size), 0)  # if this process dies now, no event is there
                end = self._write(kept, _HEADER.size)
            end = self._write(line, end)
            self._write(_HEADER.pack(name, last + 1, end), 0)  # last: a line without it does not count

    def after(self, since: int) -> tuple[str, int, list[bytes]]:
        """The name of the timeline, the number of its latest event, and the events with higher numbers than `since`.

        Numbers that the timeline has not reached are those of a former one: all events come after them.

        Returns: the events as JSON: thousands of them would take a server's event loop half a second to decode.
        """
        with self._locked():
            name, last, end = self._header()
            if since == last:  # as a page asks each second
                return name.decode(), last, []
            body = os.pread(self._handle, end - _HEADER.size, _HEADER.size)
        since = since if since <= last else 0
        found = []
        for line in _backwards(body):
            if int(line.removeprefix(_SEQ).split(b",", 1)[0]) <= since:
                break
            found.append(line)
        return name.decode(), last, found[::-1]

    def close(self) -> None:
        self._file.close()

    def _header(self) -> tuple[bytes, int, int]:
        name, last, end = _HEADER.unpack(os.pread(self._handle, _HEADER.size, 0))
        return name, last, end

    def _write(self, content: bytes, at: int) -> int:
        """Write all of it. Returns: where it ends."""
        while content:
            written = os.pwrite(self._handle, content, at)
            content, at = content[written:], at + written
        return at

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._threads:
            fcntl.flock(self._handle, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._handle, fcntl.LOCK_UN)


def _newer_half(body: bytes) -> bytes:
    cut = body.find(b"\n", len(body) // 2) + 1
    return body[cut:] if cut else b""


def _backwards(body: bytes) -> Iterator[bytes]:
    """The lines, the last one first."""
    end = len(body) - 1
    while end > 0:
        start = body.rfind(b"\n", 0, end) + 1
        yield body[start:end]
        end = start - 1
