"""The latest events of a timeline, in a file that all server processes of an engine may share.

The file begins with a header: the name of the timeline, the number of the latest event, the number of the latest event
that was dropped, and the end of the events. Each event is a line of JSON. Writers and readers hold a lock for a read or
a write, and never during a transition.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import struct
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec

from rl_memory_plugins.timeline.records import Event
from rl_memory_plugins.timeline.repeats import joined

KEPT_BYTES = 4 << 20
"""The size of the file. Once it is full, the older half of the events is dropped."""

LOOK_BACK = 8
"""So many events before a call that failed may be equal to it."""

_LOOK_BACK_BYTES = 1 << 20
_HEADER = struct.Struct("=8sQQQ")
_SEQ = b'{"seq":'  # how each line begins


class _Header(NamedTuple):
    name: bytes
    last: int
    dropped: int  # through this number
    end: int  # of the events, in the file


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
                self._write(_HEADER.pack(uuid.uuid4().hex[:8].encode(), 0, 0, _HEADER.size), 0)

    def append(self, event: Callable[[int], Event]) -> None:
        """Add the event that gets this number, or have a former one that it repeats take it up: see `repeats`.

        Raises:
            OSError: the file cannot be written.
        """
        with self._locked():
            name, last, dropped, whole = self._header()
            made = event(last + 1)
            end, following = whole, b""  # what stays in place, and what comes after it
            if made.error is not None:
                made, end, following = self._joined(made, whole)
            following += msgspec.json.encode(made) + b"\n"
            if end + len(following) > self._kept_bytes:
                gone, kept = _halves(os.pread(self._handle, end - _HEADER.size, _HEADER.size))
                dropped = next(map(_number, _backwards(gone)), dropped)
                end, following = _HEADER.size, kept + following
            if end != whole:
                self._write(
                    _HEADER.pack(name, last, dropped, end), 0
                )  # if this process dies now, the rest is not there
            end = self._write(following, end)
            self._write(_HEADER.pack(name, last + 1, dropped, end), 0)  # last: a line without it does not count

    def _joined(self, event: Event, end: int) -> tuple[Event, int, bytes]:
        """The event, or one for it and an equal one among the latest that all failed.

        Returns: also the end of the lines before the equal one, and the lines after it.
        """
        length = min(end - _HEADER.size, _LOOK_BACK_BYTES)
        body = os.pread(self._handle, length, end - length)
        begin = len(body)
        for line in itertools.islice(_backwards(body), LOOK_BACK):
            stop, begin = begin, begin - len(line) - 1
            if begin == 0 and end - length > _HEADER.size:
                break  # the rest of a line that begins before
            former = msgspec.json.decode(line, type=Event)
            if former.error is None:
                break  # what follows happened in another state
            both = joined(former, event)
            if both is not None:
                return both, end - length + begin, body[stop:]
        return event, end, b""

    def after(self, since: int) -> tuple[str, int, int, list[bytes]]:
        """The name of the timeline, the numbers of its latest event and of the latest that it has dropped, and the
        events with higher numbers than `since`.

        Numbers that the timeline has not reached are those of a former one: all events come after them.

        Returns: the events as JSON: thousands of them would take a server's event loop half a second to decode.
        """
        with self._locked():
            name, last, dropped, end = self._header()
            if since == last:  # as a page asks each second
                return name.decode(), last, dropped, []
            body = os.pread(self._handle, end - _HEADER.size, _HEADER.size)
        since = since if since <= last else 0
        found = []
        for line in _backwards(body):
            if _number(line) <= since:
                break
            found.append(line)
        return name.decode(), last, dropped, found[::-1]

    def close(self) -> None:
        self._file.close()

    def _header(self) -> _Header:
        return _Header._make(_HEADER.unpack(os.pread(self._handle, _HEADER.size, 0)))

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


def _number(line: bytes) -> int:
    return int(line.removeprefix(_SEQ).split(b",", 1)[0])


def _halves(body: bytes) -> tuple[bytes, bytes]:
    """The older and the newer lines."""
    cut = body.find(b"\n", len(body) // 2) + 1 or len(body)
    return body[:cut], body[cut:]


def _backwards(body: bytes) -> Iterator[bytes]:
    """The lines, the last one first."""
    end = len(body) - 1
    while end > 0:
        start = body.rfind(b"\n", 0, end) + 1
        yield body[start:end]
        end = start - 1
