"""The CUDA streams that run the copies of a buffer."""

from __future__ import annotations

from typing import Any

import torch


class Streams:
    """All streams since the last `synchronize`. A source may yield each tensor on another stream."""

    def __init__(self) -> None:
        self._streams: dict[tuple[int | None, int], Any] = {}  # by GPU and CUDA's handle

    def current(self, device: torch.device | int) -> Any:
        """The current stream of a GPU, noted for the next `synchronize`."""
        index = device if isinstance(device, int) else device.index
        # Each tensor asks. The handle takes a small part of the time in which torch makes an object for it.
        key = index, torch._C._cuda_getCurrentRawStream(index)
        if key not in self._streams:
            self._streams[key] = torch.cuda.current_stream(index)
        return self._streams[key]

    def join(self, device: torch.device) -> None:
        """Let the current stream of a GPU wait for all noted streams. They stay noted."""
        current = self.current(device)
        for stream in self._streams.values():
            if stream != current:
                current.wait_stream(stream)

    def events(self) -> list[Any]:
        """An event on each noted stream, after the work that it has been given. They stay noted."""
        return [stream.record_event() for stream in self._streams.values()]

    def synchronize(self) -> None:
        """Wait for all noted streams."""
        for stream in self._streams.values():
            stream.synchronize()
        self._streams.clear()
