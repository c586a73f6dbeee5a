"""Updates of a process that cannot start more threads, as where a container limits them."""

import contextlib
import itertools
import socket
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from helpers import refuse_threads
from test_network_update import update
from toys import Rank, ToyModel, checkpoint, loaded

from rl_memory_plugins.errors import RLMemoryError
from rl_memory_plugins.tags import Content
from rl_memory_plugins.weights import wire
from rl_memory_plugins.weights.communicators import kept
from rl_memory_plugins.weights.host_copy import HostCopier
from rl_memory_plugins.weights.open_allocations import Mappings


@pytest.fixture
def refuse(monkeypatch):
    """See `refuse_threads`."""
    yield partial(refuse_threads, monkeypatch)
    monkeypatch.undo()
    kept.close_communicators()


@pytest.mark.parametrize("transport", ["tcp", "gloo"])  # those of one host start none for few bytes
@pytest.mark.parametrize("once", [True, False])
def test_an_update_is_right_or_fails_with_a_typed_error(refuse, monkeypatch, transport, once):
    ranks = [Rank(ToyModel(i, 2, opaque=False), i) for i in range(2)]
    for number in itertools.count():
        refused = refuse(number, number + 1 if once else None)
        tensors = checkpoint(number, opaque=False)
        outcome, threads = update(ranks, tensors, transport=transport, bucket_bytes=1 << 20, timeout_s=3.0)
        monkeypatch.undo()
        if not refused:
            break
        for i, (rank, thread) in enumerate(zip(ranks, threads, strict=True)):
            if thread.error is None:
                assert rank.manager.content is Content.VALID
                rank.model.assert_unchanged(loaded(tensors, i, 2, opaque=False))
        assert isinstance(outcome, RLMemoryError) or [thread.error for thread in threads] == [None, None], refused
        outcome, threads = update(ranks, tensors, transport=transport)
        assert [thread.error for thread in threads] == [None, None], (refused, outcome)
    assert number


@pytest.mark.parametrize("allowed", range(4))
def test_large_copies_need_no_thread(refuse, allowed):
    sources = [torch.full((1 << 20,), number, dtype=torch.uint8) for number in range(8)]
    targets = [torch.zeros_like(source) for source in sources]
    refuse(allowed)
    with contextlib.closing(HostCopier(threads=4)) as copier:
        for copies in (zip(targets, sources, strict=True), zip(targets, reversed(sources), strict=True)):
            for target, source in copies:
                copier.add(target, source)
            copier.run()
    assert [int(target[-1]) for target in targets] == list(reversed(range(8)))


def test_what_would_be_kept_is_closed_where_nothing_can_watch_it(refuse):
    own, peer = socket.socketpair()
    closed = []
    communicator = SimpleNamespace(
        name="one", transport="gloo", settle=lambda: None, close=lambda: closed.append("communicator")
    )
    refuse(0)
    communicators = kept.KeptCommunicators()
    communicators.keep(communicator, wire.Connection(own, "a trainer"))
    assert communicators.names() == [] and closed == ["communicator"]
    peer.settimeout(10)
    assert peer.recv(1) == b""
    peer.close()


def test_allocations_that_nothing_can_watch_are_closed(refuse):
    own, peer = socket.socketpair()
    refuse(0)
    Mappings().keep(wire.Connection(own, "a trainer"))
    peer.settimeout(10)
    assert peer.recv(1) == b""  # tells the trainer that its memory is open here no more
    peer.close()


def test_an_engine_starts_without_what_only_warms_up(refuse):
    refused = refuse(0)
    Rank().receiver.warm_up()
    assert refused == ["rl-memory-warm-up"]
