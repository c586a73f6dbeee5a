"""TCP keepalive, by which one end of a connection notices that the host of the other end is gone.

A host that loses power, a cable that is pulled and a firewall that forgets a connection send no packet that ends it. An
end that waits without a limit would wait for ever. The probes also keep idle connections in the tables of firewalls.
"""

from __future__ import annotations

import socket

IDLE_S = 60
"""How long a connection is silent before the kernel asks the other end."""

INTERVAL_S = 15

PROBES = 4
"""As many questions may stay unanswered, `INTERVAL_S` apart. Then the connection ends: after two minutes in all."""


def socket_options() -> list[tuple[int, int, int]]:
    """The arguments of `setsockopt`."""
    return [
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_S),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, INTERVAL_S),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES),
    ]


def end_unacknowledged(sock: socket.socket) -> None:
    """Have the kernel end a probed connection also if the other host went before it acknowledged the last bytes.

    While they are not acknowledged nobody is probed, and the kernel sends them again for a quarter of an hour. Only for
    a connection that carries nothing any more: an end that does not read for minutes would count as gone too.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * (IDLE_S + INTERVAL_S * PROBES))


def keep_alive(sock: socket.socket) -> None:
    """Have the kernel end a TCP connection whose other end answers no more."""
    for option in socket_options():
        sock.setsockopt(*option)
