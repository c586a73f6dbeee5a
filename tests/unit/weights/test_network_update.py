"""Whole updates over TCP, with TLS and without, and every way in which a network or a stranger breaks one off."""

import contextlib
import re
import select
import socket
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from helpers import interrupts, no_collection
from links import Link, through
from test_update import NOTHING, counts, failing_loader, left_since
from toys import Rank, Receiving, ToyModel, Tracked, checkpoint, loaded

from integration.waiting import wait_until
from rl_memory_plugins.errors import (
    AuthenticationError,
    HostMemoryError,
    InvalidRequestError,
    PermissionDeniedError,
    RLMemoryError,
    UnsupportedError,
    WeightUpdateError,
)
from rl_memory_plugins.tags import Content
from rl_memory_plugins.trainer import ModelSource, push_weights
from rl_memory_plugins.trainer.sources.model import as_source
from rl_memory_plugins.trainer.update import require_options
from rl_memory_plugins.weights import addresses, dial, greeter, tls, wire
from rl_memory_plugins.weights import links as links_of_sender
from rl_memory_plugins.weights.buffers import StreamedAttached, StreamedStaging
from rl_memory_plugins.weights.buffers.streamed import memory_of
from rl_memory_plugins.weights.listener import Listener
from rl_memory_plugins.weights.manifest import BucketEntry, Manifest
from rl_memory_plugins.weights.sender import WeightSender


@pytest.fixture(params=["plain", "own certificate", "files"])
def security(request):
    """Options of a sender for TCP."""
    if request.param == "files":
        return {"transport": "tcp", "tls": request.getfixturevalue("certificate_files")}
    return {"transport": "tcp", "tls": request.param != "plain"}


def send(sender, source):
    """The sender's report or error."""
    try:
        return sender.send(as_source(source))
    except RLMemoryError as error:
        return error


def update(ranks, source, *, timeout_s=30.0, **options):
    """The sender's report or error, and the receivers' threads, which have ended."""
    options.setdefault("bucket_bytes", 256)
    with WeightSender(len(ranks), timeout_s=timeout_s, **options) as sender:
        threads = [Receiving(rank, sender, timeout_s=timeout_s) for rank in ranks]
        return send(sender, source), [thread.join() for thread in threads]


def assert_next_update_right(rank, **options):
    tensors = checkpoint(11, opaque=hasattr(rank.model, "packed"))
    report, (thread,) = update([rank], tensors, **options)
    assert thread.error is None, report
    rank.model.assert_unchanged(loaded(tensors, opaque=hasattr(rank.model, "packed")))
    assert rank.manager.content is Content.VALID


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1"])
@pytest.mark.parametrize("bucket_bytes", [1, 256, 1 << 20])
def test_two_ranks_get_what_the_loader_would_give_them(security, host, bucket_bytes):
    ranks = [Rank(ToyModel(i, 2), i) for i in range(2)]
    for seed in (1, 2):
        tensors = checkpoint(seed)
        report, threads = update(ranks, tensors, bucket_bytes=bucket_bytes, advertise=host, **security)
        for i, (rank, thread) in enumerate(zip(ranks, threads, strict=True)):
            assert thread.error is None
            rank.model.assert_unchanged(loaded(tensors, i, 2))
            assert rank.manager.content is Content.VALID
            assert thread.report["transport"] == report["transport"] == "tcp"
        assert report["bytes"] == sum(tensor.nbytes for tensor in tensors.values())
        assert report["fallbacks"] == []


def test_tensors_larger_than_one_part_arrive(security, monkeypatch):
    monkeypatch.setattr(wire, "PART_BYTES", 7)
    rank = Rank()
    tensors = checkpoint(3)
    _, (thread,) = update([rank], tensors, bucket_bytes=1 << 20, **security)
    assert thread.error is None
    rank.model.assert_unchanged(loaded(tensors))


def test_a_receiver_on_the_trainers_host_takes_the_unix_socket_and_others_take_tcp():
    ranks = [Rank(ToyModel(i, 2), i) for i in range(2)]
    tensors = checkpoint()
    with WeightSender(2, timeout_s=10, advertise=["127.0.0.1", "::1"], tls=True) as sender:
        path, *remote = sender.endpoints["*"]
        elsewhere = ["/on/another/host.sock", "tcp://127.0.0.1:1", *remote]
        threads = [Receiving(ranks[0], sender), Receiving(ranks[1], through(sender, elsewhere))]
        report = send(sender, tensors)
    for i, thread in enumerate(threads):
        assert thread.join().error is None
        ranks[i].model.assert_unchanged(loaded(tensors, i, 2))
    assert [thread.report["transport"] for thread in threads] == ["shm", "tcp"]
    assert report["transport"] == "tcp"


def test_no_place_that_answers_is_named_with_all_of_them():
    with pytest.raises(WeightUpdateError, match="cannot connect") as error:
        dial.dial(["/none.sock", "tcp://127.0.0.1:1", "tcp://[::1]:1"], None, 5.0)
    assert error.value.details["reason"] == "unreachable"
    assert error.value.details["endpoints"] == ["/none.sock", "tcp://127.0.0.1:1", "tcp://[::1]:1"]
    assert "refused" in str(error.value) and "advertise" not in str(error.value)
    with pytest.raises(WeightUpdateError, match="needs advertise="):
        dial.dial(["/none.sock"], None, 5.0)


def test_an_address_that_does_not_answer_leaves_time_for_the_next():
    with contextlib.ExitStack() as open_ones:
        full = open_ones.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        address = full.getsockname()
        for _ in range(2):  # the queue is full then, and a connection attempt gets no answer
            waiting = open_ones.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(address)
        answering = open_ones.enter_context(socket.create_server(("127.0.0.1", 0)))
        places = [f"tcp://127.0.0.1:{one.getsockname()[1]}" for one in (full, answering)]
        start = time.monotonic()
        sock = open_ones.enter_context(dial.dial(places, None, 10.0))
        assert 4.9 < time.monotonic() - start < 9.9
        assert sock.getpeername() == answering.getsockname()


def test_hosts_that_the_engine_does_not_allow_are_not_connected_to(monkeypatch):
    tried = []
    monkeypatch.setattr(socket.socket, "connect", lambda sock, target: tried.append(target))
    rank = Rank()
    before = rank.model.snapshot()
    with pytest.raises(PermissionDeniedError, match="update_hosts=192.0.2.77") as error:
        rank.receiver.receive({"*": ["tcp://192.0.2.77:22", "tcp://192.0.2.77:80"]}, "token", 5.0)
    assert tried == [] and error.value.details["rank"] == 0
    rank.model.assert_unchanged(before)
    assert rank.manager.content is Content.VALID


def test_a_place_that_is_not_allowed_does_not_keep_a_receiver_from_one_that_is():
    rank, tensors = Rank(), checkpoint()
    with WeightSender(1, timeout_s=10, transport="tcp") as sender:
        thread = Receiving(rank, through(sender, ["tcp://192.0.2.77:5000", sender.endpoints["*"]]))
        send(sender, tensors)
    assert thread.join().error is None
    rank.model.assert_unchanged(loaded(tensors))


@pytest.mark.parametrize("transport", ["cuda_direct", "shm_pinned", "shm"])
def test_what_needs_a_unix_socket_is_refused_over_tcp(transport):
    rank = Rank()
    with WeightSender(1, timeout_s=10, transport=transport, advertise="127.0.0.1") as sender:
        thread = Receiving(rank, through(sender, sender.endpoints["*"][1]))
        error = send(sender, checkpoint())
    assert isinstance(error, UnsupportedError) and "connected over TCP" in str(error)
    assert isinstance(thread.join().error, UnsupportedError)
    assert rank.manager.content is Content.VALID


# Strangers


def connection_to(sender, security):
    sock = dial.dial([sender.endpoints["*"]], None, 5.0)
    return wire.Connection(sock, "the trainer")


def test_strangers_are_turned_away_and_hold_nobody_up(security, monkeypatch):
    monkeypatch.setattr(greeter, "MAX_STRANGERS", 11)
    monkeypatch.setattr(greeter, "HELLO_S", 60.0)
    rank, tensors = Rank(), checkpoint()
    with contextlib.ExitStack() as strangers, WeightSender(1, timeout_s=30, **security) as sender:
        target = addresses.parse(sender.endpoints["*"])[:2]

        def raw(sent=b""):
            sock = strangers.enter_context(socket.create_connection(target))
            sock.sendall(sent)
            return sock

        silent = [raw() for _ in range(8)]
        raw(b"\x00\x00")
        raw(b"GET / HTTP/1.1\r\n\r\n")
        guessing = Receiving(Rank(), sender, token="guessed")
        outcome = {}
        sending = threading.Thread(target=lambda: outcome.update(sender.send(ModelSource(tensors))))
        sending.start()
        assert isinstance(guessing.join().error, AuthenticationError)
        assert guessing.rank.manager.content is Content.VALID
        start = time.monotonic()
        welcome = Receiving(rank, sender).join()
        sending.join(20)
        assert welcome.error is None and outcome["tensors"] == len(tensors)
        assert time.monotonic() - start < greeter.HELLO_S - 1  # nobody waited for the silent ones
        for sock in silent:  # the end of the update ends them
            sock.settimeout(5)
            assert sock.recv(1) == b""


def test_silent_strangers_lock_no_rank_out(monkeypatch, security):
    monkeypatch.setattr(greeter, "MAX_STRANGERS", 2)
    monkeypatch.setattr(greeter, "HELLO_S", 60.0)
    rank, tensors = Rank(), checkpoint()
    with contextlib.ExitStack() as strangers, WeightSender(1, timeout_s=30, **security) as sender:
        target = addresses.parse(sender.endpoints["*"])[:2]
        silent = [strangers.enter_context(socket.create_connection(target)) for _ in range(5)]
        sending = threading.Thread(target=send, args=(sender, tensors))
        start = time.monotonic()
        sending.start()
        welcome = Receiving(rank, sender).join()
        sending.join(20)
        assert welcome.error is None and rank.manager.content is Content.VALID
        for sock in silent[:3]:  # two made room for the other strangers, and one for the rank
            sock.settimeout(5)
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(1) == b""
        assert time.monotonic() - start < greeter.HELLO_S - 1


def test_ranks_that_greet_at_a_time_do_not_end_each_other(monkeypatch):
    monkeypatch.setattr(greeter, "MAX_STRANGERS", 0)
    count, tensors = 6, checkpoint()
    with WeightSender(count, timeout_s=30, transport="tcp") as sender:
        shaking = threading.Barrier(count)
        prepare = sender._listener._greeter._prepare

        def prepare_together(sock):  # none says Hello before all are there
            shaking.wait(10)
            return prepare(sock)

        sender._listener._greeter._prepare = prepare_together
        sending = threading.Thread(target=send, args=(sender, tensors))
        sending.start()
        receiving = [Receiving(Rank(rank=number), sender) for number in range(count)]
        assert [one.join().error for one in receiving] == [None] * count
        sending.join(20)


def test_a_stranger_that_stays_silent_is_closed_at_its_deadline(monkeypatch):
    monkeypatch.setattr(greeter, "HELLO_S", 0.3)
    with WeightSender(1, timeout_s=5, transport="tcp") as sender:
        with socket.create_connection(addresses.parse(sender.endpoints["*"])[:2], timeout=4) as silent:
            thread = threading.Thread(target=send, args=(sender, checkpoint()))
            thread.start()
            assert b"stalled" in silent.recv(4096)
        Receiving(Rank(), sender).join()
        thread.join(10)


def test_another_certificate_is_refused_before_the_token_is_shown(certificate_files):
    received = []

    def impostor(listener, context):
        accepted, _ = listener.accept()
        with contextlib.suppress(OSError), context.wrap_socket(accepted, server_side=True) as end:
            received.append(end.recv(4096))

    context = tls.ServerTls(certificate_files)._context
    rank = Rank()
    with WeightSender(1, timeout_s=5, transport="tcp", tls=True) as sender:
        listener = socket.create_server(("127.0.0.1", 0))
        thread = threading.Thread(target=impostor, args=(listener, context))
        thread.start()
        address = addresses.parse(sender.endpoints["*"])._replace(port=listener.getsockname()[1])
        error = Receiving(rank, through(sender, str(address)), timeout_s=15).join().error
        thread.join(15)
        listener.close()
    assert error.details["reason"] == "certificate" and received in ([], [b""])
    assert rank.manager.content is Content.VALID


def test_a_trainer_without_tls_is_not_taken_for_one_with_it():
    rank = Rank()
    with WeightSender(1, timeout_s=3, transport="tcp") as sender:
        place = str(addresses.parse(sender.endpoints["*"])._replace(fingerprint="0" * 64))
        thread = Receiving(rank, through(sender, place), timeout_s=2)
        send(sender, checkpoint())
    assert thread.join().error.details["reason"] == "unreachable"


@contextlib.contextmanager
def connected(**options):
    """A listener with one rank, and the rank's socket."""
    with contextlib.closing(Listener(1, 5.0, advertise="127.0.0.1", local=False, **options)) as endpoint:
        thread = threading.Thread(target=endpoint.connect)
        thread.start()
        with dial.dial([endpoint.endpoints["*"]], None, 5.0) as sock:
            wire.Connection(sock, "the trainer").send(wire.Hello(wire.PROTOCOL, "fake:0", endpoint.token, 0), 5.0)
            thread.join(5)
            yield endpoint, sock


def test_messages_that_share_a_record_are_not_overlooked():
    """After the first one no packet comes that would wake the trainer."""
    sent = []
    with connected(tls=True) as (endpoint, sock):
        for slot in (0, 1):
            left, right = socket.socketpair()
            wire.Connection(left, "nobody").send(wire.Ack(slot), 1.0)
            sent.append(right.recv(4096))
            left.close()
            right.close()
        sock.sendall(b"".join(sent))
        for slot in (0, 1):
            ((_, message),) = endpoint.gather(endpoint.ranks, wire.Ack)
            assert message == wire.Ack(slot)


def test_a_rank_gets_nothing_but_messages():
    """What it leaves unread would reset the connection when it closes, and with it its own last message."""
    with connected(tls=True) as (_, sock):
        assert select.select([sock], [], [], 0.3)[0] == []


# Cuts and stalls


def traffic(options):
    """The bytes of an update over a whole link."""
    rank = Rank(ToyModel(opaque=False))
    with WeightSender(1, bucket_bytes=256, timeout_s=10, **options) as sender:
        with Link(sender.endpoints["*"]) as link:
            thread = Receiving(rank, through(sender, link.place))
            assert not isinstance(send(sender, checkpoint(opaque=False)), Exception)
            thread.join()
        return link.forwarded


def answer(thread, sender):
    """What a push does when the engine answers that the update has failed."""
    thread.join()
    if thread.error is not None:
        sender.cancel(WeightUpdateError(str(thread.error), reason="answered"))


@pytest.mark.parametrize("stall", [False, True], ids=["cut", "stall"])
@pytest.mark.parametrize("options", [{}, {"tls": True}], ids=["plain", "tls"])
def test_a_link_that_breaks_anywhere_leaves_honest_weights(options, stall):
    """The engine and the trainer both get a typed error in time, and `valid` weights are whole ones."""
    options = {"transport": "tcp", **options}
    whole = traffic(options)
    timeout_s = 0.6 if stall else 10.0
    reached = set()
    for step in range(12 if stall else 40):
        rank = Rank(ToyModel(opaque=False))
        update([rank], checkpoint(1, opaque=False), **options)
        former = rank.model.snapshot()
        after = whole * step // (12 if stall else 40)
        start = time.monotonic()
        with WeightSender(1, bucket_bytes=256, timeout_s=timeout_s, **options) as sender:
            with Link(sender.endpoints["*"], after, stall=stall) as link:
                thread = Receiving(rank, through(sender, link.place), timeout_s=timeout_s)
                threading.Thread(target=answer, args=(thread, sender)).start()
                outcome = send(sender, checkpoint(2, opaque=False))
                sender.close()
                error = thread.join().error
        assert time.monotonic() - start < 20
        assert isinstance(outcome, WeightUpdateError)
        if error is None:  # only its `Done` was lost
            rank.model.assert_unchanged(loaded(checkpoint(2, opaque=False), opaque=False))
        else:
            assert isinstance(error, WeightUpdateError) and error.details.get("reason")
        reached.add(rank.manager.content)
        if error is not None and rank.manager.content is Content.VALID:
            rank.model.assert_unchanged(former)
    assert reached >= {Content.VALID, Content.FAILED}
    assert_next_update_right(rank, **options)


def test_a_rank_that_fails_in_the_middle_says_why(security):
    rank = Rank(load_opaque=failing_loader)
    outcome, (thread,) = update([rank], checkpoint(), **security)
    assert "cannot pack packed.weight" in str(outcome) and "cannot pack" in str(thread.error)
    assert rank.manager.content is Content.FAILED
    rank.loader.load_opaque = rank.model.load_weights
    assert_next_update_right(rank, **security)


class Large(torch.nn.Module):
    """Its buckets are far larger than what a socket holds."""

    def __init__(self):
        super().__init__()
        for name in "abcd":
            setattr(self, name, torch.nn.Parameter(torch.zeros(4 << 20), requires_grad=False))

    def load_weights(self, weights):
        for name, weight in weights:
            getattr(self, name).data.copy_(weight)


def test_the_reason_of_a_rank_reaches_a_trainer_that_is_busy_sending(security):
    rank = Rank(Large(), check_finite=True)
    tensors = {name: torch.ones(4 << 20) for name in "abcd"}
    tensors["a"][5] = float("nan")
    for _ in range(5):
        outcome, (thread,) = update([rank], tensors, bucket_bytes=16 << 20, **security)
        assert thread.error.details["name"] == "a"
        assert outcome.details.get("name") == "a", outcome
    tensors["a"][5] = 1.0
    assert not isinstance(update([rank], tensors, bucket_bytes=16 << 20, **security)[0], Exception)
    assert all(torch.equal(parameter, tensors[name]) for name, parameter in rank.model.named_parameters())


def test_no_rank_waits_for_the_bytes_of_another(security, monkeypatch):
    """No rank reads the bytes of its first bucket before all ranks have been told of theirs."""
    met, read, reading = threading.Barrier(3, timeout=10.0), wire.Connection.receive_bytes, set()

    def after_all(connection, *arguments):
        if connection not in reading:
            reading.add(connection)
            met.wait()
        read(connection, *arguments)

    monkeypatch.setattr(wire.Connection, "receive_bytes", after_all)
    ranks = [Rank(Large(), number) for number in range(3)]
    tensors = {name: torch.full((4 << 20,), float(number)) for number, name in enumerate("abcd")}
    report, threads = update(ranks, tensors, bucket_bytes=16 << 20, **security)
    assert [thread.error for thread in threads] == [None] * 3, report
    for rank in ranks:
        assert all(torch.equal(parameter, tensors[name]) for name, parameter in rank.model.named_parameters())


@pytest.mark.parametrize("first", ["gone", "silent", "late"])
def test_the_rank_that_knows_why_is_heard_while_others_take_nothing(security, monkeypatch, first):
    """Rank 0 closes its connection, reads nothing, or reads after rank 1 has failed. Rank 1 says why."""
    fill, failed, go_on = wire.Connection.receive_bytes, threading.Event(), threading.Event()

    def read(connection, memory, timeout_s):
        if threading.current_thread() is threads[1]:
            failed.set()
            raise WeightUpdateError("the slot is broken", reason="broken")
        failed.wait(10)
        if first == "gone":
            connection.close()
        if first == "silent":
            go_on.wait(60)
        fill(connection, memory, timeout_s)

    monkeypatch.setattr(wire.Connection, "receive_bytes", read)
    monkeypatch.setattr(links_of_sender, "LONGEST_FAREWELL_S", 1.0 if first == "silent" else 10.0)
    ranks, threads = [Rank(Large(), number) for number in range(2)], []
    with WeightSender(2, timeout_s=60, bucket_bytes=16 << 20, **security) as sender:
        threads += [Receiving(rank, sender, timeout_s=60) for rank in ranks]
        outcome = send(sender, {name: torch.ones(4 << 20) for name in "abcd"})
    go_on.set()
    assert outcome.details["reason"] == "broken", outcome
    reasons = [thread.join().error.details.get("reason") for thread in threads]
    assert reasons[1] == "broken"
    if first == "late":
        assert "the slot is broken" in str(threads[0].error)
    assert ranks[1].manager.content is Content.VALID


def test_ranks_that_fail_leave_the_source_and_their_errors_at_once(security, monkeypatch):
    def fail(connection, memory, timeout_s):
        raise WeightUpdateError("the slot is broken", reason="broken")

    gone, is_vague = [], links_of_sender._is_vague

    def noted(error):
        gone.append(weakref.ref(error))
        return is_vague(error)

    monkeypatch.setattr(wire.Connection, "receive_bytes", fail)
    monkeypatch.setattr(links_of_sender, "_is_vague", noted)
    source = Tracked({name: torch.ones(4 << 20) for name in "abcd"})
    with no_collection(), WeightSender(2, timeout_s=30, bucket_bytes=16 << 20, **security) as sender:
        threads = [Receiving(Rank(Large(), number), sender) for number in range(2)]
        try:
            sender.send(source)
        except WeightUpdateError:
            assert source.given and source.open == source.alive() == 0  # while the error is still held
        assert gone and all(one() is None for one in gone)
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("end", [wire.Connection.cut, wire.Connection.finish])
def test_what_is_ended_sends_nothing_in_clear_text(monkeypatch, end):
    """Another thread may be about to send, and only then the connection ends."""
    with connected(tls=True) as (endpoint, sock):
        trainer, rank = endpoint.ranks[0].connection, wire.Connection(sock, "the trainer")
        trainer._is_unbroken = True
        with monkeypatch.context() as patched:
            patched.setattr(socket.socket, "shutdown", lambda *_: None)
            end(trainer)
        trainer.send(wire.Commit([]), 5.0)
        assert isinstance(rank.receive(wire.Message, timeout_s=5.0), wire.Commit)


@pytest.mark.parametrize("count", [1, 3])
def test_an_interrupt_does_not_wait_for_ranks_that_take_nothing(security, monkeypatch, count):
    """Neither here, nor on the ranks: their connections end."""
    begun, go_on = threading.Event(), threading.Event()
    sending = threading.Barrier(count, action=begun.set)

    def read(connection, memory, timeout_s):
        sending.wait(30)
        go_on.wait(60)
        fill(connection, memory, timeout_s)

    fill = wire.Connection.receive_bytes
    monkeypatch.setattr(wire.Connection, "receive_bytes", read)
    ranks = [Rank(Large(), number) for number in range(count)]
    tensors = {name: torch.ones(4 << 20) for name in "abcd"}

    with interrupts(begun), WeightSender(count, timeout_s=30, bucket_bytes=16 << 20, **security) as sender:
        threads = [Receiving(rank, sender, timeout_s=30) for rank in ranks]
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            sender.send(as_source(tensors))
        assert time.monotonic() - start < 15  # not the timeout
    go_on.set()
    assert [thread.join().error.details["reason"] for thread in threads] == ["lost"] * count
    assert all(rank.manager.content is Content.VALID for rank in ranks)  # no bucket has arrived as a whole


def test_a_source_that_fails_in_the_middle_says_why(security):
    class Failing:
        def specs(self):
            return ModelSource(checkpoint()).specs()

        def tensors(self):
            yield from list(ModelSource(checkpoint()).tensors())[:4]
            raise RuntimeError("the gather failed")

    ranks = [Rank(ToyModel(i, 2), i) for i in range(2)]
    outcome, threads = update(ranks, Failing(), **security)
    for error in (outcome, *(thread.error for thread in threads)):
        assert isinstance(error, WeightUpdateError) and "the gather failed" in str(error)
    assert all(rank.manager.content is Content.FAILED for rank in ranks)


# Lies


def offered(rank, description, *, timeout_s=10.0):
    """A trainer that follows the protocol up to the answer to its offer: a context of connection and thread."""

    @contextlib.contextmanager
    def trainer():
        with contextlib.closing(Listener(1, 5.0, advertise="127.0.0.1", local=False)) as endpoint:
            thread = Receiving(rank, endpoint, timeout_s=timeout_s)
            endpoint.connect()
            connection = endpoint.ranks[0].connection
            connection.send(wire.Offer(Manifest(ModelSource(checkpoint(opaque=False)).specs()), description), 5.0)
            yield connection, thread

    return trainer()


@pytest.mark.parametrize(
    ("slot_bytes", "error", "message"),
    [
        (1 << 62, HostMemoryError, "cannot allocate a slot"),
        (1 << 63, HostMemoryError, "cannot allocate a slot"),
        (0, WeightUpdateError, "without bytes"),
        (-4096, WeightUpdateError, "without bytes"),
        ("many", WeightUpdateError, "invalid"),
        (None, WeightUpdateError, "invalid"),
    ],
)
def test_a_slot_of_a_size_that_cannot_be_is_refused(slot_bytes, error, message):
    rank = Rank(ToyModel(opaque=False))
    with offered(rank, {"kind": "tcp", "slot_bytes": slot_bytes}) as (connection, thread):
        assert isinstance(thread.join().error, error) and message in str(thread.error)
    assert rank.manager.content is Content.VALID
    assert_next_update_right(rank, transport="tcp")


@pytest.mark.parametrize(
    ("entries", "sent", "content", "message"),
    [
        ([(0, 0, 160)], 4096 + 1, Content.FAILED, "announced|invalid"),  # more than announced
        ([(0, 0, 160)], 100, Content.VALID, "stalled: it did not send the bytes of a bucket"),
        ([(0, 1 << 40, 160)], 0, Content.VALID, "slots have 4096 bytes"),
        ([(0, 4000, 160)], 0, Content.VALID, "slots have 4096 bytes"),
        ([(0, -256, 160)], 0, Content.FAILED, "invalid byte range"),
        ([(0, 0, -1)], 0, Content.FAILED, "invalid byte range"),
        ([(0, 0, 80)], 80, Content.FAILED, "committed without sending|invalid byte range"),
        ([(1, 0, 16)], 16, Content.FAILED, "was next"),
    ],
)
def test_a_trainer_that_lies_about_the_bytes_of_a_bucket_is_refused(entries, sent, content, message):
    rank = Rank(ToyModel(opaque=False))
    former = rank.model.snapshot()
    timeout_s = 3.0 if "stalled" in message else 10.0
    with offered(rank, {"kind": "tcp", "slot_bytes": 4096}, timeout_s=timeout_s) as (connection, thread):
        connection.receive(wire.Accept, timeout_s=5)
        connection.send(wire.Bucket(0, [BucketEntry(*entry) for entry in entries]), 5.0)
        with contextlib.suppress(RLMemoryError):  # the rank may have gone already
            connection.send_bytes(memoryview(b"\xff" * sent), 5.0)
            if "committed" in message:
                connection.send(wire.Commit(), 5.0)
        error = thread.join().error
    assert isinstance(error, WeightUpdateError)
    assert re.search(message, str(error))
    assert rank.manager.content is content
    if content is Content.VALID:
        rank.model.assert_unchanged(former)
    assert_next_update_right(rank, transport="tcp")


def test_an_announced_slot_takes_no_memory_before_its_bytes_come():
    attached = StreamedAttached({"kind": "tcp", "slot_bytes": 1 << 34})
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    assert resident < 8 << 30
    attached.close()


def test_an_error_is_not_sent_into_the_middle_of_a_bucket():
    left, right = socket.socketpair(socket.AF_UNIX)
    trainer = wire.Connection(left, "the engine")
    with pytest.raises(WeightUpdateError, match="did not read the bytes of a bucket"):
        trainer.send_bytes(memoryview(bytes(8 << 20)), 0.2)
    received = right.recv(8 << 20)  # there is room again
    trainer.fail(WeightUpdateError("the engine stalled"))
    trainer.close()
    while part := right.recv(8 << 20):
        received += part
    assert 0 < len(received) < 8 << 20 and not any(received)
    right.close()


# The rest


def test_the_buffer_waits_for_nothing_but_its_bytes():
    staging = StreamedStaging(4096, 2)
    description, fds = staging.export()
    assert description == {"kind": "tcp", "slot_bytes": 4096} and fds == []
    tensors = {"a": torch.arange(64.0), "b": torch.arange(3, dtype=torch.uint8)}
    manifest = Manifest(ModelSource(tensors).specs())
    (entries,) = manifest.buckets()
    for entry, tensor in zip(entries, tensors.values(), strict=True):
        staging.put(1, entry, manifest.tensors[entry.index], tensor)
    staging.publish()
    left, right = socket.socketpair()
    attached = StreamedAttached(description)
    wire.Connection(left, "the engine").send_bytes(memory_of(staging.sent(1, entries)), 1.0)
    attached.receive(wire.Connection(right, "the trainer"), wire.Bucket(1, entries), 1.0)
    got = attached.memory(1, entries[0])
    assert torch.equal(got[: 64 * 4].view(torch.float32), tensors["a"])
    assert torch.equal(got[entries[1].offset :][:3], tensors["b"])
    del got
    attached.close()
    staging.close()
    left.close()
    right.close()


def test_many_sessions_leave_nothing(security):
    rank, broken = Rank(), Rank(load_opaque=failing_loader)
    update([rank], checkpoint(), **security)
    before, threads = counts(), threading.active_count()
    for seed in range(20):
        with contextlib.closing(socket.socket()) as silent:
            with WeightSender(1, bucket_bytes=256, timeout_s=10, **security) as sender:
                silent.connect(addresses.parse(sender.endpoints["*"])[:2])
                thread = Receiving(broken if seed % 5 == 4 else rank, sender)
                assert isinstance(send(sender, checkpoint(seed)), Exception) == (seed % 5 == 4)
                thread.join()
        del thread
    # a greeter's thread may end a moment after it has let go of its connection
    wait_until(lambda: threading.active_count() <= threads and left_since(before) == NOTHING, "nothing is left")


def test_a_push_names_all_its_places_to_the_engine():
    rank, bodies = Rank(), []
    tensors = checkpoint(5)

    def post(body):
        bodies.append(body)
        rank.receiver.receive(body["endpoints"], body["token"], body["timeout_s"])
        rank.manager.finish_writing(True)

    push_weights(post, tensors, timeout_s=10, advertise=["127.0.0.2", "::1"], tls=True)
    rank.model.assert_unchanged(loaded(tensors))
    path, first, second = bodies[0]["endpoints"]["*"]
    assert first.startswith("tls://127.0.0.2:") and second.startswith("tls://[::1]:")
    assert bodies[0]["token"] not in first


def test_options_of_a_handoff_are_checked_before_an_engine_sleeps():
    require_options({"advertise": "127.0.0.1", "tls": True, "transport": "tcp"})
    with pytest.raises(InvalidRequestError, match="cannot advertise"):
        require_options({"advertise": "eth-not-there"})
    with pytest.raises(InvalidRequestError, match="tls has no use"):
        require_options({"tls": True})
