"""Communicators: each joins a trainer's process and one rank of an engine, and carries the bytes of buckets.

Messages stay on the connection of the update. Neither end writes a byte into live weights before a bucket has arrived
whole, and a communicator that breaks ends the update on both sides. A new one is made then.

- `gloo` (`over_gloo.py`): between hosts' memories, by torch.
- `nccl` (`over_nccl.py`): between GPUs, by NCCL itself. torch's process group is not used: its watchdog ends the
  process when the other end has died, and an engine must outlive its trainer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from rl_memory_plugins.errors import UnsupportedError
from rl_memory_plugins.weights.wire import Connection

if TYPE_CHECKING:
    import torch

COMMUNICATORS = ("nccl", "gloo")
"""The transports that need a communicator."""

TRAINER, ENGINE = 0, 1

JOIN_SHARE = 1 / 3
"""The share of the timeout in which two ends must be joined: the rest is for an answer that says why they are not."""

SEAL_BYTES = 16
"""A transfer ends with so many bytes, which its message names. A transfer of another size than announced lacks them."""


class Communicator(Protocol):
    """One end of a communicator.

    Attributes:
        name: The name that both ends know it by.
        transport: One of `COMMUNICATORS`.
    """

    name: str
    transport: str

    @property
    def device(self) -> torch.device | None:
        """The GPU whose memory this end sends and fills; `None` for host memory."""

    def send(self, data: torch.Tensor, connection: Connection, timeout_s: float) -> None:
        """Begin to send bytes, which must not change before the peer has acknowledged them.

        On a GPU the current stream may still write them: they are sent after what it has been given so far.

        Args:
            connection: That of the update. Its end also ends a wait.

        Raises:
            OSError: the communicator is broken. A `TimeoutError`: the peer does not take part within `timeout_s`.
        """

    def begin_receive(self, slot: torch.Tensor, nbytes: int, connection: Connection, timeout_s: float) -> None:
        """Begin to fill the first `nbytes` bytes of a slot. Each transfer ends with one `await_received`, in order.

        Args:
            connection: See `send`.

        Raises:
            OSError: the communicator is broken. A `TimeoutError`: the former call did not end within `timeout_s`.
        """

    def await_received(
        self, connection: Connection, timeout_s: float, meanwhile: Callable[[], None] = lambda: None
    ) -> None:
        """Wait until the bytes of the first transfer that has begun have arrived.

        Args:
            connection: See `send`.
            meanwhile: Is called again and again while they travel. It may begin the next transfer.

        Raises:
            OSError: the communicator is broken. A `TimeoutError`: the bytes did not arrive within `timeout_s`.
        """

    def settle(self) -> None:
        """Let go of what was sent: the peer has acknowledged all of it."""

    def close(self) -> None:
        """End it, also in the middle of a transfer. May be called more than once."""


def join(
    description: dict[str, Any], connection: Connection, end: int, timeout_s: float, device: torch.device
) -> Communicator:
    """Make a communicator. Both ends call it at the same time.

    Args:
        description: Of the buffer that the trainer offers.
        end: `TRAINER` or `ENGINE`.
        device: The device of the slots at this end.

    Raises:
        UnsupportedError: the ends cannot be joined within `timeout_s`.
        RLMemoryError: the peer has given up, or is gone.
    """
    if description["kind"] == "gloo":
        from rl_memory_plugins.weights.communicators.over_gloo import GlooCommunicator

        return GlooCommunicator(str(description["communicator"]), connection, end, timeout_s)
    if description["kind"] == "nccl":
        from rl_memory_plugins.weights.communicators.over_nccl import NcclCommunicator

        unique_id = bytes(description["unique_id"])
        return NcclCommunicator(str(description["communicator"]), unique_id, connection, end, timeout_s, device)
    raise UnsupportedError(f"there is no communicator for {description['kind']}")
