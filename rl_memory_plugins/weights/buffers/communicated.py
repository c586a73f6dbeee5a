"""The receiver's end of `gloo` and `nccl`: slots that a communicator fills."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from rl_memory_plugins.errors import DeviceMemoryError, HostMemoryError, UnsupportedError, WeightUpdateError
from rl_memory_plugins.weights import cuda_ipc
from rl_memory_plugins.weights.buffers.received_slot import ReceivedSlot
from rl_memory_plugins.weights.buffers.streamed import extent, require_bytes
from rl_memory_plugins.weights.communicators import ENGINE, JOIN_SHARE, SEAL_BYTES, Communicator, join
from rl_memory_plugins.weights.communicators.kept import KeptCommunicators
from rl_memory_plugins.weights.manifest import BucketEntry
from rl_memory_plugins.weights.wire import Bucket, Commit, Connection, Message


def communicated(
    description: dict[str, Any],
    connection: Connection,
    kept: KeptCommunicators,
    timeout_s: float,
    device: str,
) -> CommunicatedAttached:
    """Open a buffer, with a kept communicator or a new one.

    Args:
        device: The name of this rank's device.

    Raises:
        UnsupportedError: the two ends cannot be joined, or the GPU has no memory for a slot.
        HostMemoryError: there is no memory for a slot.
        WeightUpdateError: the slots have no bytes.
        RLMemoryError: the trainer has given up, or is gone.
    """
    slot_bytes = int(description["slot_bytes"])
    require_bytes(slot_bytes)
    communicator = kept.take(str(description["communicator"]), str(description["kind"]))
    if communicator is None and not description["new"]:
        raise UnsupportedError("the communicator of the former update is broken")
    if communicator is None:
        index = cuda_ipc.local_gpus().get(device)
        own = torch.device("cpu") if index is None else torch.device("cuda", index)
        # An engine may be told to wait for longer than the trainer does: both must give up at the same time.
        join_s = min(timeout_s, float(description.get("timeout_s", timeout_s))) * JOIN_SHARE
        communicator = join(description, connection, ENGINE, join_s, own)
    try:
        return CommunicatedAttached(slot_bytes, communicator, kept, device)
    except BaseException:
        kept.drop(communicator)
        raise


class CommunicatedAttached:
    """See `attach`. The slots are this rank's own: which of the trainer's a bucket lies in does not matter here.

    There is one, until `look_ahead`.

    Args:
        slot_bytes: The bytes of a slot, without the seal.
        communicator: This end of the communicator. The buffer owns it.
        kept: Keeps the communicator after a complete update.
        device: The name of this rank's device.
    """

    reused = True
    keep = True

    def __init__(
        self,
        slot_bytes: int,
        communicator: Communicator,
        kept: KeptCommunicators,
        device: str,
    ) -> None:
        self._communicator = communicator
        self._kept = kept
        self.transport = communicator.transport
        self._slot_bytes = slot_bytes
        self._ahead: Bucket | None = None  # has begun to arrive, in the slot that is not the first
        self._device = device if communicator.transport == "nccl" else None
        try:
            self._slots = [self._new_slot()]  # the first has the bucket that was received last
        except DeviceMemoryError as error:
            raise UnsupportedError(str(error)) from None

    def _new_slot(self) -> ReceivedSlot:
        try:
            return ReceivedSlot(self._slot_bytes + SEAL_BYTES, self._device)
        except DeviceMemoryError:
            torch.cuda.empty_cache()  # torch may hold the memory in this process's cache
            return ReceivedSlot(self._slot_bytes + SEAL_BYTES, self._device)

    def look_ahead(self) -> None:
        """Obtain a second slot: one bucket arrives while the other is loaded. Where there is none, one must do.

        Call this before anything is received, and while the trainer packs: it takes as long. It fails for no reason of
        memory: this rank has accepted, and others may write to their weights by now.
        """
        with contextlib.suppress(DeviceMemoryError, HostMemoryError, UnsupportedError):
            self._slots.append(self._new_slot())

    def one_slot(self) -> None:
        """Undo `look_ahead`, before anything is received."""
        self._free(1)

    def receive(
        self, connection: Connection, bucket: Bucket, timeout_s: float, *, look_ahead: bool = False
    ) -> Message | None:
        """Receive the bytes of a bucket, after its message. Those of the bucket before are no longer used.

        Args:
            look_ahead: Read the next message meanwhile, and begin to receive its bucket, if there is a slot for it.
                Nothing may then wait for the whole GPU before that bucket has arrived: such a wait has no deadline.

        Returns: the next message, if it has been read.

        Raises:
            WeightUpdateError: the bucket is larger than the slot, or has other bytes than announced; or the trainer
                stalled or disconnected.
            RLMemoryError: the trainer's own error, if it gave up.
        """
        following: Message | None = None

        def read_next() -> None:
            nonlocal following
            if look_ahead and following is None and len(self._slots) > 1 and connection.has_message():
                following = connection.receive(Bucket, Commit, timeout_s=timeout_s)
                if isinstance(following, Bucket):
                    self._begin(connection, following, timeout_s)
                    self._ahead = following

        try:
            if self._ahead is not bucket:
                self._begin(connection, bucket, timeout_s)
            self._slots.reverse()
            self._ahead = None
            self._communicator.await_received(connection, timeout_s, read_next)
        except TimeoutError:
            raise connection.stalled("did not send the bytes of a bucket", timeout_s) from None
        except OSError as error:
            problem = str(error)
        else:
            self._require_sealed(bucket)
            return following
        return connection.raise_cause(f"sent no whole bucket: {problem}")

    def _begin(self, connection: Connection, bucket: Bucket, timeout_s: float) -> None:
        """Begin to receive a bucket into the last slot."""
        nbytes = extent(bucket.entries, self._slot_bytes)
        if len(bucket.seal) != SEAL_BYTES:
            raise WeightUpdateError("the trainer announced a bucket without a seal")
        self._communicator.begin_receive(self._slots[-1].memory, nbytes + SEAL_BYTES, connection, timeout_s)

    def _require_sealed(self, bucket: Bucket) -> None:
        nbytes = extent(bucket.entries, self._slot_bytes)
        if bytes(self._slots[0].memory[nbytes : nbytes + SEAL_BYTES].tolist()) != bucket.seal:
            raise WeightUpdateError(f"the trainer announced a bucket of {nbytes} bytes, and sent another")

    def memory(self, slot: int, entry: BucketEntry) -> torch.Tensor:
        return self._slots[0].memory[: self._slot_bytes]

    def hold(self, connection: Connection) -> None:
        """See `DirectAttached.hold`."""
        self._free(0)
        self._kept.keep(self._communicator, connection)

    def leave(self) -> None:
        """End the communicator, and with it a transfer that waits for the peer. `close` is still to be called."""
        self._kept.drop(self._communicator)

    def close(self) -> None:
        self.leave()  # first: freeing waits for a transfer on the GPU
        self._free(0)

    def _free(self, left: int) -> None:
        """Free all slots but so many."""
        for slot in self._slots[left:]:
            slot.free()
        del self._slots[left:]
