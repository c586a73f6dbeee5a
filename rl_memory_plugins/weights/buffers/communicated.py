"""The receiver's end of `gloo` and `nccl`: a slot that a communicator fills."""

from __future__ import annotations

from typing import Any

import torch

from rl_memory_plugins.errors import DeviceMemoryError, UnsupportedError, WeightUpdateError
from rl_memory_plugins.weights import cuda_ipc
from rl_memory_plugins.weights.buffers.received_slot import ReceivedSlot
from rl_memory_plugins.weights.buffers.streamed import extent
from rl_memory_plugins.weights.communicators import ENGINE, JOIN_SHARE, SEAL_BYTES, Communicator, join
from rl_memory_plugins.weights.communicators.kept import KeptCommunicators
from rl_memory_plugins.weights.manifest import BucketEntry
from rl_memory_plugins.weights.wire import Bucket, Connection


def communicated(
    description: dict[str, Any], connection: Connection, kept: KeptCommunicators, timeout_s: float, device: str
) -> CommunicatedAttached:
    """Open a buffer, with a kept communicator or a new one.

    Args:
        device: The name of this rank's device.

    Raises:
        UnsupportedError: the two ends cannot be joined, or the GPU has no memory for the slot.
        HostMemoryError: there is no memory for the slot.
        RLMemoryError: the trainer has given up, or is gone.
    """
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
        return CommunicatedAttached(description, communicator, kept, device)
    except BaseException:
        kept.drop(communicator)
        raise


class CommunicatedAttached:
    """See `attach`. One slot serves for all, because a bucket is loaded before the next one is received.

    Args:
        communicator: This end of the communicator. The buffer owns it.
        kept: Keeps the communicator after a complete update.
        device: The name of this rank's device.
    """

    reused = True
    keep = True

    def __init__(
        self, description: dict[str, Any], communicator: Communicator, kept: KeptCommunicators, device: str
    ) -> None:
        self._communicator = communicator
        self._kept = kept
        self.transport = communicator.transport
        self._slot_bytes = int(description["slot_bytes"])
        if self._slot_bytes < 1:
            raise WeightUpdateError("the trainer announced a slot without bytes")
        try:
            self._slot = ReceivedSlot(
                self._slot_bytes + SEAL_BYTES, device if communicator.transport == "nccl" else None
            )
        except DeviceMemoryError as error:
            raise UnsupportedError(str(error)) from None

    def receive(self, connection: Connection, bucket: Bucket, timeout_s: float) -> None:
        """Receive the bytes of a bucket, after its message.

        Raises:
            WeightUpdateError: the bucket is larger than the slot, or has other bytes than announced; or the trainer
                stalled or disconnected.
            RLMemoryError: the trainer's own error, if it gave up.
        """
        nbytes = extent(bucket.entries, self._slot_bytes)
        if len(bucket.seal) != SEAL_BYTES:
            raise WeightUpdateError("the trainer announced a bucket without a seal")
        try:
            self._communicator.receive(self._slot.memory, nbytes + SEAL_BYTES, connection, timeout_s)
        except TimeoutError:
            raise connection.stalled("did not send the bytes of a bucket", timeout_s) from None
        except OSError as error:
            problem = str(error)
        else:
            found = bytes(self._slot.memory[nbytes : nbytes + SEAL_BYTES].tolist())
            if found != bucket.seal:
                raise WeightUpdateError(f"the trainer announced a bucket of {nbytes} bytes, and sent another")
            return
        connection.raise_cause(f"sent no whole bucket: {problem}")

    def memory(self, slot: int, entry: BucketEntry) -> torch.Tensor:
        return self._slot.memory[: self._slot_bytes]

    def hold(self, connection: Connection) -> None:
        """See `DirectAttached.hold`."""
        self._slot.free()
        self._kept.keep(self._communicator, connection)

    def leave(self) -> None:
        """End the communicator, and with it a transfer that waits for the peer. `close` is still to be called."""
        self._kept.drop(self._communicator)

    def close(self) -> None:
        self.leave()  # first: freeing waits for a transfer on the GPU
        self._slot.free()
