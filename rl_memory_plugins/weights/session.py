"""One weight update on one rank, and the state that ends with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import msgspec
import torch

from rl_memory_plugins.errors import ManifestError, StateConflictError, UnsupportedError, WeightUpdateError
from rl_memory_plugins.memory.manager import MemoryManager
from rl_memory_plugins.tags import Content
from rl_memory_plugins.timing import timed
from rl_memory_plugins.weights import wire
from rl_memory_plugins.weights.buffers import AttachedBuffer, DirectAttached, attach, typed
from rl_memory_plugins.weights.cuda_ipc import Mappings, local_gpus
from rl_memory_plugins.weights.manifest import ITEMSIZE, BucketEntry, Manifest, Mismatch, TensorSpec
from rl_memory_plugins.weights.model_loader import ModelLoader
from rl_memory_plugins.weights.plan import LoadPlan, Write
from rl_memory_plugins.weights.replay import Replays


class Session:
    """Receives one update.

    Args:
        manager: As for `WeightReceiver`.
        model: The plans of the model, which outlive the update.
        mappings: The open allocations of the trainer, which may outlive the update.
        timeout_s: The longest wait for the trainer at any point, in seconds.
        check_finite: As for `WeightReceiver`.

    Attributes:
        lease: The connection to keep after an update whose trainer keeps its memory for the next one; else `None`.
    """

    def __init__(
        self,
        manager: MemoryManager,
        model: ModelLoader,
        mappings: Mappings,
        timeout_s: float,
        *,
        check_finite: bool,
    ) -> None:
        self._manager = manager
        self._model = model
        self._mappings = mappings
        self._timeout_s = timeout_s
        self._check_finite = check_finite
        self._seconds: dict[str, float] = {}
        self._next = 0  # index of the next tensor
        self._came = 0  # bytes of that tensor that have arrived
        self._whole: torch.Tensor | None = None  # that tensor, if its rows cannot be loaded separately
        self._bytes = 0
        self._committed = False
        self._transport = ""
        index = local_gpus().get(self._manager.device.name)
        self._device = torch.device("cpu") if index is None else torch.device("cuda", index)
        self._flat: dict[tuple[int, str], torch.Tensor] = {}  # the buffer's memory as elements
        self.lease: wire.Connection | None = None

    def timed(self, step: str) -> AbstractContextManager[None]:
        return timed(self._seconds, step)

    def run(self, connection: wire.Connection, token: str) -> dict[str, Any]:
        manager, timeout_s = self._manager, self._timeout_s
        with self.timed("connect"):
            hello = wire.Hello(wire.PROTOCOL, manager.device.name, token, manager.rank)
            connection.send(hello, timeout_s)
            expected = self._model.drop_outdated()  # overlaps with the preparation of the offer
            offer, buffer = self._attach(connection)
        self._transport = buffer.transport
        try:
            plan = self._validate(connection, offer.manifest, expected)
            arrivals = self._arrivals(connection, buffer, offer.manifest, plan)
            self._model.load_with_engine(plan, arrivals)
            for name, _ in arrivals:
                raise WeightUpdateError(f"the engine's loader did not read {name}", name=name, rank=manager.rank)
            if not self._committed:
                raise WeightUpdateError(
                    "the update broke off, but the engine's loader hid the error", rank=manager.rank
                )
            with self.timed("load"):
                manager.device.synchronize()
            self._flat.clear()
            keep = isinstance(buffer, DirectAttached) and buffer.keep
            if not keep:
                buffer.close()
            if plan.opaque:  # the engine's loader may have made new tensors
                self._model.drop_outdated()
            if not plan.partial:
                self._model.note_complete(plan)
            report = self._report(plan)
            connection.send(wire.Done(report), timeout_s)
            if isinstance(buffer, DirectAttached) and keep:
                buffer.kept = True
                self.lease = connection
            return report
        finally:
            self._flat.clear()
            buffer.close()

    def _attach(self, connection: wire.Connection) -> tuple[wire.Offer, AttachedBuffer]:
        """Receive offers until this rank can open the buffer."""
        while True:
            offer, fds = connection.receive_with_fds(wire.Offer, timeout_s=self._timeout_s)
            try:
                buffer = attach(
                    offer.buffer,
                    fds,
                    device=self._manager.device.name,
                    mappings=self._mappings,
                )
                return offer, buffer
            except UnsupportedError as error:
                connection.send(wire.Unopened(str(error)), self._timeout_s)
            finally:
                wire.close_fds(fds)

    def _validate(
        self, connection: wire.Connection, manifest: Manifest, expected: Mapping[str, torch.Tensor]
    ) -> LoadPlan:
        if manifest.partial and self._manager.content is not Content.VALID:
            raise StateConflictError(
                f"a partial update needs valid weights, but the weights are {self._manager.content}",
                rank=self._manager.rank,
                content=str(self._manager.content),
            )
        try:
            with self.timed("validate"):
                plan = self._model.plan(manifest, expected)
        except ManifestError as error:
            error.details["rank"] = self._manager.rank
            mismatches = [msgspec.convert(mismatch, Mismatch) for mismatch in error.details["mismatches"]]
            connection.send(wire.Reject(error.details["unused"], mismatches), self._timeout_s)
            raise
        connection.send(wire.Accept(plan.unused), self._timeout_s)
        return plan

    def _arrivals(
        self, connection: wire.Connection, buffer: AttachedBuffer, manifest: Manifest, plan: LoadPlan
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Receive buckets until the commit. Replays planned tensors, and yields copies of opaque tensors."""
        manager = self._manager
        replays = self._replays(plan, buffer)
        while True:
            with self.timed("wait"):
                message = connection.receive(wire.Bucket, wire.Commit, timeout_s=self._timeout_s)
            if not isinstance(message, wire.Bucket):
                break
            if not 0 <= message.slot < manifest.slots:
                raise WeightUpdateError(
                    f"the trainer announced slot {message.slot}; valid slots are 0 to {manifest.slots - 1}"
                )
            if self._next == 0 and self._came == 0:
                manager.begin_writing()
            known = replays.find(message.entries) if replays is not None and not self._came else None
            if known is not None and known.entries[0].index == self._next:
                with self.timed("load"):
                    known.batch.run()
                self._next = known.entries[-1].index + 1
                self._bytes += known.nbytes
                connection.send(wire.Ack(message.slot), self._timeout_s)
                continue
            with self.timed("load"):
                repeatable = replays is not None and not self._came
                writes: list[Write] = []
                for entry in message.entries:
                    memory = buffer.memory(message.slot, entry)
                    spec = self._take(entry, manifest, len(memory))
                    if self._check_finite:
                        _require_finite(spec.name, _tensor(memory, entry, spec))
                    loadable = self._writes(plan, spec, memory, entry)
                    if loadable is not None:
                        writes += loadable
                        continue
                    repeatable = False
                    plan.run(writes)
                    writes.clear()
                    # a copy: the trainer reuses the slot while the loader may still hold the tensor
                    tensor = self._assemble(spec, memory, entry)
                    if tensor is None:
                        continue
                    if spec.name in plan.opaque:
                        yield spec.name, tensor
                    else:
                        plan.apply(spec.name, tensor)
                batch = plan.run(writes)
                if replays is not None and repeatable and message.entries and not self._came:
                    replays.keep(message.entries, batch)
                if buffer.reused:
                    manager.device.synchronize()
            connection.send(wire.Ack(message.slot), self._timeout_s)
        if self._next != len(manifest.tensors):
            missing = [spec.name for spec in manifest.tensors[self._next :]]
            raise WeightUpdateError(
                f"the trainer committed without sending {len(missing)} tensors; the first is {missing[0]}",
                missing=missing,
                rank=self._manager.rank,
            )
        self._committed = True

    def _replays(self, plan: LoadPlan, buffer: AttachedBuffer) -> Replays | None:
        """The buckets of the latest update, if this update may repeat them unchecked; else `None`."""
        if not isinstance(buffer, DirectAttached) or not buffer.keep or plan.opaque or self._check_finite:
            return None
        self._model.replays.begin(plan, buffer.allocations)
        return self._model.replays

    def _take(self, entry: BucketEntry, manifest: Manifest, slot_bytes: int) -> TensorSpec:
        """Check that the entry is the next tensor, or its next whole rows, and lies inside the slot."""
        if entry.index != self._next or entry.index >= len(manifest.tensors) or entry.start != self._came:
            raise WeightUpdateError(
                f"the trainer sent tensor {entry.index} out of order: tensor {self._next} was next",
                rank=self._manager.rank,
            )
        spec = manifest.tensors[entry.index]
        nbytes = spec.nbytes
        if (
            not 0 <= entry.nbytes <= nbytes - entry.start
            or (entry.nbytes == 0 and nbytes > 0)
            or (entry.nbytes != nbytes and entry.nbytes % spec.row_nbytes)
            or not 0 <= entry.offset <= slot_bytes - entry.nbytes
            or entry.offset % ITEMSIZE[spec.dtype]
        ):
            raise WeightUpdateError(
                f"the trainer announced an invalid byte range for {spec.name}",
                name=spec.name,
                rank=self._manager.rank,
            )
        self._came += entry.nbytes
        self._bytes += entry.nbytes
        if self._came == nbytes:
            self._next += 1
            self._came = 0
        return spec

    def _writes(self, plan: LoadPlan, spec: TensorSpec, memory: torch.Tensor, entry: BucketEntry) -> list[Write] | None:
        """The writes for an entry; `None` if the tensor is opaque or can only be loaded whole."""
        if spec.name in plan.opaque:
            return None
        itemsize = ITEMSIZE[spec.dtype]
        key = (memory.data_ptr(), spec.dtype)
        if key not in self._flat:  # with thousands of tensors, a view for each takes too long
            whole = memory[: len(memory) // itemsize * itemsize]
            self._flat[key] = whole.view(getattr(torch, spec.dtype))
        flat = self._flat[key]
        writes = self._planned(plan, spec, entry, flat, flat.storage_offset() + entry.offset // itemsize)
        if writes is None or memory.is_cuda or all(_is_plain(*write) for write in writes):
            return writes
        # Copy as is, then cast or gather on the GPU: the host is slower.
        tensor = _tensor(memory, entry, spec).to(writes[0][0].device, non_blocking=True)
        return self._planned(plan, spec, entry, tensor, 0)

    @staticmethod
    def _planned(
        plan: LoadPlan, spec: TensorSpec, entry: BucketEntry, memory: torch.Tensor, start: int
    ) -> list[Write] | None:
        if entry.nbytes == spec.nbytes:
            return plan.writes(spec.name, memory, start)
        first = entry.start // spec.row_nbytes
        return plan.row_writes(spec.name, memory, start, first, first + entry.nbytes // spec.row_nbytes)

    def _assemble(self, spec: TensorSpec, memory: torch.Tensor, entry: BucketEntry) -> torch.Tensor | None:
        """A copy of the tensor once all its rows have arrived; `None` before."""
        rows = _tensor(memory, entry, spec)
        if entry.nbytes == spec.nbytes:
            return rows.to(self._device, copy=True)
        if self._whole is None:
            self._whole = torch.empty(spec.shape, dtype=rows.dtype, device=self._device)
        self._whole.narrow(0, entry.start // spec.row_nbytes, len(rows)).copy_(rows, non_blocking=True)
        if entry.start + entry.nbytes < spec.nbytes:
            return None
        whole, self._whole = self._whole, None
        return whole

    def _report(self, plan: LoadPlan) -> dict[str, Any]:
        return {
            "rank": self._manager.rank,
            "device": self._manager.device.name,
            "bytes": self._bytes,
            "tensors": self._next,
            "replayed": len(plan.steps),
            "opaque": len(plan.opaque),
            "partial": plan.partial,
            "transport": self._transport,
            "seconds": dict(self._seconds),
        }


def _tensor(memory: torch.Tensor, entry: BucketEntry, spec: TensorSpec) -> torch.Tensor:
    """A view of the entry: the tensor, or some of its rows."""
    shape = spec.shape
    if entry.nbytes != spec.nbytes:
        shape = (entry.nbytes // spec.row_nbytes, *shape[1:])
    return typed(memory, entry.offset, entry.nbytes, spec.dtype, shape)


def _is_plain(destination: torch.Tensor, source: Any) -> bool:
    """Whether this is a fill, a copy within host memory, or a copy that a GPU's copy engine can do."""
    return (
        not isinstance(source, torch.Tensor)
        or not destination.is_cuda
        or (source.dtype == destination.dtype and source.is_contiguous() and destination.is_contiguous())
    )


def _require_finite(name: str, tensor: torch.Tensor) -> None:
    if not tensor.is_floating_point():
        return
    values = tensor if tensor.element_size() > 1 else tensor.to(torch.float32)
    if not bool(torch.isfinite(values).all()):
        raise WeightUpdateError(f"{name} contains a NaN or an infinity", name=name, reason="not finite")
