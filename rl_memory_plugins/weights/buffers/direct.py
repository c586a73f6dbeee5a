"""`cuda_direct`: the trainer's own tensors, opened by the receivers. Nothing is staged."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

import torch

from rl_memory_plugins.errors import UnsupportedError, WeightUpdateError
from rl_memory_plugins.weights import cuda_ipc
from rl_memory_plugins.weights.cuda_ipc import Allocation, Mappings, allocations_of
from rl_memory_plugins.weights.manifest import BucketEntry, TensorSpec


class DirectExport:
    """The trainer's tensors as they are.

    They must not be changed, moved or freed until the update is over; with `keep` not before `release_mapped`
    either.

    Args:
        tensors: In the manifest's order.
        keep: Receivers leave the allocations open for the next update.
        mean_bytes: With less to an allocation, opening them takes too long.

    Raises:
        UnsupportedError: some cannot be exported; says why.
    """

    nbytes = 0

    def __init__(self, tensors: Sequence[torch.Tensor], device: str, *, keep: bool, mean_bytes: int = 0) -> None:
        gpu = cuda_ipc.local_gpu(device)
        self._gpu = gpu
        allocations: dict[int, Allocation] = {}
        indices: dict[int, int] = {}
        starts: list[int] = []  # of the allocations found, in ascending order
        self._places: list[tuple[int, int]] = []  # allocation, and bytes from its start
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
                    raise UnsupportedError("the tensors lie in memory that CUDA IPC cannot export")
                indices[found.address] = len(indices)
                allocations[found.address] = found
                bisect.insort(starts, found.address)
            self._places.append((indices[found.address], address - found.address))
        if mean_bytes and sum(tensor.nbytes for tensor in tensors) < mean_bytes * len(allocations):
            raise UnsupportedError(
                f"{len(allocations)} allocations take longer to open than to stage; keep_mapped opens them once"
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
        self._gpu.synchronize()  # whatever stream still writes them
        return self._description, []

    def publish(self) -> None:
        """Nothing was written."""

    def close(self) -> None:
        """Nothing was made."""


class DirectAttached:
    """See `attach`.

    Attributes:
        keep: Whether the trainer allows the allocations to stay open.
        kept: Set once the update is complete: `close` leaves the mappings alone then.
    """

    transport = "cuda_direct"
    reused = False

    def __init__(self, description: dict[str, Any], device: str, mappings: Mappings) -> None:
        cuda_ipc.require_device(description, device)
        self.keep = bool(description["keep"])
        self.kept = False
        self._mappings = mappings
        self.allocations = mappings.open(
            cuda_ipc.local_gpu(device), str(description["process"]), allocations_of(description)
        )

    def memory(self, slot: int, entry: BucketEntry) -> torch.Tensor:
        if not entry.nbytes:
            return torch.empty(0, dtype=torch.uint8)
        if not 0 <= entry.allocation < len(self.allocations):
            raise WeightUpdateError(f"the trainer names allocation {entry.allocation}, which it did not offer")
        return self.allocations[entry.allocation]

    def close(self) -> None:
        self.allocations = []
        if not self.kept:
            self._mappings.close()
