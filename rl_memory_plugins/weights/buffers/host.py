"""`shm` and `shm_pinned`: slots in anonymous shared memory on the host."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence
from typing import Any

import torch

from rl_memory_plugins.errors import HostMemoryError, UnsupportedError, WeightUpdateError
from rl_memory_plugins.memory.cuda_device import gpu_name
from rl_memory_plugins.memory.host_memory import refusal_of
from rl_memory_plugins.weights import cuda_ipc
from rl_memory_plugins.weights.buffers.protocols import typed
from rl_memory_plugins.weights.buffers.streams import Streams
from rl_memory_plugins.weights.host_copy import HostCopier
from rl_memory_plugins.weights.manifest import BucketEntry, TensorSpec

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class ShmStaging:
    """Shared memory for `slots` slots of `slot_bytes` bytes. The first write allocates its pages.

    Args:
        pinned: The receivers page-lock the memory.
        stable: Tensors do not change before `publish`.

    Raises:
        HostMemoryError: the memory cannot be allocated.
    """

    def __init__(self, slot_bytes: int, slots: int, *, pinned: bool = False, stable: bool = False) -> None:
        self.nbytes = slot_bytes * slots
        kind = "shm_pinned" if pinned else "shm"
        self._description = {"kind": kind, "slot_bytes": slot_bytes, "slots": slots}
        self._copier = HostCopier()
        self._stable = stable
        self._pinned = pinned
        self._written = False
        self._registered: list[cuda_ipc.CudaGpu] = []
        self._streams = Streams()
        self._fd = os.memfd_create("rl-memory-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, self.nbytes)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
            self._slots = _map(self._fd, slot_bytes, slots)
        except OSError as error:
            os.close(self._fd)
            raise HostMemoryError(
                f"cannot allocate shared memory for {slots} slots of {slot_bytes} bytes: {refusal_of(error)}",
                needed_bytes=self.nbytes,
            ) from None

    def put(self, slot: int, entry: BucketEntry, spec: TensorSpec, tensor: torch.Tensor) -> BucketEntry:
        target = typed(self._slots[slot], entry.offset, entry.nbytes, spec.dtype, tensor.shape)
        with torch.no_grad():
            if tensor.is_cuda:
                target.copy_(tensor, non_blocking=self._lock_pages(tensor.device.index))
            elif tensor.device.type == "cpu" and tensor.is_contiguous():
                self._copier.add(target, tensor)
                if not self._stable:
                    self._copier.run()
            else:
                target.copy_(tensor)
        self._written = True
        return entry

    def export(self) -> tuple[dict[str, Any], list[int]]:
        return self._description, [self._fd]

    def publish(self) -> Sequence[Any]:
        self._copier.run()
        self._streams.synchronize()
        return ()

    def close(self) -> None:
        self._copier.close()
        self.publish()
        for gpu in self._registered:
            gpu.unregister(self._slots[0].data_ptr())
        self._registered = []
        self._slots = []
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _lock_pages(self, index: int) -> bool:
        """Page-lock the slots if `pinned`. Returns whether copies from the GPU may run asynchronously."""
        if self._pinned and not self._registered:
            from rl_memory_plugins.memory.pages import touch

            gpu = cuda_ipc.local_gpu(gpu_name(index))
            address, nbytes = _range(self._slots)
            if not self._written:  # `touch` writes zeros. It allocates pages with 8 threads, registering with one
                touch(address, nbytes, 8)
            try:
                gpu.register(address, nbytes)
            except UnsupportedError:
                self._pinned = False
                return False
            self._registered = [gpu]
        if self._pinned:
            self._streams.current(index)
        return self._pinned


class ShmAttached:
    """See `attach`."""

    reused = True
    keep = False

    def __init__(self, description: dict[str, Any], fds: Sequence[int], device: str) -> None:
        self.transport = str(description["kind"])
        slot_bytes, slots = int(description["slot_bytes"]), int(description["slots"])
        if len(fds) != 1 or os.fstat(fds[0]).st_size != slot_bytes * slots or slot_bytes < 1:
            raise WeightUpdateError("the trainer's shared memory does not match its description")
        # Without the seals the trainer could shrink the file, and a read would then kill this process.
        if fcntl.fcntl(fds[0], fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise WeightUpdateError("the trainer's shared memory is not sealed against resizing")
        try:
            self._slots = _map(fds[0], slot_bytes, slots)
        except OSError as error:
            nbytes = slot_bytes * slots
            raise HostMemoryError(
                f"cannot map {nbytes} bytes of the trainer's shared memory: {refusal_of(error)}", needed_bytes=nbytes
            ) from None
        self._gpu: cuda_ipc.CudaGpu | None = None
        if self.transport == "shm_pinned":
            gpu = cuda_ipc.local_gpu(device)
            gpu.register(*_range(self._slots))
            self._gpu = gpu

    def memory(self, slot: int, entry: BucketEntry) -> torch.Tensor:
        return self._slots[slot]

    def close(self) -> None:
        if self._gpu is not None:
            self._gpu.synchronize()
            self._gpu.unregister(self._slots[0].data_ptr())
            self._gpu = None
        self._slots = []


def _map(fd: int, slot_bytes: int, slots: int) -> list[torch.Tensor]:
    # The tensors own the mapping: it is unmapped when the last tensor is freed, and not before.
    mapping = mmap.mmap(fd, slot_bytes * slots, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    return list(torch.frombuffer(mapping, dtype=torch.uint8).split(slot_bytes))


def _range(slots: Sequence[torch.Tensor]) -> tuple[int, int]:
    return slots[0].data_ptr(), sum(len(slot) for slot in slots)
