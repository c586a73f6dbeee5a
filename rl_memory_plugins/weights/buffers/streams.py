"""The streams on which a buffer's copies are under way."""

from __future__ import annotations

from typing import Any

import torch


class Streams:
    """All streams since the last `synchronize`: a source may give each tensor on another one."""

    def __init__(self) -> None:
        self._streams: set[Any] = set()

    def current(self, device: torch.device | int) -> Any:
        """A GPU's current stream, on which a copy is about to begin."""
        stream = torch.cuda.current_stream(device)
        self._streams.add(stream)
        return stream

    def synchronize(self) -> None:
        """Wait for all of them."""
        for stream in self._streams:
            stream.synchronize()
        self._streams.clear()
