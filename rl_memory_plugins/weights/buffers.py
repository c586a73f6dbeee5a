"""The memory that weights travel in: the trainer's ends, and the receivers' ends, which `attach` makes.

- `cuda_direct`: the trainer's own tensors, opened by the receivers. Nothing is staged.
- `cuda_ipc`: slots in one allocation on the receiver's GPU, which the trainer packs and the receiver reads.
- `shm_pinned`: slots in anonymous shared memory (`memfd_create`), page-locked by the receiver, and by the
  trainer where it sends from a GPU. It is passed as a file descriptor over the session's socket and has no
  name, so nothing is left behind when a process is killed, and it works between containers that share nothing
  but the socket and deny CUDA IPC.
- `shm`: the same, not page-locked. What CPU engines use.
"""

from __future__ import annotations

import bisect
import fcntl
import mmap
import os
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from rl_memory_plugins.errors import HostMemoryError, UnsupportedError, WeightUpdateError
from rl_memory_plugins.memory.cuda_device import gpu_name
from rl_memory_plugins.weights import cuda_ipc
from rl_memory_plugins.weights.cuda_ipc import Allocation, Mappings
from rl_memory_plugins.weights.host_copy import HostCopier
from rl_memory_plugins.weights.manifest import BucketEntry, TensorSpec
from rl_memory_plugins.weights.plan import SMALL_BYTES

TRANSPORTS = ("cuda_direct", "cuda_ipc", "shm_pinned", "shm")
"""From the fastest to the one that always works."""

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_BOUNCE_BYTES = 64 << 20


class StagingBuffer(Protocol):
    """The trainer's end."""

    def put(self, slot: int, entry: BucketEntry, spec: TensorSpec, tensor: torch.Tensor) -> BucketEntry:
        """Place a tensor, or the rows of it that `entry` is; returns where the receivers find them."""

    def export(self) -> tuple[dict[str, Any], list[int]]:
        """What `attach` needs: a description for the message, and descriptors to send beside it."""

    def publish(self) -> None:
        """Wait until what was put can be read by the other processes."""

    def close(self) -> None: ...


class AttachedBuffer(Protocol):
    """A receiver's end. Tensors in its memory must not outlive `close`.

    Attributes:
        transport: One of `TRANSPORTS`.
        reused: Whether the trainer writes a slot again once it is acknowledged.
    """

    transport: str
    reused: bool

    def memory(self, slot: int, entry: BucketEntry) -> torch.Tensor:
        """The bytes that `entry.offset` counts in: uint8, of one dimension."""

    def close(self) -> None: ...


# -- shared memory on the host --------------------------------------------------------------------------------


class ShmStaging:
    """Shared memory for `slots` slots. Pages come into being when they are written first.

    Args:
        pinned: The receivers page-lock it.
        stable: Tensors stay as they are until `publish`.

    Raises:
        HostMemoryError: the memory cannot be had.
    """

    def __init__(self, slot_bytes: int, slots: int, *, pinned: bool = False, stable: bool = False) -> None:
        kind = "shm_pinned" if pinned else "shm"
        self._description = {"kind": kind, "slot_bytes": slot_bytes, "slots": slots}
        self._copier = HostCopier()
        self._stable = stable
        self._pinned = pinned
        self._written = False
        self._registered: list[cuda_ipc.Gpu] = []
        self._streams: dict[int, Any] = {}
        self._fd = os.memfd_create("rl-memory-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, slot_bytes * slots)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
            self._slots = _map(self._fd, slot_bytes, slots)
        except OSError as error:
            os.close(self._fd)
            raise HostMemoryError(
                f"no shared memory for {slots} slots of {slot_bytes} bytes: {error}",
                needed_bytes=slot_bytes * slots,
            ) from None

    def slot(self, index: int) -> torch.Tensor:
        return self._slots[index]

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

    def publish(self) -> None:
        self._copier.run()
        for stream in self._streams.values():
            stream.synchronize()

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
        """Whether copies from the GPU may run in the background."""
        if self._pinned and not self._registered:
            from rl_memory_plugins.memory.pinned import touch

            gpu = cuda_ipc.local_gpu(gpu_name(index))
            address, nbytes = _range(self._slots)
            if not self._written:  # it writes zeros; registering makes pages too, with one thread
                touch(address, nbytes, 8)
            try:
                gpu.register(address, nbytes)
            except UnsupportedError:
                self._pinned = False
                return False
            self._registered = [gpu]
        if self._pinned:
            self._streams[index] = torch.cuda.current_stream(index)
        return self._pinned


class ShmAttached:
    """See `attach`."""

    reused = True

    def __init__(self, description: dict[str, Any], fds: Sequence[int], device: str) -> None:
        self.transport = str(description["kind"])
        slot_bytes, slots = int(description["slot_bytes"]), int(description["slots"])
        if len(fds) != 1 or os.fstat(fds[0]).st_size != slot_bytes * slots or slot_bytes < 1:
            raise WeightUpdateError("the trainer's shared memory is not what its description says")
        # Without the seals the other side could shrink the file, and reading it would end this process.
        if fcntl.fcntl(fds[0], fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise WeightUpdateError("the trainer's shared memory is not sealed against a change of its size")
        self._slots = _map(fds[0], slot_bytes, slots)
        self._gpu: cuda_ipc.Gpu | None = None
        if self.transport == "shm_pinned":
            gpu = cuda_ipc.local_gpu(device)
            gpu.register(*_range(self._slots))
            self._gpu = gpu

    def slot(self, index: int) -> torch.Tensor:
        return self._slots[index]

    def memory(self, slot: int, entry: BucketEntry) -> torch.Tensor:
        return self._slots[slot]

    def close(self) -> None:
        if self._gpu is not None:
            self._gpu.synchronize()
            self._gpu.unregister(self._slots[0].data_ptr())
            self._gpu = None
        self._slots = []


def _map(fd: int, slot_bytes: int, slots: int) -> list[torch.Tensor]:
    # The tensors hold the mapping, which goes when the last of them goes; it is never unmapped under one.
    mapping = mmap.mmap(fd, slot_bytes * slots, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    return list(torch.frombuffer(mapping, dtype=torch.uint8).split(slot_bytes))


def _range(slots: Sequence[torch.Tensor]) -> tuple[int, int]:
    return slots[0].data_ptr(), sum(len(slot) for slot in slots)


# -- GPU memory ---------------------------------------------------------------------------------------------


class CudaStaging:
    """Slots in one allocation on a receiver's GPU, outside torch's allocator and all pausable regions.

    Tensors are packed on the current stream of that GPU. Those on another GPU come by a peer copy; pinned host
    memory is read by the GPU; pageable host memory goes through a pinned bounce buffer, with several threads.

    Args:
        device: The GPU's name.
        stable: Tensors stay as they are until `publish`.

    Raises:
        UnsupportedError: this process does not see the GPU, or its memory cannot be exported.
        DeviceMemoryError: there is not enough memory.
    """

    def __init__(self, device: str, slot_bytes: int, slots: int, *, stable: bool = False) -> None:
        self._gpu = cuda_ipc.local_gpu(device)
        self._stable = stable
        self._bounce: _Bounce | None = None
        self._small: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._stream: Any = None
        self._address = self._gpu.allocate(slot_bytes * slots)
        allocation = self._gpu.find(self._address)
        if allocation is None:
            self.close()
            raise UnsupportedError(f"memory of {device} cannot be exported by CUDA IPC", device=device)
        self._slots = list(self._gpu.view(self._address, slot_bytes * slots).split(slot_bytes))
        self._description = {
            "kind": "cuda_ipc",
            "device": device,
            "process": cuda_ipc.process_id(),
            "allocations": [allocation],
            "slot_bytes": slot_bytes,
            "slots": slots,
        }

    def put(self, slot: int, entry: BucketEntry, spec: TensorSpec, tensor: torch.Tensor) -> BucketEntry:
        memory = self._slots[slot]
        if memory.is_cuda:
            self._stream = torch.cuda.current_stream(memory.device)
        target = typed(memory, entry.offset, entry.nbytes, spec.dtype, tensor.shape)
        with torch.no_grad():
            if tensor.device == memory.device and tensor.nbytes <= SMALL_BYTES and self._stable:
                self._small.append((target, tensor))
                return entry
            if tensor.is_cuda or not memory.is_cuda:
                target.copy_(tensor, non_blocking=True)
                return entry
            tensor = tensor.contiguous()
            if tensor.is_pinned():
                target.copy_(tensor, non_blocking=True)
                if not self._stable:
                    self._stream.synchronize()
            elif entry.nbytes:
                self._bounce = self._bounce or _Bounce()
                self._bounce.copy(memory[entry.offset : entry.offset + entry.nbytes], tensor, self._stream)
                if not self._stable:
                    self._bounce.flush()
        return entry

    def export(self) -> tuple[dict[str, Any], list[int]]:
        return self._description, []

    def publish(self) -> None:
        if self._small:
            with torch.no_grad():
                torch._foreach_copy_(
                    [target for target, _ in self._small],
                    [tensor for _, tensor in self._small],
                    non_blocking=True,
                )
            self._small.clear()
        if self._bounce is not None:
            self._bounce.flush()
        if self._stream is not None:
            self._stream.synchronize()

    def close(self) -> None:
        if self._address:
            self._small.clear()
            if self._stream is not None:
                self._stream.synchronize()
            self._slots = []
            if self._bounce is not None:
                self._bounce.close()
                self._bounce = None
            self._gpu.free(self._address)
            self._address = 0


class _Bounce:
    """Host memory to a GPU by way of two pinned buffers: one is filled while the other is being read."""

    def __init__(self) -> None:
        self._buffers = [torch.empty(_BOUNCE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._read = [torch.cuda.Event(), torch.cuda.Event()]
        self._copier = HostCopier()
        self._filled: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._current, self._used = 0, 0

    def copy(self, destination: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        """Begin a copy; `source` must not change before the next `flush`."""
        source = source.reshape(-1).view(torch.uint8)
        start = 0
        while start < len(source):
            if self._used == _BOUNCE_BYTES:
                self.flush()
                self._read[self._current].record(stream)
                self._current, self._used = 1 - self._current, 0
                self._read[self._current].synchronize()
            step = min(len(source) - start, _BOUNCE_BYTES - self._used)
            piece = self._buffers[self._current][self._used : self._used + step]
            self._copier.add(piece, source[start : start + step])
            self._filled.append((destination[start : start + step], piece))
            self._used += step
            start += step

    def flush(self) -> None:
        """Read the sources, and enqueue what is left to do."""
        self._copier.run()
        for destination, piece in self._filled:
            destination.copy_(piece, non_blocking=True)
        self._filled.clear()

    def close(self) -> None:
        self._copier.close()


class CudaAttached:
    """See `attach`."""

    transport = "cuda_ipc"
    reused = True

    def __init__(self, description: dict[str, Any], device: str) -> None:
        cuda_ipc.require_device(description, device)
        self._mappings = Mappings()
        slot_bytes, slots = int(description["slot_bytes"]), int(description["slots"])
        allocations = _allocations(description)
        if len(allocations) != 1 or slot_bytes < 1 or allocations[0].nbytes < slot_bytes * slots:
            raise WeightUpdateError("the trainer's staging memory is not what its description says")
        (memory,) = self._mappings.open(cuda_ipc.local_gpu(device), str(description["process"]), allocations)
        self._slots = list(memory[: slot_bytes * slots].split(slot_bytes))

    def memory(self, slot: int, entry: BucketEntry) -> torch.Tensor:
        return self._slots[slot]

    def close(self) -> None:
        self._slots = []
        self._mappings.close()


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
        if sum(tensor.nbytes for tensor in tensors) < mean_bytes * len(allocations):
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
            cuda_ipc.local_gpu(device), str(description["process"]), _allocations(description)
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


def _allocations(description: dict[str, Any]) -> list[Allocation]:
    allocations = [Allocation(*one) for one in description["allocations"]]
    if any(not isinstance(one.handle, bytes) or len(one.handle) != 64 or one.nbytes < 1 for one in allocations):
        raise WeightUpdateError("the trainer's handles are not CUDA IPC handles")
    return allocations


def attach(
    description: dict[str, Any],
    fds: Sequence[int],
    *,
    device: str = "cpu",
    mappings: Mappings | None = None,
) -> AttachedBuffer:
    """Open the trainer's buffer. `fds` stay the caller's to close.

    Args:
        device: The receiver's (`Device.name`).
        mappings: Where allocations may stay open after the buffer is closed.

    Raises:
        UnsupportedError: a kind this version does not know, or one that cannot be opened here.
        WeightUpdateError: memory of another device, or a description that is not true.
    """
    kind = description.get("kind")
    try:
        if kind in ("shm", "shm_pinned"):
            return ShmAttached(description, fds, device)
        if kind == "cuda_ipc":
            return CudaAttached(description, device)
        if kind == "cuda_direct":
            return DirectAttached(description, device, Mappings() if mappings is None else mappings)
    except (KeyError, TypeError, ValueError) as error:
        raise WeightUpdateError(f"the trainer's buffer is described badly: {error!r}") from None
    raise UnsupportedError(f"buffers of kind {kind!r} are not supported", allowed=list(TRANSPORTS))


def typed(slot: torch.Tensor, offset: int, nbytes: int, dtype: str, shape: Sequence[int]) -> torch.Tensor:
    """The tensor that lies at `offset` of a slot, as a view."""
    return slot[offset : offset + nbytes].view(getattr(torch, dtype)).view(tuple(shape))
