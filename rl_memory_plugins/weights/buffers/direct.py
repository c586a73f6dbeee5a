"""`cuda_direct`: receivers open the trainer's own tensors. There is no staging."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

import torch

from rl_memory_plugins.errors import UnsupportedError, WeightUpdateError
from rl_memory_plugins.weights import cuda_ipc
from rl_memory_plugins.weights.cuda_ipc import Allocation, allocations_of
from rl_memory_plugins.weights.manifest import BucketEntry, TensorSpec
from rl_memory_plugins.weights.open_allocations import Mappings
from rl_memory_plugins.weights.wire import Connection


class DirectExport:
    """Exports the trainer's own tensors.

    The tensors must not be changed, moved or freed before the end of the update; with `keep`, they must not be moved or
    freed before `release_mapped`.

    Args:
        tensors: The tensors, in the order of the manifest.
        keep: Receivers leave the allocations open for the next update.
        mean_bytes: The smallest mean of tensor bytes per allocation. Below it, opening takes longer than staging.

    Raises:
        UnsupportedError: a tensor cannot be exported, or there are too many allocations for these bytes.
    """

    nbytes = 0

    def __init__(self, tensors: Sequence[torch.Tensor], device: str, *, keep: bool, mean_bytes: int = 0) -> None:
        gpu = cuda_ipc.local_gpu(device)
        self._gpu = gpu
        allocations: dict[int, Allocation] = {}
        indices: dict[int, int] = {}
        starts: list[int] = []  # addresses of the allocations, in ascending order
        self._places: list[tuple[int, int]] = []  # index of the allocation, and offset in bytes
        self._addresses = [tensor.data_ptr() for tensor in tensors]
        for tensor, address in zip(tensors, self._addresses, strict=True):
            if not tensor.is_contiguous():
                raise UnsupportedError("a tensor is not contiguous")
            if not tensor.numel():
                self._places.append((0, 0))
                continue
            at = bisect.bisect_right(starts, address) - 1
            found = allocations[starts[at]] if at >= 0 else None
            if found is None or address >= found.address + found.nbytes:
                found = gpu.find(address)
                if found is None:
                    raise UnsupportedError("the tensors are in memory that CUDA IPC cannot export")
                indices[found.address] = len(indices)
                allocations[found.address] = found
                bisect.insort(starts, found.address)
            self._places.append((indices[found.address], address - found.address))
        if mean_bytes and sum(tensor.nbytes for tensor in tensors) < mean_bytes * len(allocations):
            raise UnsupportedError(
                f"opening {len(allocations)} allocations takes longer than staging; keep_mapped=True opens them once"
            )
        self._description = {
            "kind": "cuda_direct",
            "device": device,
            "process": cuda_ipc.process_id(),
            "allocations": list(allocations.values()),
            "keep": keep,
        }

    def put(self, slot: int, entry: BucketEntry, spec: TensorSpec, tensor: torch.Tensor) -> BucketEntry:
        if tensor.data_ptr() != self._addresses[entry.index] + entry.start:
            raise WeightUpdateError(f"{spec.name} has moved since the update began", name=spec.name)
        allocation, offset = self._places[entry.index]
        return BucketEntry(entry.index, offset + entry.start, entry.nbytes, allocation, entry.start)

    def export(self) -> tuple[dict[str, Any], list[int]]:
        self._gpu.synchronize()  # any stream may still write the tensors
        return self._description, []

    def publish(self) -> Sequence[Any]:
        """The tensors are complete since `export`."""
        return ()

    def close(self) -> None:
        """Does nothing: this buffer owns no memory."""


class DirectAttached:
    """See `attach`."""

    transport = "cuda_direct"
    reused = False

    def __init__(self, description: dict[str, Any], device: str, mappings: Mappings) -> None:
        self.keep = bool(description["keep"])
        self._mappings = mappings
        self.allocations = mappings.open(
            cuda_ipc.local_gpu(device), str(description["process"]), allocations_of(description, device)
        )

    def memory(self, slot: int, entry: BucketEntry) -> torch.Tensor:
        if not entry.nbytes:
            return torch.empty(0, dtype=torch.uint8)
        if not 0 <= entry.allocation < len(self.allocations):
            raise WeightUpdateError(f"the trainer announced allocation {entry.allocation}, which it did not offer")
        return self.allocations[entry.allocation]

    def hold(self, connection: Connection) -> None:
        """With `keep`, instead of `close` after a complete update: own the connection until the next one."""
        self._mappings.keep(connection)

    def close(self) -> None:
        self.allocations = []
        self._mappings.close()
