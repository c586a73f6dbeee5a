"""Leases on memory that other processes have open; `test_transports.py` has them in whole updates."""

import socket

import pytest

from rl_memory_plugins.errors import WeightUpdateError
from rl_memory_plugins.weights import open_allocations
from rl_memory_plugins.weights.wire import Connection


def test_what_was_not_given_back_in_time_is_waited_for_by_the_next_call_too():
    pairs = [socket.socketpair() for _ in range(3)]
    for number, (own, _) in enumerate(pairs):
        open_allocations.hold_lease(str(number), Connection(own, f"rank {number}"))
    engines = [theirs for _, theirs in pairs]
    engines[0].close()
    for _ in range(2):
        with pytest.raises(WeightUpdateError, match="rank 1 stalled"):
            open_allocations.release_mapped(0.01)
    assert [engine.recv(1) for engine in engines[1:]] == [b"", b""]  # all have been asked
    for engine in engines[1:]:
        engine.close()
    open_allocations.release_mapped(10)
    assert open_allocations._leases == {} and all(own.fileno() == -1 for own, _ in pairs)
