"""The CUDA streams that run the copies of a buffer."""

from __future__ import annotations

from typing import Any

import torch


class Streams:
    """All streams since the last `synchronize`. A source may yield each tensor on another stream."""

    def __init__(self) -> None:
        self._streams: set[Any] = set()

    def current(self, device: torch.device | int) -> Any:
        """The current stream of a GPU, noted for the next `synchronize`."""
        stream = torch.cuda.current_stream(device)
        self._streams.add(stream)
        return stream

    def join(self, device: torch.device) -> None:
        """Let the current stream of a GPU wait for all noted streams. They stay noted."""
        current = self.current(device)
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
