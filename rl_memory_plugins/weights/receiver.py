"""One rank's end of a weight update."""

from __future__ import annotations

import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import msgspec
import torch

from rl_memory_plugins.errors import (
    InvalidRequestError,
    ManifestError,
    StateConflictError,
    UnsupportedError,
    WeightUpdateError,
)
from rl_memory_plugins.memory.manager import MemoryManager
from rl_memory_plugins.tags import Content
from rl_memory_plugins.weights import checksums, wire
from rl_memory_plugins.weights.buffers import AttachedBuffer, DirectAttached, attach, typed
from rl_memory_plugins.weights.cuda_ipc import Mappings, local_gpus
from rl_memory_plugins.weights.manifest import ITEMSIZE, BucketEntry, Manifest, Mismatch, TensorSpec
from rl_memory_plugins.weights.plan import Loader, LoadPlan, Write, signature, trace, warm_up
from rl_memory_plugins.weights.replay import Replays

MAX_PLANS = 4
"""Plans kept, one for each manifest that a trainer alternates between (complete, LoRA, …)."""


def ignore_derived(name: str) -> bool:
    """Names that checkpoints hold and engines compute themselves."""
    return name.endswith(("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached"))


class Reload(Protocol):
    """An engine's own way to load weights that it transforms after loading (quantised, packed, absorbed ones).

    Attributes:
        why: Why replaying copies would be wrong, for a person.
    """

    why: str

    def checkpoint_layout(self) -> AbstractContextManager[Mapping[str, torch.Tensor]]:
        """Give the model's parameters the shapes and loaders that they had before the transformation.

        There is no memory behind them. Names them as `"layer.parameter"`; at the end the model is as it was.
        """

    def load(self, weights: Iterable[tuple[str, torch.Tensor]], *, partial: bool) -> None:
        """Load and transform; it may keep the tensors until it returns. Every address stays.

        Raises:
            WeightUpdateError: what the engine did is not what it did at its first load.
        """


class WeightReceiver:
    """Takes updates from a trainer into this rank's memory.

    Args:
        manager: The rank's state machine; told when the first byte is about to be written.
        load_weights: The model's loader. Planning runs it on meta tensors.
        parameters: The parameters that a complete update must cover, by the engine's name.
        load_opaque: Loads, for real, tensors that the plan cannot replay. Called once for each update that has
            any, with an iterator over them; it may keep the tensors. The model's loader where it is not given.
        reload: Gives what loads all tensors in place of both, if the engine has transformed any weights. Asked
            for each plan, and whenever one has opaque tensors; raises `UnsupportedError` if the engine has and
            cannot do it again.
        transformed: How many of the engine's post-load steps were seen to transform weights. Plans are void once
            that changes.
        ignorable: Whether the model's loader may ignore a name of the manifest.
        allow_cast: Take tensors of another dtype than the engine's.
        check_finite: Refuse tensors that hold a NaN or an infinity.
    """

    def __init__(
        self,
        manager: MemoryManager,
        load_weights: Loader,
        parameters: Callable[[], Mapping[str, torch.Tensor]],
        *,
        load_opaque: Loader | None = None,
        reload: Callable[[], Reload | None] = lambda: None,
        transformed: Callable[[], int] = lambda: 0,
        ignorable: Callable[[str], bool] = ignore_derived,
        allow_cast: bool = False,
        check_finite: bool = False,
    ) -> None:
        self._manager = manager
        self._load_weights = load_weights
        self._parameters = parameters
        self._load_opaque = load_opaque or load_weights
        self._reload = reload
        self._transformed = transformed
        self._ignorable = ignorable
        self._allow_cast = allow_cast
        self._check_finite = check_finite
        self._plans: dict[str, LoadPlan] = {}
        self._signature: tuple[Any, ...] = ()
        self._complete_plan: LoadPlan | None = None  # of the latest complete update
        self._mappings = Mappings()
        self._replays = Replays()

    def receive(self, endpoints: dict[str, str], token: str, timeout_s: float) -> dict[str, Any]:
        """Take one update from the trainer.

        No wait for the trainer is longer than `timeout_s`. On any error before the first bucket nothing has
        changed; after it the weights' content is `updating` until the controller's `finish_update`.

        Returns: bytes, tensors (replayed and opaque), transport (`buffers.TRANSPORTS`), and seconds by step.

        Raises:
            ManifestError: the tensors do not fit; lists every mismatch.
            StateConflictError: a partial update of weights that are not valid, or the weights are asleep.
            WeightUpdateError: the trainer stalled, is gone, or gave up; or the engine's loader failed.
        """
        self._manager.require_writable()
        session = _Session(self, timeout_s)
        with session.timed("connect"):
            connection = self._connect(endpoints, timeout_s)
        try:
            return session.run(connection, token)
        except Exception as error:
            known = wire.as_update_error(error, rank=self._manager.rank)
            connection.fail(known)
            # Whoever keeps the error must not keep the trainer's memory through the frames of its traceback.
            traceback.clear_frames(error.__traceback__)
            if known is error:
                raise
            raise known from error
        finally:
            if session.lease is None:
                connection.close()
            else:
                self._mappings.keep(session.lease)

    def warm_up(self) -> None:
        """Prepare the first update in the background."""
        threading.Thread(target=warm_up, name="rl-memory-warm-up", daemon=True).start()

    def close(self) -> None:
        """Close what is still open of a trainer's memory."""
        self._mappings.close()

    def _connect(self, endpoints: dict[str, str], timeout_s: float) -> wire.Connection:
        device = self._manager.device.name
        path = endpoints.get(device, endpoints.get("*"))
        if path is None:
            raise InvalidRequestError(
                f"no endpoint for device {device}", field="endpoints", device=device, got=sorted(endpoints)
            )
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout_s)
            sock.connect(path)
        except OSError as error:
            sock.close()
            raise WeightUpdateError(
                f"the trainer's socket {path} cannot be reached: {error}",
                reason="unreachable",
                endpoint=path,
                rank=self._manager.rank,
            ) from None
        return wire.Connection(sock, "the trainer", rank=self._manager.rank)

    def plan(self, manifest: Manifest, expected: Mapping[str, torch.Tensor]) -> LoadPlan:
        """The plan for a manifest: from the cache, or traced now. Touches no weights.

        Args:
            expected: What `drop_outdated_plans` returned in this session.

        Raises:
            ManifestError: the tensors do not fit.
            UnsupportedError: the engine has transformed weights and cannot do it again.
        """
        digest = manifest.digest()
        if digest in self._plans:
            return self._plans[digest]
        reload = self._reload()
        with nullcontext(expected) if reload is None else reload.checkpoint_layout() as layout:
            plan = trace(
                self._load_weights,
                manifest,
                expected=layout,
                ignorable=self._ignorable,
                allow_cast=self._allow_cast,
                whole_layers="" if reload is None else reload.why,
            )
        while len(self._plans) >= MAX_PLANS:
            del self._plans[next(iter(self._plans))]
        self._plans[digest] = plan
        self.drop_outdated_plans()  # the loader may have made new tensors, traced or not
        return plan

    def _load_what_is_opaque(self, plan: LoadPlan, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        if not plan.opaque:
            return
        reload = self._reload()
        if reload is not None:
            reload.load(weights, partial=plan.partial)
        else:
            self._load_opaque(weights)

    def drop_outdated_plans(self) -> Mapping[str, torch.Tensor]:
        """Forget plans that write memory which is no longer the parameters'; they would keep it alive.

        Plans that were made before the engine was seen to transform something go too.

        Returns: the parameters as they are now.
        """
        expected = self._parameters()
        current = (self._transformed(), signature(expected))
        if current != self._signature:
            self._plans.clear()
            self._replays.clear()
            self._complete_plan = None
            self._signature = current
        return expected

    def checksums(self) -> dict[str, Any]:
        """Of the weights as they are: by the checkpoint's names after a complete update, else by the engine's.

        Merge the ranks' with `checksums.merge_checksums`.
        """
        expected = self.drop_outdated_plans()
        self._manager.device.synchronize()
        if self._complete_plan is not None:
            return checksums.plan_checksums(self._complete_plan)
        return {
            "layout": "engine",
            "parameters": {name: checksums.tensor_checksum(tensor) for name, tensor in expected.items()},
        }


class _Session:
    """One update: the state that ends with it."""

    def __init__(self, receiver: WeightReceiver, timeout_s: float) -> None:
        self._receiver = receiver
        self._manager = receiver._manager
        self._timeout_s = timeout_s
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
        self.lease: wire.Connection | None = None  # keeps the trainer's memory open after the session

    @contextmanager
    def timed(self, step: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[step] = self._seconds.get(step, 0.0) + time.perf_counter() - start

    def run(self, connection: wire.Connection, token: str) -> dict[str, Any]:
        manager, timeout_s = self._manager, self._timeout_s
        with self.timed("connect"):
            hello = wire.Hello(wire.PROTOCOL, manager.device.name, token, manager.rank)
            connection.send(hello, timeout_s)
            expected = self._receiver.drop_outdated_plans()  # while the trainer prepares its offer
            offer, buffer = self._attach(connection)
        self._transport = buffer.transport
        try:
            plan = self._validate(connection, offer.manifest, expected)
            arrivals = self._arrivals(connection, buffer, offer.manifest, plan)
            self._receiver._load_what_is_opaque(plan, arrivals)
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
                self._receiver.drop_outdated_plans()
            if not plan.partial and plan.digest in self._receiver._plans:
                self._receiver._complete_plan = plan if plan.steps else None  # what is opaque has no checksum
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
                    mappings=self._receiver._mappings,
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
                plan = self._receiver.plan(manifest, expected)
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
                    if self._receiver._check_finite:
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
        receiver = self._receiver
        if not isinstance(buffer, DirectAttached) or not buffer.keep or plan.opaque or receiver._check_finite:
            return None
        receiver._replays.begin(plan, buffer.allocations)
        return receiver._replays

    def _take(self, entry: BucketEntry, manifest: Manifest, slot_bytes: int) -> TensorSpec:
        """Check that this is what comes next: a tensor or whole rows of it, inside the slot."""
        if entry.index != self._next or entry.index >= len(manifest.tensors) or entry.start != self._came:
            raise WeightUpdateError(
                f"the trainer sent tensor {entry.index} when {self._next} was due", rank=self._manager.rank
            )
        spec = manifest.tensors[entry.index]
        if (
            not 0 <= entry.nbytes <= spec.nbytes - entry.start
            or (entry.nbytes == 0 and spec.nbytes > 0)
            or (entry.nbytes != spec.nbytes and entry.nbytes % spec.row_nbytes)
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
        if self._came == spec.nbytes:
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
