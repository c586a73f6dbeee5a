"""A rank of an engine, as its trainer knows it during one update."""

from __future__ import annotations

from typing import Any

from rl_memory_plugins.weights import wire
from rl_memory_plugins.weights.communicators import Communicator


class ConnectedRank:
    """A rank whose `Hello` was accepted, and the slots that it has not acknowledged.

    Attributes:
        may_read: Whether the rank may have GPU memory of this process open. It closes its connection once it has let
            go of it.
    """

    def __init__(self, connection: wire.Connection, hello: wire.Hello) -> None:
        self.connection = connection
        self.rank = hello.rank
        self.device = hello.device
        self.number = hello.number
        self.unacknowledged: list[int] = []
        self.candidate_transports: list[str] = []  # the remaining ones, best first
        self.refused: list[dict[str, str]] = []
        self.held = hello.held  # the names of the communicators that the rank has kept
        self.nccl = hello.nccl  # see `over_nccl.settings`
        self.communicator: Communicator | None = None
        self.offered: dict[str, Any] = {}  # of its communicator, for the description of the buffer
        self.may_read = False
        self.unjoined = ""  # why this end could not make it
        connection.peer = f"rank {hello.rank} on {hello.device}"
        connection.details = {"rank": hello.rank, "device": hello.device}
