"""One weight update on one rank, and the state that lives as long as the update."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from rl_memory_plugins.errors import ManifestError, StateConflictError, UnsupportedError, WeightUpdateError
from rl_memory_plugins.memory.manager import MemoryManager
from rl_memory_plugins.tags import Content
from rl_memory_plugins.timing import Steps, timed
from rl_memory_plugins.weights import wire
from rl_memory_plugins.weights.assembly import Assembly
from rl_memory_plugins.weights.buffers import AttachedBuffer, DirectAttached, StreamedAttached, attach
from rl_memory_plugins.weights.buffers.communicated import CommunicatedAttached, communicated
from rl_memory_plugins.weights.communicators import over_nccl
from rl_memory_plugins.weights.communicators.kept import KeptCommunicators
from rl_memory_plugins.weights.communicators.polled import await_done
from rl_memory_plugins.weights.cuda_ipc import local_gpus
from rl_memory_plugins.weights.entries import next_spec, tensor_of
from rl_memory_plugins.weights.feed import Feed
from rl_memory_plugins.weights.manifest import ITEMSIZE, BucketEntry, Manifest, Mismatch, TensorSpec
from rl_memory_plugins.weights.model_loader import ModelLoader
from rl_memory_plugins.weights.open_allocations import Mappings
from rl_memory_plugins.weights.plan import LoadPlan, Write
from rl_memory_plugins.weights.replay import Replays
from rl_memory_plugins.weights.slices import Slice


@dataclass(eq=False)
class Session:
    """Receives one update.

    Attributes:
        manager, model, check_finite: As for `WeightReceiver`.
        mappings: The open allocations of the trainer, which may outlive the update.
        communicators: Those that may outlive the update.
        timeout_s: The longest wait for the trainer at any point, in seconds.
        dial: Connects to the first of a trainer's places that answers; see `dial.dial` for `local`.
        before_writing: See `WeightReceiver`.
        is_held: Whether something that outlives the update owns the connection.
        seconds: The duration of each step.
    """

    manager: MemoryManager
    model: ModelLoader
    mappings: Mappings
    communicators: KeptCommunicators
    timeout_s: float
    check_finite: bool
    dial: Callable[[Sequence[str], bool], wire.Connection]
    before_writing: Callable[[], None] | None
    is_held: bool = field(default=False, init=False)
    seconds: Steps = field(default_factory=Steps, init=False)

    _next_tensor: int = field(default=0, init=False)  # index into the manifest
    _received_bytes: int = field(default=0, init=False)  # of the next tensor
    _total_bytes: int = field(default=0, init=False)
    _committed: bool = field(default=False, init=False)
    _unused: list[str] = field(default_factory=list, init=False)  # names that every rank skips
    _buffer: AttachedBuffer = field(init=False)
    _feed: Feed = field(init=False)  # the engine's loader
    _hello: wire.Hello = field(init=False)
    _slices: list[Slice | None] = field(default_factory=list, init=False)  # what of each tensor travels
    _assembled: torch.Tensor | None = field(default=None, init=False)  # the next tensor, if its rows do not load alone
    # slots as elements, by address and dtype
    _elements: dict[tuple[int, str], torch.Tensor] = field(default_factory=dict, init=False)

    def run(self, connection: wire.Connection, token: str) -> dict[str, Any]:
        """Receive the update. Returns the report of `WeightReceiver.receive`."""
        manager = self.manager
        with timed(self.seconds, "connect"):
            names, nccl = self.communicators.names(), over_nccl.settings() if self._device.type == "cuda" else {}
            self._hello = wire.Hello(wire.PROTOCOL, manager.device.name, token, manager.rank, names, nccl)
            connection.send(self._hello, self.timeout_s)
            expected = self.model.drop_outdated()  # overlaps with the preparation of the offer
            offer, self._buffer = self._attach(connection, expected)
        try:
            cuts = bool(offer.buffer.get("slices"))
            plan = self._validate(connection, offer.manifest, expected, cuts=cuts)
            if self.before_writing is not None:
                with timed(self.seconds, "drain"):
                    self.before_writing()
            if isinstance(self._buffer, CommunicatedAttached):
                with timed(self.seconds, "connect"):
                    self._buffer.look_ahead()
            manifest, sent = offer.manifest, plan
            if cuts:
                sent, self._slices = plan.cut, plan.slices
                manifest = msgspec.structs.replace(manifest, tensors=list(sent.specs.values()))
            self._feed = arrivals = Feed(self._arrivals(connection, offer.manifest, manifest, sent))
            next(arrivals, None)  # a loader may write before it reads: not before the content counts as being written
            self.model.load_with_engine(plan, arrivals)
            for name, _ in arrivals:
                raise WeightUpdateError(f"the engine's loader did not read {name}", name=name, rank=manager.rank)
            if not self._committed:
                problem = "the update broke off, but the engine's loader hid the error"
                raise WeightUpdateError(problem, rank=manager.rank)
            with timed(self.seconds, "load"):
                self.model.finish(plan)
                manager.device.synchronize()
            self._elements.clear()
            buffer = self._buffer
            if not buffer.keep:
                buffer.close()
            if plan.opaque:  # the engine's loader may have made new tensors
                self.model.drop_outdated()
            if not plan.partial:
                self.model.note_complete(plan)
            report = {
                "rank": manager.rank,
                "device": manager.device.name,
                "bytes": self._total_bytes,
                "tensors": self._next_tensor,
                "replayed": len(plan.steps),
                "opaque": len(plan.opaque),
                "draft": plan.draft_tensors,
                "partial": plan.partial,
                "casts": plan.casts,
                "unused": self._unused,
                "transport": buffer.transport,
                "seconds": self.seconds.copy(),
            }
            connection.send(wire.Done(report), self.timeout_s)
            if isinstance(buffer, Assembly):
                buffer.done(self.timeout_s)
            if isinstance(buffer, (DirectAttached, CommunicatedAttached, Assembly)) and buffer.keep:
                buffer.hold(connection)
                self.is_held = True
            return report
        finally:
            self._elements.clear()

    def close(self) -> None:
        """Close the buffer. The trainer should have heard of an error before: this may wait for what it still sends."""
        buffer = getattr(self, "_buffer", None)
        if buffer is not None and not self.is_held:
            buffer.close()

    def others(self) -> list[wire.Connection]:
        """The connections to other processes of the trainer."""
        buffer = getattr(self, "_buffer", None)
        return buffer.others if isinstance(buffer, Assembly) else []

    @functools.cached_property
    def _device(self) -> torch.device:
        index = local_gpus().get(self.manager.device.name)
        return torch.device("cpu") if index is None else torch.device("cuda", index)

    def _attach(
        self, connection: wire.Connection, expected: Mapping[str, torch.Tensor]
    ) -> tuple[wire.Offer, AttachedBuffer]:
        """Answer questions, and receive offers until this rank can open the buffer."""
        while True:
            offer, fds = connection.receive_with_fds(wire.Offer, wire.Ask, timeout_s=self.timeout_s)
            try:
                if isinstance(offer, wire.Offer):
                    return offer, attach(
                        offer.buffer,
                        fds,
                        device=self.manager.device.name,
                        mappings=self.mappings,
                        communicated=lambda description: communicated(
                            description, connection, self.communicators, self.timeout_s, self.manager.device.name
                        ),
                    )
                assert isinstance(offer, wire.Ask)
                with contextlib.suppress(ManifestError):  # the trainer has heard of it, and goes on
                    self._validate(connection, offer.manifest, expected)
            except UnsupportedError as error:
                connection.send(wire.Unopened(str(error)), self.timeout_s)
            finally:
                wire.close_fds(fds)

    def _validate(
        self,
        connection: wire.Connection,
        manifest: Manifest,
        expected: Mapping[str, torch.Tensor],
        *,
        cuts: bool = False,
    ) -> LoadPlan:
        """Answer the trainer whether the manifest fits. With `cuts`, name the slices that this rank needs."""
        if manifest.partial and self.manager.content is not Content.VALID:
            raise StateConflictError(
                f"a partial update needs valid weights, but the weights are {self.manager.content}",
                rank=self.manager.rank,
                content=str(self.manager.content),
            )
        try:
            with timed(self.seconds, "validate"):
                plan = self._plan(manifest, expected)
                slices = plan.slices if cuts else []
        except ManifestError as error:
            error.details["rank"] = self.manager.rank
            mismatches = [msgspec.convert(mismatch, Mismatch) for mismatch in error.details["mismatches"]]
            nearest = error.details.pop("nearest", {})
            answer = wire.Reject(error.details["unused"], nearest=nearest, mismatches=mismatches)
            connection.send(answer, self.timeout_s)
            raise
        connection.send(wire.Accept(plan.unused, plan.skipped, plan.nearest, slices, cuts), self.timeout_s)
        return plan

    def _plan(self, manifest: Manifest, expected: Mapping[str, torch.Tensor]) -> LoadPlan:
        """The plan of the model. It may lack parameters that no load fills."""
        if self.model.writes_weights:
            self.manager.learn_unfilled()  # once the update has written, nobody knows whether they hold their values
        return self.model.plan(manifest, expected, self.manager.kept)

    def _arrivals(
        self, connection: wire.Connection, offered: Manifest, manifest: Manifest, plan: LoadPlan
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Receive buckets until the commit. Loads planned tensors, and yields copies of opaque tensors.

        The first item is none of them: it comes with the first bucket, before anything of it is loaded.

        Args:
            offered, manifest: The manifest of whole tensors, and of those that travel. `plan` is of the latter.
        """
        replays, buffer = None, self._buffer
        direct = buffer if isinstance(buffer, DirectAttached) else None
        if (direct is None or direct.keep) and not plan.opaque and not self.check_finite:
            replays = self.model.replays
            replays.begin(plan, () if direct is None else direct.allocations)
        following: wire.Message | None = None  # was read while the bucket before it arrived
        has_begun = False
        while True:
            bucket: wire.Message
            if following is not None:
                bucket, following = following, None
            else:
                with timed(self.seconds, "wait"):
                    bucket = connection.receive(wire.Bucket, wire.Commit, wire.Divide, timeout_s=self.timeout_s)
            if isinstance(bucket, wire.Divide):
                with timed(self.seconds, "connect"):
                    buffer = self._divide(bucket, connection, offered)
                continue
            if isinstance(bucket, wire.Commit):
                self._unused = bucket.unused
                if isinstance(buffer, Assembly):
                    buffer.await_commits(self.timeout_s)
                break
            assert isinstance(bucket, wire.Bucket)
            if not 0 <= bucket.slot < manifest.slots:
                raise WeightUpdateError(
                    f"the trainer announced slot {bucket.slot}; valid slots are 0 to {manifest.slots - 1}"
                )
            if isinstance(buffer, CommunicatedAttached):
                # Not with what may wait for the whole GPU: the engine's own loader, the beginning of the first write,
                # and where memory is short the allocations of a check and of a tensor that comes together.
                look_ahead = not (plan.opaque or self.check_finite) and self._total_bytes > 0
                look_ahead = look_ahead and not _assembles(bucket, manifest, plan)
                with timed(self.seconds, "receive"):
                    following = buffer.receive(connection, bucket, self.timeout_s, look_ahead=look_ahead)
                connection.send(wire.Ack(bucket.slot), self.timeout_s)  # now: the trainer packs while this rank loads
            elif isinstance(buffer, (StreamedAttached, Assembly)):
                with timed(self.seconds, "receive"):  # it arrives whole before the first byte is written
                    buffer.receive(connection, bucket, self.timeout_s)
            # of the first bucket there may be nothing for this rank
            if self.model.writes_weights and self._next_tensor == self._received_bytes == 0 and bucket.entries:
                is_undefined = self.manager.content is not Content.VALID
                self.manager.begin_writing(plan.draft_share)
                if is_undefined or self.model.has_random_padding:  # a sleep has discarded the padding
                    plan.clear_padding()
            if bucket.entries and not has_begun:
                has_begun = True
                yield "", torch.empty(0)
            with timed(self.seconds, "load"):
                if replays is None or not self._repeat(bucket, buffer, replays):
                    yield from self._load(bucket, buffer, manifest, plan, replays)
                if isinstance(following, wire.Bucket):
                    self._await_loads(connection)
                elif buffer.reused:
                    self.manager.device.synchronize()
            if not isinstance(buffer, CommunicatedAttached):
                connection.send(wire.Ack(bucket.slot), self.timeout_s)
        if self._next_tensor != len(manifest.tensors):
            missing = [spec.name for spec in manifest.tensors[self._next_tensor :]]
            raise WeightUpdateError(
                f"the trainer committed without sending {len(missing)} tensors; the first is {missing[0]}",
                missing=missing,
                rank=self.manager.rank,
            )
        self._committed = True

    def _await_loads(self, connection: wire.Connection) -> None:
        """Wait for what this thread has loaded, and not for the whole GPU: on it the next bucket may be arriving."""
        if self._device.type != "cuda":
            return
        loaded = torch.cuda.current_stream(self._device).record_event()
        try:  # with a deadline: a load may wait for that bucket after all
            await_done(loaded.query, wire.Deadline(self.timeout_s), connection)
        except TimeoutError:
            raise connection.stalled("did not send the bytes of the next bucket", self.timeout_s) from None
        except ConnectionError as error:
            problem = str(error)
        else:
            return
        connection.raise_cause(f"sent no whole bucket: {problem}")

    def _divide(self, message: wire.Divide, connection: wire.Connection, offered: Manifest) -> Assembly:
        """Connect to the other processes of the trainer that send their shards."""
        inner, device = self._buffer, self.manager.device.name
        if not isinstance(inner, (StreamedAttached, CommunicatedAttached)) or not self._slices:
            raise connection.error("cannot divide this update")
        self._buffer = assembly = Assembly(message, offered, self._slices, device, connection, inner)

        def open_buffer(description: dict[str, Any], other: wire.Connection) -> StreamedAttached | CommunicatedAttached:
            if description.get("kind") != inner.transport:
                raise UnsupportedError(f"this rank is sent its parts over {inner.transport}")
            if inner.transport == "tcp":
                return StreamedAttached(description)
            return communicated(description, other, self.communicators, self.timeout_s, device)

        def dial(places: Sequence[str]) -> wire.Connection:
            return self.dial(places, connection.is_local)

        assembly.connect(dial, self._hello, open_buffer, self.timeout_s)
        connection.send(wire.Accept([]), self.timeout_s)
        return assembly

    def _repeat(self, bucket: wire.Bucket, buffer: AttachedBuffer, replays: Replays) -> bool:
        """Load a bucket as in the latest update, if it is the same."""
        same = replays.find((self._next_tensor, self._received_bytes), bucket.entries)
        if same is None or not same.run(buffer.memory(bucket.slot, bucket.entries[0])):
            return False
        self._next_tensor, self._received_bytes = same.end
        self._total_bytes += same.nbytes
        return True

    def _load(
        self, bucket: wire.Bucket, buffer: AttachedBuffer, manifest: Manifest, plan: LoadPlan, replays: Replays | None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Load the planned tensors of a bucket, and yield copies of the opaque ones."""
        begin, repeatable = (self._next_tensor, self._received_bytes), replays is not None and bool(bucket.entries)
        writes: list[Write] = []
        for entry in bucket.entries:
            memory = buffer.memory(bucket.slot, entry)
            spec = self._take(entry, manifest, memory.numel())
            if self.check_finite:
                _require_finite(spec.name, tensor_of(memory, entry, spec))
            planned = self._writes(plan, spec, memory, entry)
            if planned is not None:
                writes += planned
                continue
            repeatable = False
            plan.run(writes)
            writes.clear()
            tensor = self._given(spec, memory, entry)
            if tensor is not None and spec.name in plan.opaque:
                yield spec.name, tensor
            elif tensor is not None:
                plan.apply(spec.name, tensor)
        self._feed.finish()
        batch = plan.run(writes)
        if replays is not None and repeatable:
            slot, end = buffer.memory(bucket.slot, bucket.entries[0]), (self._next_tensor, self._received_bytes)
            replays.keep(begin, end, bucket.entries, batch, slot)

    def _take(self, entry: BucketEntry, manifest: Manifest, slot_bytes: int) -> TensorSpec:
        """Count the entry as received. Checks that it is the next tensor or its next whole rows, inside the slot."""
        expected = (self._next_tensor, self._received_bytes)
        spec = next_spec(entry, expected, manifest, slot_bytes, rank=self.manager.rank)
        self._received_bytes += entry.nbytes
        self._total_bytes += entry.nbytes
        if self._received_bytes == spec.nbytes:
            self._next_tensor += 1
            self._received_bytes = 0
        return spec

    def _writes(self, plan: LoadPlan, spec: TensorSpec, memory: torch.Tensor, entry: BucketEntry) -> list[Write] | None:
        """The writes for an entry; `None` if the tensor is opaque or can only be loaded whole."""
        if spec.name in plan.opaque:
            return None
        itemsize = ITEMSIZE[spec.dtype]
        key = (memory.data_ptr(), spec.dtype)
        if key not in self._elements:  # with thousands of tensors, a view for each takes too long
            whole = memory[: len(memory) // itemsize * itemsize]
            self._elements[key] = whole.view(getattr(torch, spec.dtype))
        elements = self._elements[key]

        def writes_from(source: torch.Tensor, start: int) -> list[Write] | None:
            if entry.nbytes == spec.nbytes:
                return plan.writes(spec.name, source, start)
            first = entry.start // spec.row_nbytes
            return plan.row_writes(spec.name, source, start, first, first + entry.nbytes // spec.row_nbytes)

        writes = writes_from(elements, elements.storage_offset() + entry.offset // itemsize)
        if writes is None or memory.is_cuda or all(_is_plain(*write) for write in writes):
            return writes
        # Copy as is, then cast or gather on the GPU: the host is slower.
        return writes_from(tensor_of(memory, entry, spec).to(writes[0][0].device, non_blocking=True), 0)

    def _given(self, spec: TensorSpec, memory: torch.Tensor, entry: BucketEntry) -> torch.Tensor | None:
        """The tensor for the engine's loader; `None` before all its rows have arrived."""
        if self._feed.lends(spec.name) and entry.nbytes == spec.nbytes and memory.device == self._device:
            return tensor_of(memory, entry, spec)
        # a copy: the trainer reuses the slot while the loader may still hold the tensor
        return self._assemble(spec, memory, entry)

    def _assemble(self, spec: TensorSpec, memory: torch.Tensor, entry: BucketEntry) -> torch.Tensor | None:
        """A copy of the tensor once all its rows have arrived; `None` before."""
        rows = tensor_of(memory, entry, spec)
        if entry.nbytes == spec.nbytes:
            return rows.to(self._device, copy=True)
        if self._assembled is None:
            self._assembled = torch.empty(spec.shape, dtype=rows.dtype, device=self._device)
        self._assembled.narrow(0, entry.start // spec.row_nbytes, len(rows)).copy_(rows, non_blocking=True)
        if entry.start + entry.nbytes < spec.nbytes:
            return None
        whole, self._assembled = self._assembled, None
        return whole


def _assembles(bucket: wire.Bucket, manifest: Manifest, plan: LoadPlan) -> bool:
    """Whether a bucket has rows of a tensor that only loads whole."""

    def assembles(entry: BucketEntry) -> bool:
        if not 0 <= entry.index < len(manifest.tensors):  # is refused when it is loaded
            return False
        spec = manifest.tensors[entry.index]
        return entry.nbytes != spec.nbytes and plan.row_writes(spec.name, torch.empty(0), 0, 0, 0) is None

    return any(assembles(entry) for entry in bucket.entries)


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
