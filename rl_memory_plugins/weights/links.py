"""What all senders do with the ranks that have connected."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from rl_memory_plugins.errors import RLMemoryError, WeightUpdateError
from rl_memory_plugins.memory.threads import in_parallel
from rl_memory_plugins.weights import wire
from rl_memory_plugins.weights.buffers.streamed import memory_of
from rl_memory_plugins.weights.communicators import joining

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from rl_memory_plugins.weights.connected_rank import ConnectedRank
    from rl_memory_plugins.weights.listener import Listener


LONGEST_FAREWELL_S = 10.0


def give_up(ranks: Sequence[ConnectedRank], error: RLMemoryError, timeout_s: float) -> None:
    """End a failed update. Returns when no rank uses memory of this process, or has had the time to let go of it."""
    for rank in ranks:
        rank.connection.fail(error)
    for rank in ranks:
        joining.leave(rank)  # before its buffer is freed, which waits for a transfer on the GPU
    # CUDA does not define what happens to memory that is freed while another process has it open. A rank closes it, and
    # then its connection.
    deadline = wire.Deadline(min(timeout_s, LONGEST_FAREWELL_S))
    reading = [rank for rank in ranks if rank.candidate_transports and rank.candidate_transports[0].startswith("cuda")]
    for rank in reading:
        rank.connection.finish()
    for rank in reading:
        with suppress(WeightUpdateError):
            rank.connection.await_end(deadline.remaining())


class Outgoing(NamedTuple):
    """A bucket for one rank: its message, and its bytes in a buffer."""

    rank: ConnectedRank
    message: wire.Bucket
    data: torch.Tensor


def send_buckets(buckets: Sequence[Outgoing], timeout_s: float) -> None:
    """Send buckets to ranks: over TCP to all at a time; over communicators, only begin to, in the given order.

    Raises:
        RLMemoryError: a rank does not take its bucket, has failed, or is gone. The others have got theirs, or not.
    """
    for one in buckets:
        if one.rank.communicator is not None:
            _send_bucket(one, timeout_s)
    calls = [partial(_send_bucket, one, timeout_s) for one in buckets if one.rank.communicator is None]
    if len(calls) == 1:
        calls[0]()
        return

    def stop() -> None:
        for one in buckets:
            one.rank.connection.cut()

    in_parallel(calls, "rl-memory-send", to_the_end=True, stop=stop)  # the caller frees the buffers


def _send_bucket(bucket: Outgoing, timeout_s: float) -> None:
    """The bytes follow right after the message: what comes between would be read as bytes."""
    rank, message, data = bucket
    with nullcontext() if rank.communicator is not None else rank.connection.unbroken():
        rank.connection.send(message, timeout_s)
        _send_bytes(rank, data, timeout_s)


def _send_bytes(rank: ConnectedRank, data: torch.Tensor, timeout_s: float) -> None:
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
