"""The CUDA streams that run the copies of a buffer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Streams:
    """All streams since the last `synchronize`. A source may yield each tensor on another stream."""

    def __init__(self) -> None:
        self._streams: set[Any] = set()
        self._current: dict[int, tuple[int, Any]] = {}  # by GPU, the current stream and its handle
        # The handle of a GPU's current stream. To make the stream takes ten times as long, which matters with thousands
        # of tensors. A torch may lack the function: then only the stream itself tells.
        self._handle: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)

    def current(self, gpu: int) -> Any:
        """The current stream of a GPU, noted for the next `synchronize`."""
        handle = None if self._handle is None else self._handle(gpu)
        known = self._current.get(gpu)
        if known is not None and known[0] == handle:
            return known[1]
        stream = torch.cuda.current_stream(gpu)
        self._streams.add(stream)
        if handle is not None:
            self._current[gpu] = handle, stream
        return stream

    def note(self, stream: Any) -> None:
        """Another stream for the next `synchronize`."""
        self._streams.add(stream)

    def join(self, device: torch.device) -> None:
        """Let the current stream of a GPU wait for all noted streams. They stay noted."""
        current = self.current(device.index)
        for stream in self._streams:
            if stream != current:
                current.wait_stream(stream)

    def events(self) -> list[Any]:
        """An event on each noted stream, after the work that it has been given. They stay noted."""
        return [stream.record_event() for stream in self._streams]

    def synchronize(self) -> None:
        """Wait for all noted streams."""
        for stream in self._streams:
            stream.synchronize()
        self._streams.clear()
        self._current.clear()
