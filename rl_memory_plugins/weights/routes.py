"""The routes of an update: which ranks read which buffer."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec
import torch

from rl_memory_plugins.errors import OutOfMemoryError, RLMemoryError, UnsupportedError
from rl_memory_plugins.weights import cuda_ipc
from rl_memory_plugins.weights.bucket_sizes import (
    DIRECT_BUCKET_BYTES,
    HOST_BUCKET_BYTES,
    NCCL_BUCKET_BYTES,
    NCCL_PART_BUCKET_BYTES,
    PEER_BUCKET_BYTES,
    PEER_SLOTS,
    STREAMED_BUCKET_BYTES,
    staged_bucket_bytes,
    with_buckets,
    with_half_buckets,
)
from rl_memory_plugins.weights.buffers import (
    SENT,
    CudaStaging,
    DirectExport,
    NcclStaging,
    ShmStaging,
    StagingBuffer,
    StreamedStaging,
    staged,
)
from rl_memory_plugins.weights.candidates import (
    NEED_UNIX_SOCKET,
    candidate_transports,
    current_gpu,
    gpu_of_all,
    left_out,
)
from rl_memory_plugins.weights.communicators import COMMUNICATORS, joining, over_nccl
from rl_memory_plugins.weights.manifest import BucketEntry, Manifest, align, largest_bytes
from rl_memory_plugins.weights.slices import Cut, Slice

if TYPE_CHECKING:
    from rl_memory_plugins.weights.connected_rank import ConnectedRank

MIN_MEAN_ALLOCATION = 16 << 20
"""With fewer mean bytes per allocation, staging takes less time than opening and closing all allocations."""


OnGpu = TypeVar("OnGpu", CudaStaging, NcclStaging)


class Route:
    """A buffer, and the ranks that read it."""

    def __init__(self, transport: str, buffer: StagingBuffer) -> None:
        self.transport = transport
        self.buffer = buffer
        self.ranks: list[ConnectedRank] = []
        self.cut: Cut | None = None  # what travels of whole tensors, if not all

    def left_of(self, entries: Sequence[BucketEntry]) -> dict[int, BucketEntry]:
        """The entries of a bucket as these ranks get them, by the index of their tensors."""
        return {entry.index: entry for entry in entries} if self.cut is None else self.cut.left_of(entries)

    def part(self, entry: BucketEntry, tensor: torch.Tensor) -> torch.Tensor:
        """What these ranks get of a tensor, or of those of its rows that `entry` describes."""
        return tensor if self.cut is None else self.cut.part(entry, tensor)

    def export(self, rank: ConnectedRank) -> tuple[dict[str, Any], list[int]]:
        """See `StagingBuffer.export`; with the communicator for the rank, if it needs one."""
        description, fds = self.buffer.export()
        if self.transport in SENT:
            description = {**description, "slices": True}
        if self.transport in COMMUNICATORS:
            description = {**description, **rank.offered}
        return description, fds


class Packed(NamedTuple):
    """A bucket in all buffers."""

    slot: int
    placed: dict[Route, list[BucketEntry]]  # where its tensors are for the receivers of each route
    copies: list[Any]  # CUDA events that end with its copies

    def has_ended(self) -> bool:
        return all(copy.query() for copy in self.copies)


class Routes:
    """The routes of one update.

    Args:
        transport, keep_mapped: As for `WeightSender`.
        resident: The tensors, if all of them exist before the update.
        stable: Whether tensors do not change while they are packed.
        group_bytes: See `source.GroupingSource`.
        may_divide: Whether several processes may send their parts of each bucket.
        free_slots: The number of slots in the manifest may change.

    Attributes:
        manifest: That of the offer.
        own_device: The GPU on which this process stages what NCCL sends, or the CPU.
    """

    def __init__(
        self,
        manifest: Manifest,
        transport: str,
        ranks: Sequence[ConnectedRank],
        *,
        keep_mapped: bool,
        resident: Sequence[torch.Tensor] | None,
        stable: bool,
        group_bytes: int = 0,
        may_divide: bool = False,
        free_slots: bool = False,
    ) -> None:
        self._transport = transport
        self._keep_mapped = keep_mapped
        self._resident = resident
        self._stable = stable
        self._group_bytes = group_bytes
        self._may_divide = may_divide
        gpus = cuda_ipc.local_gpus(initialise=transport in ("cuda_ipc", "nccl"))
        self._source_gpu = gpu_of_all(resident, gpus)  # the GPU that holds all tensors
        self._own_gpu = self._source_gpu or current_gpu(gpus)
        index = gpus.get(self._own_gpu or "")
        self.own_device = torch.device("cpu") if index is None else torch.device("cuda", index)
        self._routes: dict[tuple[str, str], Route] = {}
        self._parts: dict[str, list[StreamedStaging | NcclStaging]] = {}  # by transport
        for rank in ranks:
            rank.candidate_transports = candidate_transports(
                transport,
                rank.device,
                gpus,
                self._source_gpu,
                local=rank.connection.is_local,
            )
            for name, reason in left_out(transport, rank.device, gpus).items():
                rank.refused.append({"device": rank.device, "transport": name, "reason": reason})
        reads_gpu = resident is None or self._source_gpu is not None
        crosses = bool(ranks) and all(map(self._crosses, ranks))
        if free_slots and reads_gpu and not may_divide and crosses and (len(ranks) == 1 or transport != "nccl"):
            manifest = msgspec.structs.replace(manifest, slots=PEER_SLOTS)
        self.manifest = manifest
        self._cut = manifest  # with smaller buckets where memory is short
        self._cut_buckets: list[list[BucketEntry]] | None = None  # those of `_cut`, once they are known

    def _crosses(self, rank: ConnectedRank) -> bool:
        """Whether buckets go from one GPU to a rank's other one, if its best transport works."""
        return rank.candidate_transports[0] in ("cuda_ipc", "nccl") and self._own_gpu not in (None, rank.device)

    def assign(self, rank: ConnectedRank) -> Route:
        """Assign the rank to the route of its best remaining transport. Creates the route if needed.

        Raises:
            UnsupportedError: no transport works.
            OutOfMemoryError: the memory for the last remaining transport cannot be allocated.
        """
        error: RLMemoryError | None = None
        while rank.candidate_transports:
            transport = rank.candidate_transports[0]
            key = (transport, rank.device if transport.startswith("cuda") else "")
            try:
                if transport in NEED_UNIX_SOCKET and not rank.connection.is_local:
                    raise UnsupportedError("it needs a Unix socket, and this rank has connected over TCP")
                if transport == "nccl":
                    self.require_nccl(rank)
                if key not in self._routes:
                    self._routes[key] = Route(transport, self._buffer(transport, rank.device))
                if transport in COMMUNICATORS:
                    joining.choose(rank, transport, self.own_device)
                route = self._routes[key]
                route.ranks.append(rank)
                return route
            except (UnsupportedError, OutOfMemoryError) as failure:
                error = failure
                self.refuse(rank, str(failure))
        if isinstance(error, OutOfMemoryError):
            raise error
        raise UnsupportedError(
            f"no transport works for {rank.connection.peer}: "
            + "; ".join(f"{refusal['transport']}: {refusal['reason']}" for refusal in rank.refused),
            device=rank.device,
            tried=rank.refused,
        )

    def _buffer(self, transport: str, device: str, slot_bytes: int = 0) -> StagingBuffer:
        stable = self._stable
        if transport == "cuda_direct":
            if self._resident is None:
                raise UnsupportedError("the source creates its tensors one at a time")
            if self._source_gpu != device:
                raise UnsupportedError(f"not all tensors are on {device}")
            mean = 0 if self._keep_mapped or self._transport == transport else MIN_MEAN_ALLOCATION
            return DirectExport(self._resident, device, keep=self._keep_mapped, mean_bytes=mean)
        if transport == "cuda_ipc":
            most = self.manifest.bucket_bytes if self._own_gpu in (None, device) else PEER_BUCKET_BYTES
            make = functools.partial(CudaStaging, device, stable=stable, held=self._resident is not None)
            return self._staging(make, device, most)
        if transport == "nccl":
            return self._nccl_staging(slot_bytes)
        if transport in ("tcp", "gloo"):
            smaller = with_buckets(self._cut, STREAMED_BUCKET_BYTES)
            return StreamedStaging(slot_bytes or smaller.slot_bytes(), smaller.slots, stable=stable, kind=transport)
        smaller = with_buckets(self._cut, HOST_BUCKET_BYTES)
        return ShmStaging(smaller.slot_bytes(), smaller.slots, pinned=transport == "shm_pinned", stable=stable)

    def require_nccl(self, rank: ConnectedRank) -> None:
        """
        Raises:
            UnsupportedError: NCCL cannot join this process and a rank.
        """
        if self._own_gpu is None:
            raise UnsupportedError("this process uses no GPU")
        if self._own_gpu == rank.device:
            raise UnsupportedError("NCCL does not join two processes on one GPU")
        over_nccl.require(rank.nccl)

    def _nccl_staging(self, slot_bytes: int) -> NcclStaging:
        assert self._own_gpu is not None
        make = functools.partial(NcclStaging, self._own_gpu, stable=self._stable, held=self._resident is not None)
        if self._may_divide and not slot_bytes:  # the other processes fill this one's slots too, and know their size
            slot_bytes = with_buckets(self.manifest, NCCL_PART_BUCKET_BYTES).slot_bytes()
        if slot_bytes:
            return _allocate(make, slot_bytes, self.manifest.slots)
        return self._staging(make, self._own_gpu, NCCL_BUCKET_BYTES)

    def _staging(self, make: Callable[[int, int], OnGpu], device: str, most: int) -> OnGpu:
        """Allocate slots of the size that `staged_bucket_bytes` gives. While memory is short, halve the size.

        A source that creates tensors one at a time also needs memory for the largest tensor and its inputs, and a
        stable one for its next tensors while two groups wait for their copies. One that makes groups itself makes the
        next while the former is sent. Without that memory the source would fail after the engine has written the first
        bytes. The source's tensors are on this process's own GPU, also where the slots are on another one.

        Args:
            make: Allocates slots on `device`, from their size and number.
            most: The largest bucket, in bytes.
        """
        needed = 0
        sizes = self._cut.sizes()
        if self._resident is None:
            needed = 2 * max(sizes, default=0) + min(2 * self._group_bytes, sum(sizes))
            needed += 3 * staged.GROUP_BYTES if self._stable else 0
        cut = with_buckets(self._cut, min(staged_bucket_bytes(sizes, self._cut.slots), most))
        while True:
            buckets = cut.buckets()
            try:
                staging = _allocate(make, largest_bytes(buckets), cut.slots)
            except OutOfMemoryError:
                smaller = with_half_buckets(cut)
                if smaller is None:
                    raise
            else:
                is_short = needed > 0 and cuda_ipc.local_gpu(self._own_gpu or device).lacks(needed)
                smaller = with_half_buckets(cut) if is_short else None
                if smaller is None:
                    self._cut, self._cut_buckets = cut, buckets
                    return staging
                staging.close()
            cut = smaller

    def refuse(self, rank: ConnectedRank, reason: str) -> None:
        """Note why the rank's best remaining transport does not work, and remove the rank from its route."""
        transport = rank.candidate_transports.pop(0)
        for route in self._routes.values():
            if rank in route.ranks:
                route.ranks.remove(rank)
        joining.leave(rank)
        rank.refused.append({"device": rank.device, "transport": transport, "reason": reason})

    def in_use(self) -> list[Route]:
        return [route for route in self._routes.values() if route.ranks]

    def buckets(self) -> list[list[BucketEntry]]:
        """The buckets, cut to fit the buffers of all routes."""
        transports = {route.transport for route in self.in_use()}
        if transports == {"cuda_direct"}:
            nbytes = max(self._cut.bucket_bytes, DIRECT_BUCKET_BYTES)
            return msgspec.structs.replace(self._cut, bucket_bytes=nbytes).buckets(split=False)
        if transports <= {"cuda_direct", "cuda_ipc"}:
            return self._buckets_of_at_most(self._cut.bucket_bytes)
        if transports <= {"cuda_direct", "cuda_ipc", "nccl"}:
            return self._buckets_of_at_most(NCCL_PART_BUCKET_BYTES if self._may_divide else NCCL_BUCKET_BYTES)
        return self._buckets_of_at_most(STREAMED_BUCKET_BYTES if transports & {"tcp", "gloo"} else HOST_BUCKET_BYTES)

    def _buckets_of_at_most(self, nbytes: int) -> list[list[BucketEntry]]:
        if self._cut_buckets is not None and self._cut.bucket_bytes <= nbytes:
            return self._cut_buckets
        return with_buckets(self._cut, nbytes).buckets()

    def cut(self, slices: Mapping[ConnectedRank, Sequence[Slice | None]], buckets: list[list[BucketEntry]]) -> None:
        """Send ranks only their slices. Ranks that need others than those before them get a buffer of their own.

        Args:
            slices: Those of all ranks with a transport in `SENT`.

        Raises:
            WeightUpdateError: slices do not fit the manifest.
            OutOfMemoryError: the memory for a buffer cannot be allocated.
        """
        for (transport, device), route in list(self._routes.items()):
            groups: dict[tuple[Slice | None, ...], list[ConnectedRank]] = {}
            for rank in route.ranks:
                if rank in slices:
                    groups.setdefault(tuple(slices[rank]), []).append(rank)
            for number, (wanted, ranks) in enumerate(groups.items()):
                cut = Cut(self._cut, wanted)
                if number:
                    left = [one for entries in buckets for one in cut.left_of(entries).values()]
                    nbytes = max((one.offset + one.nbytes for one in left), default=0)
                    buffer = self._buffer(transport, device, align(max(nbytes, 1)))
                    route = self._routes[transport, f"{device} {number}"] = Route(transport, buffer)
                route.ranks, route.cut = ranks, None if all(part is None for part in wanted) else cut
                if route.cut is not None and isinstance(route.buffer, NcclStaging):
                    route.buffer.copy_at_once()

    def divide(self, transports: Collection[str]) -> list[list[BucketEntry]]:
        """Give up the buffers for whole tensors: several processes contribute to this update, see `part_buffer`.

        Returns: its buckets, the same on all processes.
        """
        for route in self._routes.values():
            route.buffer.close()
        nbytes = NCCL_PART_BUCKET_BYTES if set(transports) == {"nccl"} else STREAMED_BUCKET_BYTES
        return with_buckets(self.manifest, nbytes).buckets()

    def part_buffer(self, transport: str, slot_bytes: int) -> StreamedStaging | NcclStaging:
        """A buffer for what this process contributes to an update.

        Raises:
            UnsupportedError: this process uses no GPU.
            OutOfMemoryError: the memory cannot be allocated.
        """
        buffer: StreamedStaging | NcclStaging
        if transport == "nccl":
            if self._own_gpu is None:
                raise UnsupportedError("this process uses no GPU")
            buffer = _allocate(functools.partial(NcclStaging, self._own_gpu), slot_bytes, self.manifest.slots)
        else:
            buffer = StreamedStaging(slot_bytes, self.manifest.slots, kind=transport)
        self._parts.setdefault(transport, []).append(buffer)
        return buffer

    def transports(self) -> list[str]:
        """Those in use."""
        return [route.transport for route in self.in_use()] + list(self._parts)

    def staging_bytes(self) -> int:
        """The memory of the buffers in use."""
        if self._parts:
            return sum(buffer.nbytes for buffers in self._parts.values() for buffer in buffers)
        return sum(route.buffer.nbytes for route in self.in_use())

    def close(self) -> None:
        with contextlib.ExitStack() as closing:  # close each buffer even if another one raises
            for route in self._routes.values():
                closing.callback(route.buffer.close)
            for buffers in self._parts.values():
                for buffer in buffers:
                    closing.callback(buffer.close)


def _allocate(make: Callable[[int, int], OnGpu], slot_bytes: int, slots: int) -> OnGpu:
    try:
        return make(slot_bytes, slots)
    except OutOfMemoryError:
        torch.cuda.empty_cache()  # torch may hold the memory in this process's cache
        return make(slot_bytes, slots)
