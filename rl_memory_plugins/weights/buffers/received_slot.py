"""Memory of a rank in which bytes from a trainer on another GPU or host arrive."""

from __future__ import annotations

import torch

from rl_memory_plugins.weights import cuda_ipc
from rl_memory_plugins.weights.buffers.streamed import host_slot


class ReceivedSlot:
    """A slot on this rank's GPU, outside torch's allocator and all pausable regions, or in host memory.

    Args:
        nbytes: Its size.
        device: The name of the GPU; `None` for host memory.

    Attributes:
        memory: uint8, [nbytes]; empty after `free`.

    Raises:
        HostMemoryError, DeviceMemoryError: there is no memory for it.
        WeightUpdateError: it has no bytes, in host memory.
    """

    def __init__(self, nbytes: int, device: str | None) -> None:
        self._gpu: cuda_ipc.CudaGpu | None = None
        if device is None:
            self.memory = host_slot(nbytes)
        else:
            self._gpu = cuda_ipc.local_gpu(device)
            self.memory = self._gpu.view(self._gpu.allocate(nbytes), nbytes)

    def synchronize(self) -> None:
        """Wait for all work on its GPU."""
        if self._gpu is not None:
            self._gpu.synchronize()

    def free(self) -> None:
        """Free the memory, once no work on its GPU uses it. May be called more than once."""
        memory, self.memory = self.memory, torch.empty(0, dtype=torch.uint8)
        if self._gpu is not None and len(memory):
            self._gpu.synchronize()
            self._gpu.free(memory.data_ptr())
