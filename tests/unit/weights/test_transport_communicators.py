"""Updates over a communicator: its life over several updates, and every way in which one end breaks off."""

import contextlib
import signal
import socket
import threading
import time
from types import SimpleNamespace

import dying
import pytest
import torch
from fake_gpu import gpu_rank
from test_network_update import Large, assert_next_update_right, offered, send, update
from test_update import NOTHING, counts, failing_loader, left_since
from toys import Rank, Receiving, ToyModel, checkpoint, loaded

from integration.waiting import wait_until
from rl_memory_plugins.errors import InvalidRequestError, RLMemoryError, UnsupportedError, WeightUpdateError
from rl_memory_plugins.tags import Content
from rl_memory_plugins.weights import wire
from rl_memory_plugins.weights.communicators import SEAL_BYTES, TRAINER, join, kept, over_gloo, over_nccl
from rl_memory_plugins.weights.manifest import BucketEntry, Manifest
from rl_memory_plugins.weights.routes import Routes
from rl_memory_plugins.weights.sender import WeightSender

GLOO = {"transport": "gloo"}


@pytest.fixture(autouse=True)
def none_kept():
    yield
    kept.close_communicators()
    assert kept.OF_TRAINER.names() == []


@pytest.fixture
def made(monkeypatch):
    """The ends of communicators that this process has made."""
    found, make = [], over_gloo.GlooCommunicator.__init__

    def noted(self, *arguments):
        make(self, *arguments)
        found.append(self)

    monkeypatch.setattr(over_gloo.GlooCommunicator, "__init__", noted)
    return found


@pytest.mark.parametrize("advertise", [None, "127.0.0.1", "::1"])
@pytest.mark.parametrize("bucket_bytes", [1, 256, 1 << 20])
def test_two_ranks_get_what_the_loader_would_give_them(made, bucket_bytes, advertise):
    ranks = [Rank(ToyModel(i, 2), i) for i in range(2)]
    for seed in (1, 2, 3):
        tensors = checkpoint(seed)
        report, threads = update(ranks, tensors, bucket_bytes=bucket_bytes, advertise=advertise, **GLOO)
        for i, (rank, thread) in enumerate(zip(ranks, threads, strict=True)):
            assert thread.error is None
            rank.model.assert_unchanged(loaded(tensors, i, 2))
            assert rank.manager.content is Content.VALID
            assert thread.report["transport"] == report["transport"] == "gloo"
        assert report["fallbacks"] == []
    assert len(made) == 4  # two for each rank, for all updates


def test_a_communicator_of_another_gpu_of_the_trainer_is_not_used(made):
    rank = Rank()
    update([rank], checkpoint(1), **GLOO)
    for end in made:
        end.device = torch.device("cuda", 1)
    former = kept.OF_TRAINER.names()
    update([rank], checkpoint(2), **GLOO)
    rank.model.assert_unchanged(loaded(checkpoint(2)))
    assert len(made) == 4 and kept.OF_TRAINER.names() != former
    wait_until(lambda: rank.receiver._communicators.names() == kept.OF_TRAINER.names(), "the engine has closed it")


def test_both_ends_free_a_communicator_when_the_trainer_says_so(made):
    rank = Rank()
    for number in range(3):
        update([rank], checkpoint(), **GLOO)
        assert len(rank.receiver._communicators.names()) == 1
        kept.close_communicators()
        wait_until(lambda: rank.receiver._communicators.names() == [], "the engine has closed it")
        assert len(made) == 2 * (number + 1)


def test_the_end_of_an_engine_frees_the_trainers_end(made):
    rank = Rank()
    update([rank], checkpoint(), **GLOO)
    rank.receiver.close()
    wait_until(lambda: kept.OF_TRAINER.names() == [], "the trainer has closed it")
    assert_next_update_right(rank, **GLOO)
    assert len(made) == 4


def test_a_rank_keeps_the_latest_and_closes_both_ends_of_the_others():
    closed, ends = [], []
    own = kept.KeptCommunicators(2)
    for name in "abc":
        end, peer = socket.socketpair()
        ends.append(peer)
        communicator = SimpleNamespace(
            name=name, transport="gloo", settle=lambda: None, close=lambda name=name: closed.append(name)
        )
        own.keep(communicator, wire.Connection(end, "a trainer"))
    assert own.names() == ["b", "c"] and closed == ["a"]
    ends[0].settimeout(10)
    assert ends[0].recv(1) == b""
    own.close()
    assert sorted(closed) == ["a", "b", "c"]
    for peer in ends:
        peer.close()


def test_an_update_that_fails_breaks_the_communicator_and_the_next_makes_one(made):
    rank = Rank()
    update([rank], checkpoint(), **GLOO)
    rank.loader.load_opaque = failing_loader
    outcome, (thread,) = update([rank], checkpoint(), **GLOO)
    assert "cannot pack packed.weight" in str(outcome) and "cannot pack" in str(thread.error)
    assert rank.manager.content is Content.FAILED
    assert rank.receiver._communicators.names() == kept.OF_TRAINER.names() == []
    rank.loader.load_opaque = rank.model.load_weights
    assert_next_update_right(rank, **GLOO)
    assert len(made) == 4


def test_an_update_by_another_transport_leaves_the_communicator_for_the_next(made):
    rank = Rank()
    for transport in ("gloo", "shm", "tcp", "gloo"):
        assert_next_update_right(rank, transport=transport)
    assert len(made) == 2


def test_a_communicator_that_the_rank_has_lost_is_no_longer_used(monkeypatch):
    rank = Rank()
    update([rank], checkpoint(), **GLOO)
    monkeypatch.setattr(rank.receiver._communicators, "take", lambda *_: None)
    outcome, (thread,) = update([rank], checkpoint(), **GLOO)
    assert isinstance(outcome, UnsupportedError) and "is broken" in str(outcome)
    assert rank.manager.content is Content.VALID
    monkeypatch.undo()
    assert_next_update_right(rank, **GLOO)


def test_a_source_that_fails_in_the_middle_says_why():
    class Failing:
        def specs(self):
            return dying.as_source(checkpoint()).specs()

        def tensors(self):
            yield from list(dying.as_source(checkpoint()).tensors())[:4]
            raise RuntimeError("the gather failed")

    rank = Rank()
    for _ in range(2):
        outcome, (thread,) = update([rank], Failing(), **GLOO)
        assert "the gather failed" in str(outcome) and "the gather failed" in str(thread.error)
        assert rank.manager.content is Content.FAILED
        assert_next_update_right(rank, **GLOO)


def test_ranks_learn_at_once_that_a_source_has_failed_while_large_buckets_travel():
    """Gloo itself sometimes notices it only at its timeout."""
    source = dying.as_source({name: torch.ones(4 << 20) for name in "abcd"})

    class Failing:
        specs = source.specs

        def tensors(self):
            yield from list(source.tensors())[:3]
            raise RuntimeError("the gather failed")

    ranks = [Rank(Large(), number) for number in range(2)]
    for _ in range(8):
        outcome, threads = update(ranks, Failing(), bucket_bytes=8 << 20, timeout_s=30.0, **GLOO)
        assert "the gather failed" in str(outcome)
        assert ["the gather failed" in str(thread.error) for thread in threads] == [True, True]


def test_without_gloo_an_update_says_so(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: False)
    rank = Rank()
    outcome, (thread,) = update([rank], checkpoint(), **GLOO)
    assert isinstance(outcome, UnsupportedError) and "built without Gloo" in str(outcome)
    assert rank.manager.content is Content.VALID


def test_nccl_is_refused_where_there_is_no_gpu():
    outcome, _ = update([gpu_rank()], checkpoint(), transport="nccl")
    assert isinstance(outcome, UnsupportedError) and "uses no GPU" in str(outcome)


class FakeNccl:
    """NCCL's library, as far as it tells its version."""

    def ncclGetVersion(self, found):
        found._obj.value = 23007


@pytest.fixture
def nccl(monkeypatch):
    monkeypatch.setattr(over_nccl, "_nccl", FakeNccl)
    for name in over_nccl._ALIKE:
        monkeypatch.delenv(name, raising=False)
    return over_nccl.settings()


def test_two_ends_with_the_same_nccl_may_be_joined(nccl, monkeypatch):
    over_nccl.require(nccl)
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "1")  # the default
    over_nccl.require(nccl)
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "-2")  # NCCL decides
    over_nccl.require(nccl)


@pytest.mark.parametrize(
    ("theirs", "told"),
    [
        ({"version": "22907"}, "NCCL's version is 22907 in the engine, and 23007 in the trainer"),
        ({"NCCL_CUMEM_ENABLE": "0"}, "NCCL_CUMEM_ENABLE is 0 in the engine, and 1 in the trainer"),
        ({"NCCL_NET": "Socket"}, "NCCL_NET is Socket in the engine, and not set in the trainer"),
    ],
)
def test_two_ends_that_nccl_would_not_join_alike_are_refused_before_they_try(nccl, theirs, told):
    with pytest.raises(UnsupportedError, match=told):
        over_nccl.require(nccl | theirs)


def test_a_rank_without_nccl_is_refused(nccl, monkeypatch):
    with pytest.raises(UnsupportedError, match="the rank's process has no NCCL"):
        over_nccl.require({})


def test_a_process_without_nccl_has_no_settings():
    assert torch.version.cuda or over_nccl.settings() == {}


def test_what_a_rank_tells_of_its_nccl_is_compared_before_it_is_offered_one(nccl, monkeypatch):
    routes = Routes(Manifest([], 1, 1, False), "nccl", [], keep_mapped=False, resident=None, stable=False)
    monkeypatch.setattr(routes, "_own_gpu", "GPU-0")
    routes.require_nccl(SimpleNamespace(device="GPU-z", nccl=nccl))
    with pytest.raises(UnsupportedError, match="NCCL's version"):
        routes.require_nccl(SimpleNamespace(device="GPU-z", nccl={**nccl, "version": "22907"}))


def test_tls_and_a_communicator_exclude_each_other():
    with pytest.raises(InvalidRequestError, match="encrypts nothing"):
        WeightSender(1, tls=True, **GLOO)


def test_many_sessions_leave_nothing():
    rank, broken = Rank(), Rank(load_opaque=failing_loader)

    def session(number):
        target = broken if number % 5 == 4 else rank
        with WeightSender(1, bucket_bytes=256, timeout_s=10, **GLOO) as sender:
            thread = Receiving(target, sender)
            assert isinstance(send(sender, checkpoint(number)), Exception) == (target is broken)
            thread.join()
        if number % 3 == 0:
            kept.close_communicators()

    def settled():
        kept.close_communicators()
        wait_until(lambda: not any("communicator" in one.name for one in threading.enumerate()), "no thread is left")

    for number in range(5):
        session(number)
    settled()
    before = counts()
    for number in range(15):
        session(number)
    settled()
    assert left_since(before) == NOTHING


# Ends


def receiving(rank, pipe, timeout_s):
    endpoints, token = pipe.recv()
    return Receiving(rank, SimpleNamespace(endpoints=endpoints, token=token), timeout_s=timeout_s)


KILLED, STOPPED = signal.SIGKILL, signal.SIGSTOP
NEW, KEPT = 0, 1  # the whole updates before

OF_TRAINER = [
    *[
        (message, when, number, NEW, KILLED)
        for message, number in (("Offer", 1), ("Meet", 1), ("Bucket", 1), ("Bucket", 3), ("Commit", 1))
        for when in ("before", "after")
    ],
    ("Offer", "after", 1, KEPT, KILLED),
    ("Bucket", "after", 3, KEPT, KILLED),
    ("Offer", "after", 1, NEW, STOPPED),
    ("Meet", "after", 1, NEW, STOPPED),
    ("Bucket", "after", 3, KEPT, STOPPED),
]


@pytest.mark.parametrize(("message", "when", "number", "whole", "how"), OF_TRAINER)
def test_a_trainer_that_ends_at_any_message_leaves_honest_weights(message, when, number, whole, how):
    stops = how is STOPPED
    timeout_s = 5.0 if stops else 20.0
    rank = Rank(ToyModel(opaque=False))
    with dying.process(dying.trainer, whole, (message, when, how, number), 20.0, GLOO) as pipe:
        for _ in range(whole):
            assert receiving(rank, pipe, 20.0).join().error is None
            pipe.send(None)
        former = rank.model.snapshot()
        start = time.monotonic()
        error = receiving(rank, pipe, timeout_s).join().error
        assert time.monotonic() - start < 15
    if (message, when) == ("Commit", "after"):
        assert error is None or error.details["reason"] == "lost"  # only its `Done` was lost
        rank.model.assert_unchanged(loaded(checkpoint(whole, opaque=False), opaque=False))
    else:
        assert isinstance(error, RLMemoryError)
        assert error.details.get("reason") == ("stalled" if stops else "lost") or message == "Meet", error
        begun = number > 1 or message == "Commit"
        assert rank.manager.content is (Content.FAILED if begun else Content.VALID)
        if rank.manager.content is Content.VALID:
            rank.model.assert_unchanged(former)
    wait_until(lambda: rank.receiver._communicators.names() == [], "the engine has closed what was the trainer's")
    assert_next_update_right(rank, **GLOO)


OF_ENGINE = [
    ("Hello", "before", NEW, KILLED),
    *[(message, when, NEW, KILLED) for message in ("Meet", "Accept", "Ack", "Done") for when in ("before", "after")],
    ("Hello", "after", KEPT, KILLED),
    ("Ack", "after", KEPT, KILLED),
    ("Meet", "after", NEW, STOPPED),
    ("Accept", "before", NEW, STOPPED),
    ("Ack", "before", KEPT, STOPPED),
]


@pytest.mark.parametrize(("message", "when", "whole", "how"), OF_ENGINE)
def test_an_engine_that_ends_at_any_message_is_named_in_time(message, when, whole, how):
    stops = how is STOPPED

    def update_of(pipe, timeout_s, is_due):
        with WeightSender(1, bucket_bytes=256, timeout_s=timeout_s, **GLOO) as sender:
            pipe.send((sender.endpoints, sender.token, 20.0, is_due))
            return send(sender, checkpoint(0, opaque=False))

    with dying.process(dying.engine, (message, when, how), ToyModel(opaque=False)) as pipe:
        for _ in range(whole):
            assert not isinstance(update_of(pipe, 20.0, False), Exception)
            assert pipe.recv() == ("None", True)
        start = time.monotonic()
        ends_s = 2.0 if stops or message == "Hello" else 20.0
        outcome = update_of(
            pipe, 9.0 if (message, how) == ("Accept", STOPPED) else ends_s, True
        )  # a third is for joining
        assert time.monotonic() - start < 18
        if (message, when) != ("Done", "after"):
            assert isinstance(outcome, RLMemoryError)
            expected = {"stalled"} if stops else {"lost", "stalled"} if message == "Hello" else {"lost"}
            assert outcome.details.get("reason") in expected or message == "Meet", outcome
    wait_until(lambda: kept.OF_TRAINER.names() == [], "the trainer has closed what was the engine's")
    with dying.process(dying.engine, ("", "", 0), ToyModel(opaque=False)) as pipe:
        assert not isinstance(update_of(pipe, 20.0, False), Exception)
        assert pipe.recv() == ("None", True)


# Lies


@contextlib.contextmanager
def joined(rank, *, timeout_s=30.0):
    """A trainer that follows the protocol up to the answer to its offer: its connection, communicator and thread."""
    description = {"kind": "gloo", "slot_bytes": 4096, "communicator": "lies", "new": True}
    with offered(rank, description, timeout_s=timeout_s) as (connection, thread):  # a third is for the joining
        communicator = join(description, connection, TRAINER, 5.0, torch.device("cpu"))
        try:
            yield connection, communicator, thread
        finally:
            communicator.close()


@pytest.mark.parametrize("slot_bytes", [1 << 62, 0, -4096, "many", None])
def test_a_slot_of_a_size_that_cannot_be_is_refused(slot_bytes):
    rank = Rank(ToyModel(opaque=False))
    description = {"kind": "gloo", "slot_bytes": slot_bytes, "communicator": "lies", "new": True}
    with offered(rank, description, timeout_s=30.0) as (connection, thread):
        with contextlib.suppress(RLMemoryError):  # the rank may have left already
            join(description, connection, TRAINER, 5.0, torch.device("cpu"))
        assert isinstance(thread.join().error, RLMemoryError)
        assert any(word in str(thread.error) for word in ("cannot allocate", "without bytes", "invalid"))
    assert rank.manager.content is Content.VALID
    assert_next_update_right(rank, **GLOO)


SEAL = b"s" * SEAL_BYTES


@pytest.mark.parametrize(
    ("entries", "seal", "sent", "message"),
    [
        ([(0, 0, 160)], SEAL, b"\xff" * 100, "sent another"),  # less than announced
        ([(0, 0, 160)], SEAL, b"\xff" * 100 + SEAL, "sent another"),
        ([(0, 0, 160)], SEAL, b"\xff" * 2000 + SEAL, "sent another"),  # more
        ([(0, 0, 160)], SEAL, b"", "stalled: it did not send the bytes of a bucket"),
        ([(0, 0, 160)], b"", b"\xff" * 160, "without a seal"),
        ([(0, 1 << 40, 160)], SEAL, b"", "slots have 4096 bytes"),
        ([(0, 4000, 160)], SEAL, b"", "slots have 4096 bytes"),
    ],
)
def test_a_trainer_that_lies_about_the_bytes_of_a_bucket_is_refused(entries, seal, sent, message):
    rank = Rank(ToyModel(opaque=False))
    former = rank.model.snapshot()
    with joined(rank, timeout_s=9.0) as (connection, communicator, thread):
        connection.receive(wire.Accept, timeout_s=5)
        connection.send(wire.Bucket(0, [BucketEntry(*entry) for entry in entries], seal), 5.0)
        if sent:
            with contextlib.suppress(OSError):  # the rank may have gone already
                communicator.send(torch.frombuffer(bytearray(sent), dtype=torch.uint8), connection, 5.0)
        error = thread.join().error
    assert isinstance(error, WeightUpdateError) and message in str(error)
    assert rank.manager.content is Content.VALID
    rank.model.assert_unchanged(former)
    assert_next_update_right(rank, **GLOO)
