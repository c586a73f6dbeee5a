"""Ports of servers on one machine, reserved before the servers listen."""

from __future__ import annotations

import os
import socket

BLOCK = 250  # SGLang listens on ports up to 240 above its server's
FIRST, LAST = 10_000, 22_000  # below the ports that Linux hands out, and SGLang's own choices from 22000


def reserve_port() -> tuple[socket.socket, int]:
    """A port for a server, and the reservation of the block of ports above it, to be closed after the server ended.

    A port that is merely found free can be taken by another process before the server listens, which takes some
    20 seconds. Here a socket is bound to the block's first port for as long as the block is reserved; the server's
    port is the next one. The reservation also ends with this process.

    Raises:
        OSError: every block is reserved.
    """
    blocks = range(FIRST, LAST - BLOCK + 1, BLOCK)
    start = os.getpid() % len(blocks)  # processes seldom try for the same block
    for number in range(len(blocks)):
        first = blocks[(start + number) % len(blocks)]
        reservation = socket.socket()
        try:
            reservation.bind(("0.0.0.0", first))
            with socket.socket() as probe:  # not one of ours may listen there
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: closed connections linger
                probe.bind(("0.0.0.0", first + 1))
        except OSError:
            reservation.close()
            continue
        return reservation, first + 1
    raise OSError(f"every block of {BLOCK} ports from {FIRST} to {LAST} is reserved")
