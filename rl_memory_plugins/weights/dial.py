"""Connecting to a trainer."""

from __future__ import annotations

import math
import socket
from collections.abc import Sequence

from rl_memory_plugins import keepalive
from rl_memory_plugins.errors import PermissionDeniedError, RLMemoryError, WeightUpdateError
from rl_memory_plugins.weights import addresses, tls, wire
from rl_memory_plugins.weights.update_hosts import UpdateHosts

REACH_S = 5.0
"""How long an address may leave a connection unanswered if others are left. The kernel asks three times by then."""


def dial(places: Sequence[str], hosts: UpdateHosts | None, timeout_s: float, *, local: bool = True) -> socket.socket:
    """Connect to the first of the places that answers.

    Args:
        places: Places as in `addresses.Endpoints`, at least one.
        hosts: The hosts that may be connected to; `None` for all.
        timeout_s: The time for all attempts, in seconds. An attempt leaves the later ones their shares, and
            an address that does not answer at all leaves them more: an engine may wait longer than the trainer does.
        local: Whether a place may be a path. A trainer over TCP must not choose sockets of this host.

    Raises:
        PermissionDeniedError: a place is not allowed, and no other one answers.
        WeightUpdateError: no place answers, or the certificate of one is not the trainer's.
    """
    deadline = wire.Deadline(timeout_s)
    problems: list[str] = []
    refused: PermissionDeniedError | None = None
    for number, place in enumerate(places):
        if not local and addresses.parse(place) is None:
            problems.append(f"{place}: a path, which only a trainer on this host may name")
            continue
        try:
            left = len(places) - number
            return _connect(place, hosts, deadline.remaining() / left, REACH_S if left > 1 else math.inf)
        except PermissionDeniedError as error:
            refused = error
        except (OSError, UnicodeError, ValueError) as error:  # `ValueError`: a path with a null character
            problems.append(f"{place}: {error}")
    if refused is not None:
        try:
            raise refused
        finally:
            del refused  # breaks the reference cycle between the error and this frame
    remedy = "" if any(map(addresses.parse, places)) else "; for an engine on another host the trainer needs advertise="
    raise WeightUpdateError(
        f"cannot connect to the trainer's socket {'; '.join(problems)}{remedy}",
        reason="unreachable",
        endpoint=places[0],
        endpoints=list(places),
    )


def _connect(place: str, hosts: UpdateHosts | None, timeout_s: float, reach_s: float) -> socket.socket:
    timeout_s = max(timeout_s, 0.001)  # 0 would mean not to wait
    address = addresses.parse(place)
    if address is not None and hosts is not None:
        hosts.require(address.host)
    if address is None:
        family, target = socket.AF_UNIX, place
    else:
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        target = (address.host, address.port)  # type: ignore[assignment]
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.settimeout(min(timeout_s, reach_s))
        sock.connect(target)
        sock.settimeout(timeout_s)
        if address is None:
            return sock
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keepalive.keep_alive(sock)
        return sock if address.fingerprint is None else tls.connect(sock, address.fingerprint)
    except (OSError, RLMemoryError, UnicodeError, ValueError):
        sock.close()
        raise
