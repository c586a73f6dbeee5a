"""What all senders do with the ranks that have connected."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_memory_plugins.errors import WeightUpdateError
from rl_memory_plugins.weights import wire
from rl_memory_plugins.weights.buffers.streamed import memory_of

if TYPE_CHECKING:
    import torch

    from rl_memory_plugins.weights.connected_rank import ConnectedRank
    from rl_memory_plugins.weights.listener import Listener


def send_bytes(rank: ConnectedRank, data: torch.Tensor, timeout_s: float) -> None:
    """Send the bytes of a bucket, after its message. Over a communicator, only begin to.

    Raises:
        RLMemoryError: the rank does not take them, has failed, or is gone.
    """
    if rank.communicator is None:
        rank.connection.send_bytes(memory_of(data), timeout_s)
        return
    try:
        rank.communicator.send(data, rank.connection, timeout_s)
    except TimeoutError:
        raise rank.connection.stalled("did not take the bytes of a bucket", timeout_s) from None
    except OSError as error:
        problem = str(error)
    else:
        return
    rank.connection.raise_cause(f"took no bucket: {problem}")


def await_slot(listener: Listener, slot: int) -> None:
    """Wait until all ranks have acknowledged a slot.

    Raises:
        RLMemoryError: a rank does not, has failed, or is gone.
    """
    while True:
        holding = [rank for rank in listener.ranks if slot in rank.unacknowledged]
        if not holding:
            return
        for rank, ack in listener.gather(holding, wire.Ack):
            if ack.slot not in rank.unacknowledged:
                raise WeightUpdateError(f"{rank.connection.peer} acknowledged slot {ack.slot}, which it did not hold")
            rank.unacknowledged.remove(ack.slot)
