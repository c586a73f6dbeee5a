"""Copies of tensors on a GPU of the trainer to a slot, on that GPU or on another one."""

from __future__ import annotations

from typing import Any

import torch

from rl_memory_plugins.errors import UnsupportedError, WeightUpdateError
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
        self._addresses: list[int] = []  # of the tensors, when they were given
        self._targets: list[int] = []
        self._sources: list[int] = []
        self._sizes: list[int] = []
        self._nbytes = 0
        self._allocation = range(0)  # the addresses of the last one that was looked up for these copies
        self._stream: Any = None  # where the tensors were made
        self._own: Any = None  # a stream of its own

    def add(self, target: int, tensor: torch.Tensor, nbytes: int) -> bool:
        """Copy a contiguous tensor to an address in the slot, behind what its current stream has been given.

        Args:
            nbytes: Those of the tensor.

        Returns: `False` for a tensor that consists of others, which only torch can copy.

        Raises:
            WeightUpdateError: the tensor has no memory; or see `flush`.
        """
        if not nbytes:
            return True
        address = tensor.data_ptr()
        if address < LOWEST:
            if hasattr(tensor, "__tensor_flatten__"):
                return False
            require_memory(tensor)
        stream = self._streams.current(self._gpu.index)
        # To compare two streams takes as long as the rest, and mostly it is the same object.
        if stream is not self._stream and (self._stream is None or stream != self._stream):
            self.flush()
            self._stream = stream
        self._tensors.append(tensor)
        self._addresses.append(address)
        if self._continues(target, address, nbytes):
            self._sizes[-1] += nbytes
        else:
            self._targets.append(target)
            self._sources.append(address)
            self._sizes.append(nbytes)
        self._nbytes += nbytes
        if self._nbytes >= self._group_bytes:
            self.flush()
        return True

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
        """Begin all copies. What the streams of the tensors are given later comes after them.

        Raises:
            WeightUpdateError: the GPU cannot copy; or a tensor has lost its memory, as by an `Offloader`.
        """
        if [tensor.data_ptr() for tensor in self._tensors] != self._addresses:
            raise WeightUpdateError("a tensor of the source has left its memory while it was packed")
        targets, sources, sizes = self._targets, self._sources, self._sizes
        self._targets, self._sources, self._sizes, self._nbytes = [], [], [], 0
        self._allocation = range(0)  # the source may have freed it before the next copies
        try:
            if len(targets) == 1:
                self._gpu.copy(targets[0], sources[0], sizes[0], self._stream.cuda_stream)
            elif targets:
                self._copy_many(targets, sources, sizes)
        except UnsupportedError as error:  # by now the transport has been chosen
            message = f"a GPU cannot copy the source's tensors: {error}"
            raise WeightUpdateError(message, **error.details) from error
        self._tensors, self._addresses = [], []

    def _copy_many(self, targets: list[int], sources: list[int], sizes: list[int]) -> None:
        # The driver refuses many at a time on the default stream, which most trainers use. High priority: torch's
        # streams of normal priority are few and taken in turn, and a communicator's waits for its peer.
        own = self._own = self._own or torch.cuda.Stream(self._gpu.index, priority=-1)
        self._streams.note(own)
        own.wait_stream(self._stream)
        self._gpu.copy_many(targets, sources, sizes, own.cuda_stream)
        self._stream.wait_stream(own)
