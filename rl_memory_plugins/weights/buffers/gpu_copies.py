"""Copies of tensors on a GPU of the trainer to a slot, on that GPU or on another one."""

from __future__ import annotations

from typing import Any

import torch

from rl_memory_plugins.errors import UnsupportedError
from rl_memory_plugins.weights.buffers.streams import Streams
from rl_memory_plugins.weights.cuda_ipc import CudaGpu
from rl_memory_plugins.weights.host_copy import LOWEST, require_memory


class GpuCopies:
    """Copies that the GPU of the tensors makes.

    By torch's copy to another GPU each of both waits for the other before and after every tensor, so that the link is
    idle in between. Here nothing uses the slot meanwhile: the receiver has acknowledged it. Tensors that lie one after
    the other in one allocation, as torch places many, and also in the slot, are one copy: the driver takes microseconds
    for each.

    Args:
        gpu: The GPU of the tensors.
        streams: Gets the streams on which the copies run.
        group_bytes: Copies begin together once they have so many bytes. With 0 each begins at once: the tensors may
            change soon.
    """

    def __init__(self, gpu: CudaGpu, streams: Streams, *, group_bytes: int) -> None:
        self._gpu = gpu
        self._streams = streams
        self._group_bytes = group_bytes
        self._tensors: list[torch.Tensor] = []  # their memory must not be used anew before the copies have begun
        self._targets: list[int] = []
        self._sources: list[int] = []
        self._sizes: list[int] = []
        self._nbytes = 0
        self._allocation = range(0)  # the addresses of the last one that was looked up for these copies
        self._stream: Any = None  # where the tensors were made
        self._own: Any = None  # a stream of its own

    def add(self, target: int, tensor: torch.Tensor, nbytes: int) -> None:
        """Copy a contiguous tensor to an address in the slot, behind what its current stream has been given.

        Args:
            nbytes: Those of the tensor.

        Raises:
            WeightUpdateError: the tensor has no memory.
        """
        address = tensor.data_ptr()
        if address < LOWEST:
            require_memory(tensor)
        if not nbytes:
            return
        stream = self._streams.current(self._gpu.index)
        # To compare two streams takes as long as the rest, and mostly it is the same object.
        if stream is not self._stream and (self._stream is None or stream != self._stream):
            self.flush()
            self._stream = stream
        self._tensors.append(tensor)
        if self._continues(target, address, nbytes):
            self._sizes[-1] += nbytes
        else:
            self._targets.append(target)
            self._sources.append(address)
            self._sizes.append(nbytes)
        self._nbytes += nbytes
        if self._nbytes >= self._group_bytes:
            self.flush()

    def _continues(self, target: int, address: int, nbytes: int) -> bool:
        """Whether a copy begins where the last one ends, and the sources of both are in one allocation."""
        if not self._sizes:
            return False
        last, size = self._sources[-1], self._sizes[-1]
        if address != last + size or target != self._targets[-1] + size:
            return False
        if last not in self._allocation:
            try:
                self._allocation = range(last, last + self._gpu.bytes_from(last))
            except UnsupportedError:  # the driver does not know it
                return False
        return address + nbytes <= self._allocation.stop

    def flush(self) -> None:
        """Begin all copies. What the streams of the tensors are given later comes after them."""
        targets, sources, sizes = self._targets, self._sources, self._sizes
        self._targets, self._sources, self._sizes, self._nbytes = [], [], [], 0
        self._allocation = range(0)  # the source may have freed it before the next copies
        if len(targets) == 1:
            self._gpu.copy(targets[0], sources[0], sizes[0], self._stream.cuda_stream)
        elif targets:  # the driver refuses many at a time on the default stream, which most trainers use
            own = self._own = self._own or torch.cuda.Stream(self._gpu.index)
            self._streams.note(own)
            own.wait_stream(self._stream)
            self._gpu.copy_many(targets, sources, sizes, own.cuda_stream)
            self._stream.wait_stream(own)
        self._tensors = []
