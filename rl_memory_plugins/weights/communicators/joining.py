"""The trainer's side of making a communicator with a rank."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from rl_memory_plugins.errors import UnsupportedError
from rl_memory_plugins.memory.threads import in_parallel
from rl_memory_plugins.weights import wire
from rl_memory_plugins.weights.communicators import JOIN_SHARE, TRAINER, join
from rl_memory_plugins.weights.communicators.kept import OF_TRAINER
from rl_memory_plugins.weights.communicators.over_nccl import new_unique_id

if TYPE_CHECKING:
    import torch

    from rl_memory_plugins.weights.connected_rank import ConnectedRank


def choose(rank: ConnectedRank, transport: str, device: torch.device) -> None:
    """Note what the rank is offered: the communicator of the former update, or a new one.

    A communicator of another GPU of this process is closed: it would not wait until this GPU has made the bytes.

    Args:
        device: The device of the trainer's slots.

    Raises:
        UnsupportedError: no communicator can be made.
    """
    for name in rank.held:
        communicator = OF_TRAINER.take(name, transport)
        if communicator is not None and communicator.device in (None, device):
            rank.communicator, rank.offered = communicator, {"communicator": name, "new": False}
            return
        if communicator is not None:
            OF_TRAINER.drop(communicator)
    rank.offered = {"kind": transport, "communicator": secrets.token_hex(8), "new": True}
    if transport == "nccl":
        rank.offered["unique_id"] = new_unique_id()


def join_all(
    ranks: Sequence[ConnectedRank], timeout_s: float, device: torch.device
) -> dict[ConnectedRank, wire.Unopened]:
    """Make the new communicators that ranks were offered, all at a time.

    Args:
        device: The device of the trainer's slots.

    Returns: the answers of ranks that have refused already. If this end fails alone, `require_joined` raises its error.

    Raises:
        RLMemoryError: a rank has failed, or is gone.
    """
    joining = [rank for rank in ranks if rank.offered.get("new")]
    refusals = in_parallel([partial(_join, rank, timeout_s, device) for rank in joining], "rl-memory-join")
    return {rank: refusal for rank, refusal in zip(joining, refusals, strict=True) if refusal is not None}


def _join(rank: ConnectedRank, timeout_s: float, device: torch.device) -> wire.Unopened | None:
    description, rank.offered = rank.offered, {}
    try:
        rank.communicator = join(description, rank.connection, TRAINER, timeout_s * JOIN_SHARE, device)
    except UnsupportedError as error:
        if error.details.get("declined"):
            return wire.Unopened(str(error))
        rank.unjoined = str(error)
    return None


def require_joined(rank: ConnectedRank) -> None:
    """Raise if this end has failed and the rank has not."""
    if rank.unjoined:
        raise UnsupportedError(rank.unjoined, device=rank.device)


def leave(rank: ConnectedRank) -> None:
    """Close the communicator with a rank that uses it no more."""
    communicator, rank.communicator = rank.communicator, None
    rank.offered, rank.unjoined = {}, ""
    if communicator is not None:
        OF_TRAINER.drop(communicator)
