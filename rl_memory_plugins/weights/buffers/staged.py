"""`cuda_ipc`: slots on the receiver's GPU. The trainer packs, the receiver reads.

`nccl`: slots on the trainer's GPU, from which a communicator carries them to the receiver's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from rl_memory_plugins.errors import UnsupportedError, WeightUpdateError
from rl_memory_plugins.memory.cuda_device import gpu_name
from rl_memory_plugins.weights import cuda_ipc
from rl_memory_plugins.weights.buffers.gpu_copies import GpuCopies
from rl_memory_plugins.weights.buffers.protocols import typed
from rl_memory_plugins.weights.buffers.streamed import seal_of, sealed
from rl_memory_plugins.weights.buffers.streams import Streams
from rl_memory_plugins.weights.communicators import SEAL_BYTES
from rl_memory_plugins.weights.coverage import row_major
from rl_memory_plugins.weights.cuda_ipc import allocations_of
from rl_memory_plugins.weights.host_copy import HostCopier
from rl_memory_plugins.weights.manifest import ALIGNMENT, BucketEntry, TensorSpec
from rl_memory_plugins.weights.open_allocations import Mappings
from rl_memory_plugins.weights.source import next_tensor

_BOUNCE_BYTES = 64 << 20

_PAGE_BYTES = 2 << 20
"""The driver puts smaller allocations together, and CUDA IPC opens what lies together as one."""
GROUP_BYTES = 64 << 20
"""Tensors are copied together when they have so many bytes. Those that a source has made live until then."""


class _CudaSlots:
    """Slots on a GPU, outside torch's allocator and all pausable regions.

    Each is an allocation of its own: on another GPU, one of 512 MiB and more takes 9 ms, and one of 256 MiB takes 1 ms.

    The trainer packs tensors behind what the current stream of their GPU has been given; those in host memory on the
    current stream of the slots' GPU: directly if they are pinned, else through a pinned bounce buffer that several
    threads fill.

    Args:
        device: The name of the GPU.
        stable: Tensors do not change before `publish`.
        held: Something else holds the tensors until then: to copy more of them together takes no memory.

    Raises:
        UnsupportedError: this process does not see the GPU.
        DeviceMemoryError: the GPU lacks memory for the slots.
    """

    def __init__(self, device: str, slot_bytes: int, slots: int, *, stable: bool = False, held: bool = False) -> None:
        self._gpu = cuda_ipc.local_gpu(device)
        self._stable = stable
        self._group_bytes = (slot_bytes if held else GROUP_BYTES) if stable else 0
        self._bounce: _BounceBuffers | None = None
        self._streams = Streams()
        self._has_read_host = False  # since the last `publish`
        # By the GPU of the tensors; `None`: it does not reach this one.
        self._copies: dict[torch.device, GpuCopies | None] = {}
        self.nbytes = max(slot_bytes, _PAGE_BYTES) * slots
        self._addresses: list[int] = []
        self._slots: list[torch.Tensor] = []
        try:
            for _ in range(slots):
                self._addresses.append(self._gpu.allocate(max(slot_bytes, _PAGE_BYTES)))
                self._slots.append(self._gpu.view(self._addresses[-1], slot_bytes))
        except BaseException:
            self.close()
            raise

    def put(self, slot: int, entry: BucketEntry, spec: TensorSpec, tensor: torch.Tensor) -> BucketEntry:
        memory = self._slots[slot]
        if tensor.is_cuda and memory.is_cuda and self._copy(slot, entry, tensor):
            return entry
        self._has_read_host |= not tensor.is_cuda
        stream = self._current_stream()
        target = typed(memory, entry.offset, entry.nbytes, spec.dtype, tensor.shape)
        with torch.no_grad():
            if tensor.is_cuda or not memory.is_cuda:
                target.copy_(tensor, non_blocking=True)
                return entry
            tensor = tensor.contiguous()
            if tensor.is_pinned():
                target.copy_(tensor, non_blocking=True)
                if not self._stable:
                    stream.synchronize()
            elif entry.nbytes:
                self._bounce = self._bounce or _BounceBuffers()
                self._bounce.copy(memory[entry.offset : entry.offset + entry.nbytes], tensor, stream)
                if not self._stable:
                    self._bounce.flush()
        return entry

    def put_whole(
        self,
        slot: int,
        entries: Sequence[BucketEntry],
        specs: Sequence[TensorSpec],
        tensors: Iterator[tuple[str, torch.Tensor]],
    ) -> None:
        """`put` of the next tensors of a source, each of which has all its rows in this bucket.

        From a GPU packing then takes half of Python's time, which matters with thousands.

        Raises:
            WeightUpdateError: see `next_tensor`.
        """
        start = self._addresses[slot]
        for entry, spec in zip(entries, specs, strict=True):
            tensor = next_tensor(spec, tensors)
            copies, target = self._copies.get(tensor.device), start + entry.offset
            if copies is None or not (tensor.is_contiguous() and copies.add(target, tensor, entry.nbytes)):
                self.put(slot, entry, spec, tensor)
            del tensor  # the source may need its memory to make the next one

    def _copy(self, slot: int, entry: BucketEntry, tensor: torch.Tensor) -> bool:
        """Copy a tensor from a GPU that reaches the slots, if it lies there as it is sent."""
        if not tensor.is_contiguous():
            return False
        device = tensor.device
        if device not in self._copies:
            gpu = self._gpu if self._is_near(device) else cuda_ipc.local_gpu(gpu_name(device.index))
            reaches = gpu is self._gpu or gpu.reaches(self._gpu)
            group_bytes = self._group_bytes_of(device)
            self._copies[device] = GpuCopies(gpu, self._streams, group_bytes=group_bytes) if reaches else None
        copies = self._copies[device]
        return copies is not None and copies.add(self._addresses[slot] + entry.offset, tensor, entry.nbytes)

    def _group_bytes_of(self, device: torch.device) -> int:
        """How many bytes of tensors on a GPU are copied together."""
        return self._group_bytes

    def _is_near(self, device: torch.device) -> bool:
        """Whether the slots are on this GPU."""
        return bool(device == self._slots[0].device)

    def _current_stream(self) -> Any:
        """The current stream of the GPU. `publish` waits for it."""
        memory = self._slots[0]
        if not memory.is_cuda:
            return None
        return self._streams.current(memory.device.index)

    def publish(self) -> Sequence[Any]:
        self._begin_copies()
        self._streams.synchronize()
        self._has_read_host = False
        return ()

    def _begin_copies(self) -> None:
        """Begin all copies that wait for others to be made together."""
        for copies in self._copies.values():
            if copies is not None:
                copies.flush()
        if self._bounce is not None:
            self._current_stream()  # may be another one than when the tensors were put
            self._bounce.flush()

    def close(self) -> None:
        self._copies = {}
        self._streams.synchronize()
        self._slots = []
        if self._bounce is not None:
            self._bounce.copier.close()
            self._bounce = None
        while self._addresses:
            self._gpu.free(self._addresses.pop())


class CudaStaging(_CudaSlots):
    """Slots on a receiver's GPU. The arguments are those of `_CudaSlots`.

    From another GPU the next bucket is packed while one travels. On one GPU the two processes take turns instead.

    Raises:
        UnsupportedError: as for `_CudaSlots`, or CUDA IPC cannot export the memory.
    """

    def __init__(self, device: str, slot_bytes: int, slots: int, *, stable: bool = False, held: bool = False) -> None:
        super().__init__(device, slot_bytes, slots, stable=stable, held=held)
        self._given: dict[int, torch.Tensor] = {}  # by the index of a tensor: what `place` gave for it
        self._flat: dict[tuple[int, str], torch.Tensor] = {}  # by slot and dtype, the memory of the slot as elements
        try:
            allocations = [self._gpu.find(address) for address in self._addresses]
            if None in allocations:
                raise UnsupportedError(f"CUDA IPC cannot export memory of {device}", device=device)
        except BaseException:
            self.close()
            raise
        self._description = {
            "kind": "cuda_ipc",
            "device": device,
            "process": cuda_ipc.process_id(),
            "allocations": allocations,  # of each slot
            "slot_bytes": slot_bytes,
            "slots": slots,
        }

    def place(self, slot: int, entry: BucketEntry, spec: TensorSpec) -> torch.Tensor:
        """The memory of a tensor. It need not be copied if it has been made there."""
        flat = self._flat.get((slot, spec.dtype))
        if flat is None:
            flat = self._flat[slot, spec.dtype] = self._slots[slot].view(getattr(torch, spec.dtype))
        start = flat.storage_offset() + entry.offset // flat.itemsize
        made = self._given[entry.index] = flat.as_strided(spec.shape, row_major(spec.shape), start)
        return made

    def put(self, slot: int, entry: BucketEntry, spec: TensorSpec, tensor: torch.Tensor) -> BucketEntry:
        if self._given and self._given.pop(entry.index, None) is tensor:
            self._current_stream()
            return entry
        return super().put(slot, entry, spec, tensor)

    def close(self) -> None:
        self._given = {}
        self._flat = {}
        super().close()

    def _group_bytes_of(self, device: torch.device) -> int:
        # On one GPU `publish` waits: copies run while further tensors are put.
        return min(self._group_bytes, GROUP_BYTES) if self._is_near(device) else self._group_bytes

    def publish(self) -> Sequence[Any]:
        from_afar = any(copies for device, copies in self._copies.items() if not self._is_near(device))
        if self._has_read_host or not from_afar:
            return super().publish()
        self._begin_copies()
        return self._streams.events()

    def export(self) -> tuple[dict[str, Any], list[int]]:
        return self._description, []


class NcclStaging(_CudaSlots):
    """Slots on a GPU of the trainer. The arguments are those of `_CudaSlots`.

    No thread waits for the copies of tensors on a GPU: what sends a bucket waits for them on the GPU, and the source
    overwrites or frees a tensor after the streams on which it was given. Meanwhile the next bucket is packed.
    """

    def __init__(self, device: str, slot_bytes: int, slots: int, *, stable: bool = False, held: bool = False) -> None:
        super().__init__(device, slot_bytes + ALIGNMENT, slots, stable=stable, held=held)  # with room for a seal
        self._slot_bytes = slot_bytes
        try:  # page-locked, so that a seal is copied without a wait; one for each slot, which is still read
            pin = self._slots[0].is_cuda
            self._seals = torch.empty((slots, SEAL_BYTES), dtype=torch.uint8, device="cpu", pin_memory=pin)
        except BaseException:
            self.close()
            raise

    def copy_at_once(self) -> None:
        """Copy each tensor when it is put: they are made for that, and take memory until then."""
        self._group_bytes = 0

    def publish(self) -> Sequence[Any]:
        """Begin the copies. The stream that is current is behind all of them."""
        if self._has_read_host:  # nothing orders the source's next writes there
            return super().publish()
        self._begin_copies()
        if self._slots[0].is_cuda:
            self._streams.join(self._slots[0].device)
        return ()

    def export(self) -> tuple[dict[str, Any], list[int]]:
        return {"kind": "nccl", "slot_bytes": self._slot_bytes}, []

    def sent(self, slot: int, entries: Sequence[BucketEntry], seal: bytes) -> torch.Tensor:
        """The bytes of a bucket, followed by `seal`. The current stream writes the seal."""
        own = self._seals[slot][: len(seal)].copy_(seal_of(seal))
        return sealed(self._slots[slot], entries, own)


class _BounceBuffers:
    """Copies host memory to a GPU through two pinned buffers: the host fills one while the GPU reads the other."""

    def __init__(self) -> None:
        # The CPU is named: a trainer's default device may be its GPU.
        pinned = {"dtype": torch.uint8, "device": "cpu", "pin_memory": True}
        self._buffers = [torch.empty(_BOUNCE_BYTES, **pinned) for _ in range(2)]
        self._read = [torch.cuda.Event(), torch.cuda.Event()]
        self.copier = HostCopier()
        self._filled: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._current, self._used = 0, 0
        self._stream: Any = None  # the stream of the last copy

    def copy(self, destination: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        """Begin a copy. `source` must not change before the next `flush`."""
        if self._stream not in (None, stream):  # a buffer's event is recorded on one stream, and must cover both
            stream.wait_stream(self._stream)
        self._stream = stream
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
            self.copier.add(piece, source[start : start + step])
            self._filled.append((destination[start : start + step], piece))
            self._used += step
            start += step

    def flush(self) -> None:
        """Read all sources, and enqueue their copies to the GPU."""
        self.copier.run()
        for destination, piece in self._filled:
            destination.copy_(piece, non_blocking=True)
        self._filled.clear()


class CudaAttached:
    """See `attach`."""

    transport = "cuda_ipc"
    reused = True
    keep = False

    def __init__(self, description: dict[str, Any], device: str) -> None:
        self._mappings = Mappings()
        slot_bytes = int(description["slot_bytes"])
        allocations = allocations_of(description, device)
        is_whole = len(allocations) == int(description["slots"]) and slot_bytes >= 1
        if not is_whole or min((one.nbytes for one in allocations), default=0) < slot_bytes:
            raise WeightUpdateError("the trainer's staging memory does not match its description")
        memory = self._mappings.open(cuda_ipc.local_gpu(device), str(description["process"]), allocations)
        self._slots = [slot[:slot_bytes] for slot in memory]

    def memory(self, slot: int, entry: BucketEntry) -> torch.Tensor:
        return self._slots[slot]

    def close(self) -> None:
        self._slots = []
        self._mappings.close()
