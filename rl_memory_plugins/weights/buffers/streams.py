"""The CUDA streams that run the copies of a buffer."""

from __future__ import annotations

from typing import Any

import torch


class Streams:
    """All streams since the last `synchronize`. A source may yield each tensor on another stream."""

    def __init__(self) -> None:
        self._streams: set[Any] = set()
        self._gpu, self._handle = -1, -1  # of the latest current stream
        self._current: Any = None

    def current(self, gpu: int) -> Any:
        """The current stream of a GPU, noted for the next `synchronize`."""
        handle = _handle(gpu)
        if handle is None or handle != self._handle or gpu != self._gpu:
            self._current = torch.cuda.current_stream(gpu)
            self._gpu, self._handle = gpu, -1 if handle is None else handle
            self._streams.add(self._current)
        return self._current

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
        self._gpu = -1


def _handle(gpu: int) -> int | None:
    """The handle of a GPU's current stream; `None` if only the stream itself tells.

    To make the stream takes ten times as long, which matters with thousands of tensors.
    """
    find = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return None if find is None else int(find(gpu))
