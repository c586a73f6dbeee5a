"""An update from files on the engine's own host: a thread of the engine's process sends them as a trainer would."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any

from rl_memory_plugins.errors import InvalidRequestError, RLMemoryError, UnsupportedError, WeightUpdateError
from rl_memory_plugins.records import EngineStatus
from rl_memory_plugins.trainer.push import most_specific
from rl_memory_plugins.trainer.sources.checkpoint import CheckpointSource
from rl_memory_plugins.weights.sender import DEFAULT_TIMEOUT_S, WeightSender

ENDS_S = 5.0
"""The longest wait for the error of the thread after the engine has failed, in seconds."""


class FileSender:
    """Sends safetensors files to the ranks of the engine of this process. A context: its body runs the update.

    Args:
        path: A file, or a folder as `CheckpointSource` takes it.
        receivers: The devices of all ranks.
        partial: See `WeightSender.send`.
        timeout_s: The longest silence of a rank, in seconds; `None` for the sender's default.

    Attributes:
        endpoints, token: For the command that makes the ranks connect.

    Raises:
        InvalidRequestError: `path` is no path, a file is missing, or an argument is out of range.
        WeightUpdateError: this process can open no more files.
    """

    def __init__(
        self, path: object, receivers: Sequence[str], *, partial: object = False, timeout_s: object = None
    ) -> None:
        if not isinstance(partial, bool):
            raise InvalidRequestError("partial must be true or false", field="partial")
        self._source = _source(path)
        self._partial = partial
        self._failure: Exception | None = None
        silence_s = timeout_s if isinstance(timeout_s, int | float) else DEFAULT_TIMEOUT_S
        self._sender = WeightSender(receivers, timeout_s=silence_s)
        self.endpoints = self._sender.endpoints
        self.token = self._sender.token
        self._thread = threading.Thread(target=self._send, name="rl-memory-send-files", daemon=True)

    def __enter__(self) -> FileSender:
        try:
            self._thread.start()
        except RuntimeError as error:  # this process cannot start more threads
            self._sender.close()
            raise WeightUpdateError(f"cannot send the files: {error}", reason="source") from None
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        """After a success the thread ends by itself: nobody waits for it to free its buffers.

        Raises:
            RLMemoryError: that of the thread, if the body has failed and this error names the cause more precisely.
        """
        if error is None:
            return
        given = error if isinstance(error, RLMemoryError) else WeightUpdateError(str(error), reason="cancelled")
        self._sender.cancel(given)
        self._thread.join(ENDS_S)
        if not isinstance(error, RLMemoryError):
            return
        failure, self._failure = most_specific([self._failure, error]), None
        if failure is not None and failure is not error:
            try:
                raise failure from error
            finally:
                del failure  # breaks the reference cycle between the error and this frame

    def _send(self) -> None:
        try:
            self._sender.send(self._source, partial=self._partial)
        except Exception as error:
            self._failure = error


def require_one_host(engines: Sequence[EngineStatus], elsewhere: int) -> None:
    """Check that all ranks are on the host of this process. Ranks elsewhere would never connect.

    Args:
        elsewhere: How many of the engines are on other hosts as a whole.

    Raises:
        UnsupportedError: they are not.
    """
    hosts = max((engine.capabilities.hosts for engine in engines), default=1)
    if elsewhere or hosts > 1:
        raise UnsupportedError(
            "files are sent to the ranks of the server's host alone, and others have "
            f"{f'{elsewhere} of {len(engines)} engines' if elsewhere else 'ranks of this engine'}: "
            "send the weights from a trainer with advertise=, or load them by the engine's own call"
        )


def _source(path: object) -> CheckpointSource:
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise InvalidRequestError(
            "path must name a folder of safetensors files, or a file, on the engine's host", field="path"
        )
    return CheckpointSource(path)
