"""Which process of a trainer sends to which rank of which engine."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Sequence
from typing import NamedTuple

from rl_memory_plugins.errors import RLMemoryError
from rl_memory_plugins.trainer.gpu import own_gpu
from rl_memory_plugins.weights import wire
from rl_memory_plugins.weights.addresses import places_of
from rl_memory_plugins.weights.dial import dial


class Site(NamedTuple):
    """A trainer process."""

    token: str  # a proposal; all processes use the token of the first
    gpu: str | None  # the UUID
    engines: list[list[str]]  # the device names of each engine that the process controls


def this_site(engines: list[list[str]]) -> Site:
    """This process. `engines` as for `Site`."""
    return Site(secrets.token_urlsafe(32), own_gpu(), engines)


def server_of(device: str, controller: int, sites: Sequence[Site]) -> int:
    """The rank of the trainer process that sends to `device`: the first on that GPU, else `controller`."""
    return next((rank for rank, site in enumerate(sites) if site.gpu == device), controller)


def fail_senders(endpoints: Sequence[tuple[str, str | list[str]]], token: str, error: RLMemoryError) -> None:
    """Report a failed request to the senders of these devices and sockets, because no rank of the engine will connect.

    A sender refuses the report if the rank has connected.
    """
    for device, places in endpoints:
        with (
            contextlib.suppress(RLMemoryError),
            contextlib.closing(wire.Connection(dial(places_of(places), None, 1.0), "the trainer")) as connection,
        ):
            connection.send(wire.Hello(wire.PROTOCOL, device, token, rank=-1), 1.0)
            connection.fail(error)
