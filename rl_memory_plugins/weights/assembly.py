"""A rank's end of an update whose parts come from several processes of a trainer; see `shards`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from rl_memory_plugins.errors import UnsupportedError
from rl_memory_plugins.memory.threads import in_parallel
from rl_memory_plugins.weights import wire
from rl_memory_plugins.weights.buffers import StreamedAttached, typed
from rl_memory_plugins.weights.buffers.communicated import CommunicatedAttached
from rl_memory_plugins.weights.buffers.received_slot import ReceivedSlot
from rl_memory_plugins.weights.buffers.streamed import extent
from rl_memory_plugins.weights.entries import tensor_of
from rl_memory_plugins.weights.manifest import BucketEntry, Manifest
from rl_memory_plugins.weights.shards import Piece, Pieces, checksum_of, place, turn
from rl_memory_plugins.weights.slices import Slice

if TYPE_CHECKING:
    import torch

Sent = StreamedAttached | CommunicatedAttached


class _Source(NamedTuple):
    """A process of the trainer. What it sends for a bucket arrives in `buffer`."""

    process: int
    connection: wire.Connection
    buffer: Sent


class Assembly:
    """A buffer in which the parts of a bucket come together.

    Args:
        message: How the tensors lie over the processes.
        manifest: That of the update, with whole tensors.
        slices: What this rank needs of them.
        device: The name of this rank's device.
        connection, buffer: The connection on which `message` has come, and its buffer, which this object owns.

    Attributes:
        others: The connections to other processes. The caller closes them, unless `hold` was called.

    Raises:
        WeightUpdateError: the message does not fit the manifest.
        HostMemoryError, DeviceMemoryError: there is no memory for the slot.
    """

    reused = True

    def __init__(
        self,
        message: wire.Divide,
        manifest: Manifest,
        slices: Sequence[Slice | None],
        device: str,
        connection: wire.Connection,
        buffer: Sent,
    ) -> None:
        message.layouts.require(manifest.tensors)
        self.transport = buffer.transport
        self.keep = buffer.keep
        self.others: list[wire.Connection] = []
        self._message = message
        self._pieces = Pieces(manifest.tensors, slices, message.layouts)
        self._sources = [_Source(message.process, connection, buffer)]
        if isinstance(buffer, CommunicatedAttached):
            buffer.one_slot()  # the parts of a bucket arrive one after the other
        self._slot = ReceivedSlot(message.slot_bytes, device if self.transport == "nccl" else None)

    def connect(
        self,
        dial: Callable[[Sequence[str]], wire.Connection],
        hello: wire.Hello,
        attach: Callable[[dict[str, object], wire.Connection], Sent],
        timeout_s: float,
    ) -> None:
        """Connect to the other processes.

        Args:
            dial: Connects to the first of some places that answers.
            attach: Opens the buffer that a process offers. Threads call it.

        Raises:
            UnsupportedError: a buffer cannot be opened.
            RLMemoryError: a process is unreachable, has given up, or is gone.
        """
        own = msgspec.structs.replace(hello, number=self._message.number)
        processes = []
        for process, places in enumerate(self._message.places):
            if places and process != self._message.process:
                connection = dial(places)
                connection.peer = f"process {process} of the trainer"
                connection.details = {**connection.details, "trainer_process": process}
                self.others.append(connection)
                processes.append(process)
                connection.send(own, timeout_s)

        def link(process: int, connection: wire.Connection) -> None:
            offer = connection.receive(wire.Link, timeout_s=timeout_s)
            try:
                buffer = attach(offer.buffer, connection)
            except UnsupportedError as error:
                connection.send(wire.Unopened(str(error)), timeout_s)
                raise
            self._sources.append(_Source(process, connection, buffer))
            connection.send(wire.Accept([]), timeout_s)

        # all at a time: to make a communicator takes long
        in_parallel([partial(link, *one) for one in zip(processes, self.others, strict=True)], "rl-memory-join")
        number, ranks = self._message.number, self._message.ranks
        self._sources.sort(key=lambda one: (turn(one.process, number, ranks), one.process))

    def receive(self, connection: wire.Connection, bucket: wire.Bucket, timeout_s: float) -> None:
        """Receive all parts of a bucket, after its announcement over `connection`.

        The other processes hear of each bucket, also of one to which they contribute nothing: no process runs ahead of
        the rank by more than its slots, so that its waits end with the next bucket and not with the whole transfer.

        Raises:
            WeightUpdateError: a process stalled, disconnected, or sent something else than it should.
            RLMemoryError: a process has given up.
        """
        extent(bucket.entries, len(self._slot.memory))
        missing = sum(entry.nbytes for entry in bucket.entries)
        for source in self._sources:
            is_first = source.connection is connection
            pieces = self._pieces.of_bucket(bucket.entries, source.process, rest=is_first)
            packed = [piece.packed for piece in pieces]
            if pieces:
                message = source.connection.receive(wire.Bucket, timeout_s=timeout_s)
                if message.entries != packed or message.slot != bucket.slot:
                    raise source.connection.error("sent other parts of a bucket than it should")
                source.buffer.receive(source.connection, message, timeout_s)
                self._put(bucket, source, message, pieces)
            if not is_first:
                source.connection.send(wire.Ack(bucket.slot), timeout_s)
            missing -= sum(entry.nbytes for entry in packed)
        if missing:
            raise connection.error(f"named no process that sends {missing} bytes of a bucket")

    def _put(self, bucket: wire.Bucket, source: _Source, message: wire.Bucket, pieces: Sequence[Piece]) -> None:
        """Check what has arrived from a process, and put it into the bucket."""
        last = pieces[-1].packed
        arrived = source.buffer.memory(message.slot, last)
        if checksum_of(arrived[: last.offset + last.nbytes], pieces) != message.checksum:
            raise source.connection.error("sent parts of a bucket that do not fit their checksum", reason="checksum")
        for piece in pieces:
            spec = self._pieces.cut[piece.entry.index]
            target = place(tensor_of(self._slot.memory, piece.entry, spec), piece.region)
            target.copy_(typed(arrived, piece.packed.offset, piece.packed.nbytes, spec.dtype, target.shape))
        self._slot.synchronize()

    def await_commits(self, timeout_s: float) -> None:
        """Check that the other processes have sent all they have."""
        for other in self.others:
            other.receive(wire.Commit, timeout_s=timeout_s)

    def done(self, timeout_s: float) -> None:
        """Tell the other processes that this rank has all it needs."""
        for other in self.others:
            other.send(wire.Done({}), timeout_s)

    def memory(self, slot: int, entry: BucketEntry) -> torch.Tensor:
        return self._slot.memory

    def hold(self, connection: wire.Connection) -> None:
        """See `DirectAttached.hold`."""
        for source in self._sources:
            if isinstance(source.buffer, CommunicatedAttached):
                source.buffer.hold(source.connection)
        self._slot.free()

    def close(self) -> None:
        for source in self._sources:  # all of them first: freeing waits for all transfers on the GPU
            if isinstance(source.buffer, CommunicatedAttached):
                source.buffer.leave()
        for source in self._sources:
            source.buffer.close()
        self._slot.free()
