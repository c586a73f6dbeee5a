"""One weight update, as one rank receives it: the state that ends with it."""

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
    """Arguments are those of `WeightReceiver`, and what outlives the update: the model's plans, the open mappings.

    Attributes:
        lease: After an update from memory that the trainer keeps for the next one: the connection to keep too.
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
        self._next = 0  # index of the tensor that must come next
        self._came = 0  # bytes of it that have come
        self._whole: torch.Tensor | None = None  # it, where rows of it cannot be loaded by themselves
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
            expected = self._model.drop_outdated()  # while the trainer prepares its offer
            offer, buffer = self._attach(connection)
        self._transport = buffer.transport
        try:
            plan = self._validate(connection, offer.manifest, expected)
            arrivals = self._arrivals(connection, buffer, offer.manifest, plan)
            self._model.load_opaque(plan, arrivals)
            for name, _ in arrivals:
                raise WeightUpdateError(f"the engine's loader did not take {name}", name=name, rank=manager.rank)
            if not self._committed:
                raise WeightUpdateError("the engine's loader hid that the update broke off", rank=manager.rank)
            with self.timed("load"):
                manager.device.synchronize()
            self._flat.clear()
            keep = isinstance(buffer, DirectAttached) and buffer.keep
            if not keep:
                buffer.close()
            if plan.opaque:  # the engine's loader ran, and may have made new tensors
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
        """Take the first of the trainer's buffers that can be opened here."""
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
                f"a partial update needs valid weights; they are {self._manager.content}",
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
        """Take buckets until the commit: replay what the plan knows, yield copies of what is opaque."""
        manager = self._manager
        replays = self._replays(plan, buffer)
        while True:
            with self.timed("wait"):
                message = connection.receive(wire.Bucket, wire.Commit, timeout_s=self._timeout_s)
            if not isinstance(message, wire.Bucket):
                break
            if not 0 <= message.slot < manifest.slots:
                raise WeightUpdateError(f"the trainer names slot {message.slot} of {manifest.slots}")
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
                    # the memory is written again while the loader may still hold the tensor
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
                f"the trainer committed without sending {len(missing)} tensors, the first being {missing[0]}",
                missing=missing,
                rank=self._manager.rank,
            )
        self._committed = True

    def _replays(self, plan: LoadPlan, buffer: AttachedBuffer) -> Replays | None:
        """What this update may share with the latest one: where memory stays open and no tensor is looked into."""
        if not isinstance(buffer, DirectAttached) or not buffer.keep or plan.opaque or self._check_finite:
            return None
        self._model.replays.begin(plan, buffer.allocations)
        return self._model.replays

    def _take(self, entry: BucketEntry, manifest: Manifest, slot_bytes: int) -> TensorSpec:
        """Check that this is what comes next: a tensor or whole rows of it, inside the slot."""
        if entry.index != self._next or entry.index >= len(manifest.tensors) or entry.start != self._came:
            raise WeightUpdateError(
                f"the trainer sent tensor {entry.index} when {self._next} was due", rank=self._manager.rank
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
                f"{spec.name} does not lie in the slot as the trainer says",
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
        """What to do with an entry; None where only the whole tensor can be loaded, or by the loader only."""
        if spec.name in plan.opaque:
            return None
        itemsize = ITEMSIZE[spec.dtype]
        key = (memory.data_ptr(), spec.dtype)
        if key not in self._flat:  # for thousands of tensors one view each is worth saving
            whole = memory[: len(memory) // itemsize * itemsize]
            self._flat[key] = whole.view(getattr(torch, spec.dtype))
        flat = self._flat[key]
        writes = self._planned(plan, spec, entry, flat, flat.storage_offset() + entry.offset // itemsize)
        if writes is None or memory.is_cuda or all(_is_plain(*write) for write in writes):
            return writes
        # The host would gather or cast what it sends; the GPU does that faster.
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
        """A copy of the tensor, once all of it is here."""
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
    """The tensor, or those of its rows that the entry is."""
    shape = spec.shape
    if entry.nbytes != spec.nbytes:
        shape = (entry.nbytes // spec.row_nbytes, *shape[1:])
    return typed(memory, entry.offset, entry.nbytes, spec.dtype, shape)


def _is_plain(destination: torch.Tensor, source: Any) -> bool:
    """Whether this is a fill, a copy within the host's memory, or one that a copy engine does as it is."""
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
        raise WeightUpdateError(f"{name} holds a NaN or an infinity", name=name, reason="not finite")
