"""What all senders do with the ranks that have connected."""

from __future__ import annotations

import threading
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from rl_memory_plugins.errors import RLMemoryError, WeightUpdateError
from rl_memory_plugins.memory.threads import in_parallel
from rl_memory_plugins.weights import wire
from rl_memory_plugins.weights.buffers.streamed import memory_of
from rl_memory_plugins.weights.communicators import joining

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from rl_memory_plugins.weights.communicators import Communicator
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
    reading = [rank for rank in ranks if rank.may_read]
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
        RLMemoryError: a rank does not take its bucket, has failed, or is gone.
    """
    streams = []
    for one in buckets:
        if one.rank.communicator is None:
            streams.append(one)
        else:
            _begin(one, one.rank.communicator, timeout_s)
    if len(streams) == 1:
        _stream(streams[0], timeout_s)
    elif streams:
        _Streams(streams, timeout_s).run()


def _begin(bucket: Outgoing, communicator: Communicator, timeout_s: float) -> None:
    connection = bucket.rank.connection
    connection.send(bucket.message, timeout_s)
    try:
        communicator.send(bucket.data, connection, timeout_s)
    except TimeoutError:
        raise connection.stalled("did not take the bytes of a bucket", timeout_s) from None
    except OSError as error:
        problem = str(error)
    else:
        return
    connection.raise_cause(f"took no bucket: {problem}")


def _stream(bucket: Outgoing, timeout_s: float, is_over: Callable[[], bool] = lambda: False) -> None:
    """`is_over`: asked once `Connection.cut` has an effect."""
    connection = bucket.rank.connection
    with connection.unbroken():  # what came between the message and its bytes would be read as bytes
        if not is_over():
            connection.send(bucket.message, timeout_s)
            connection.send_bytes(memory_of(bucket.data), timeout_s)


class _Streams:
    """Buckets that travel to several ranks at a time. If one fails, the others have a while to end: a rank that has its
    whole bucket can be told why the update fails.
    """

    def __init__(self, buckets: Sequence[Outgoing], timeout_s: float) -> None:
        self._buckets = buckets
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._running = 0
        self._errors: list[Exception] = []  # in the order of time
        self._is_over = False

    def run(self) -> None:
        """
        Raises:
            RLMemoryError: the first that says more than that a rank has stalled or is gone; else the first.
        """
        try:
            calls = [partial(self._send, one) for one in self._buckets]
            in_parallel(calls, "rl-memory-send", to_the_end=True, stop=self._stop)  # the caller frees the buffers
            if self._errors:
                raise min(self._errors, key=_is_vague)
        finally:
            self._errors.clear()  # breaks the reference cycles between the errors and this object

    def _send(self, bucket: Outgoing) -> None:
        with self._changed:
            self._running += 1
        try:
            _stream(bucket, self._timeout_s, lambda: self._is_over)
        except Exception as error:
            self._errors.append(error)
        with self._changed:
            self._running -= 1
            self._changed.notify_all()
            if self._errors and not self._is_over:
                self._changed.wait_for(lambda: not self._running, min(self._timeout_s, LONGEST_FAREWELL_S))
                self._stop()

    def _stop(self) -> None:
        self._is_over = True
        for one in self._buckets:
            one.rank.connection.cut()


def _is_vague(error: Exception) -> bool:
    return isinstance(error, WeightUpdateError) and error.details.get("reason") in ("lost", "stalled")


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
