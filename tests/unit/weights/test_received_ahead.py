"""Buckets that begin to arrive over a communicator while the one before them travels or is loaded."""

import threading
from types import SimpleNamespace

import pytest
import torch
from test_network_update import assert_next_update_right, update
from test_transport_communicators import GLOO, joined
from toys import Rank, ToyModel, checkpoint, loaded

from integration.waiting import wait_until
from rl_memory_plugins.errors import DeviceMemoryError, RLMemoryError, WeightUpdateError
from rl_memory_plugins.tags import Content
from rl_memory_plugins.weights import session, wire
from rl_memory_plugins.weights.buffers import communicated
from rl_memory_plugins.weights.communicators import SEAL_BYTES, kept, over_gloo
from rl_memory_plugins.weights.manifest import BucketEntry

TENSORS = checkpoint(5, opaque=False)
PARAMETERS = {"embed.weight": "embed", "q.weight": "qkv", "k.weight": "qkv"}


@pytest.fixture(autouse=True)
def none_kept():
    yield
    kept.close_communicators()


@pytest.fixture
def begun(monkeypatch):
    """The bytes of each transfer that the rank has begun to receive."""
    found, begin = [], over_gloo.GlooCommunicator.begin_receive

    def noted(self, slot, nbytes, *arguments):
        begin(self, slot, nbytes, *arguments)
        found.append(nbytes - SEAL_BYTES)

    monkeypatch.setattr(over_gloo.GlooCommunicator, "begin_receive", noted)
    return found


class Trainer:
    """Sends buckets of one tensor each, and their bytes when it is told to."""

    def __init__(self, connection, communicator):
        self.connection = connection
        self._communicator = communicator

    def announce(self, number):
        nbytes = self._tensor(number).nbytes
        self.connection.send(wire.Bucket(number % 2, [BucketEntry(number, 0, nbytes)], self._seal(number)), 5.0)

    def deliver(self, number, *, seal=None):
        data = bytes(self._tensor(number).view(torch.uint8).flatten().tolist()) + (seal or self._seal(number))
        self._communicator.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), self.connection, 5.0)

    def acknowledged(self, number):
        return self.connection.receive(wire.Ack, timeout_s=5).slot == number % 2

    def first_two(self, begun):
        """Send the first bucket, which is received alone, and announce the next two."""
        self.connection.receive(wire.Accept, timeout_s=5)
        self.announce(0)
        self.deliver(0)
        assert self.acknowledged(0)
        self.announce(1)
        self.announce(2)
        wait_until(lambda: begun == [160, 128, 32], "the rank awaits both")

    @staticmethod
    def _tensor(number):
        return list(TENSORS.values())[number]

    @staticmethod
    def _seal(number):
        return bytes([number + 1]) * SEAL_BYTES


def test_the_second_slot_is_obtained_after_the_answer(monkeypatch):
    """Before, the trainer would wait for it and not pack."""
    go_on, made, allocate = threading.Event(), [], communicated.ReceivedSlot

    def noted(*arguments):
        made.append(None)
        if len(made) == 2:
            assert go_on.wait(10)
        return allocate(*arguments)

    monkeypatch.setattr(communicated, "ReceivedSlot", noted)
    rank = Rank(ToyModel(opaque=False))
    with joined(rank) as (connection, communicator, thread):
        connection.receive(wire.Accept, timeout_s=5)
        assert not go_on.is_set()
        go_on.set()
        trainer = Trainer(connection, communicator)
        for number in range(len(TENSORS)):
            trainer.announce(number)
            trainer.deliver(number)
            assert trainer.acknowledged(number)
        connection.send(wire.Commit(), 5.0)
        connection.receive(wire.Done, timeout_s=5)
        assert thread.join().error is None and len(made) == 2
    rank.model.assert_unchanged(loaded(TENSORS, opaque=False))


def has(rank, *names):
    """Whether the rank's live weights have these tensors and no others."""
    expected = Rank(ToyModel(opaque=False)).model
    for name in names:
        expected.load_weights([(name, TENSORS[name])])
    return all(torch.equal(one, expected.state_dict()[name]) for name, one in rank.model.state_dict().items())


def test_the_next_bucket_begins_before_the_former_has_arrived_and_is_loaded_after_it(begun):
    rank = Rank(ToyModel(opaque=False))
    with joined(rank) as (connection, communicator, thread):
        trainer = Trainer(connection, communicator)
        trainer.first_two(begun)
        assert has(rank, "embed.weight")
        trainer.deliver(1)
        assert trainer.acknowledged(1)
        wait_until(lambda: has(rank, "embed.weight", "q.weight"), "the second is loaded while the third travels")
        trainer.deliver(2)
        assert trainer.acknowledged(2)
        for number in range(3, len(TENSORS)):
            trainer.announce(number)
            trainer.deliver(number)
            assert trainer.acknowledged(number)
        connection.send(wire.Commit(), 5.0)
        connection.receive(wire.Done, timeout_s=5)
        assert thread.join().error is None
    rank.model.assert_unchanged(loaded(TENSORS, opaque=False))
    assert {"wait", "receive", "load"} <= thread.report["seconds"].keys()


def test_a_bucket_that_began_early_and_is_not_what_was_announced_is_not_written(begun):
    rank = Rank(ToyModel(opaque=False))
    with joined(rank) as (connection, communicator, thread):
        trainer = Trainer(connection, communicator)
        trainer.first_two(begun)
        trainer.deliver(1)
        trainer.deliver(2, seal=b"?" * SEAL_BYTES)
        assert "sent another" in str(thread.join().error)
    assert has(rank, "embed.weight", "q.weight") and rank.manager.content is Content.FAILED
    assert_next_update_right(rank, **GLOO)


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("how", ["fails", "ends", "stalls"])
def test_a_trainer_that_breaks_off_with_two_buckets_on_their_way_leaves_what_had_arrived(begun, how, number):
    rank = Rank(ToyModel(opaque=False))
    with joined(rank, timeout_s=9.0) as (connection, communicator, thread):
        trainer = Trainer(connection, communicator)
        trainer.first_two(begun)
        if number == 2:
            trainer.deliver(1)
            assert trainer.acknowledged(1)
        if how == "fails":
            connection.fail(WeightUpdateError("the gather failed"))
        if how != "stalls":
            connection.close()
        error = thread.join().error
    assert isinstance(error, RLMemoryError)
    if how == "fails":
        assert "the gather failed" in str(error)
    else:
        assert error.details["reason"] == {"ends": "lost", "stalls": "stalled"}[how]
    assert has(rank, "embed.weight", *["q.weight"][: number - 1]) and rank.manager.content is Content.FAILED
    assert rank.receiver._communicators.names() == []
    assert_next_update_right(rank, **GLOO)


def test_a_bucket_that_does_not_fit_is_refused_while_the_former_travels(begun):
    rank = Rank(ToyModel(opaque=False))
    with joined(rank) as (connection, communicator, thread):
        trainer = Trainer(connection, communicator)
        trainer.connection.receive(wire.Accept, timeout_s=5)
        trainer.announce(0)
        trainer.deliver(0)
        trainer.announce(1)
        connection.send(wire.Bucket(0, [BucketEntry(2, 4090, 32)], b"s" * SEAL_BYTES), 5.0)
        assert "slots have 4096 bytes" in str(thread.join().error)
    assert has(rank, "embed.weight")


def test_nothing_is_received_ahead_of_what_may_wait_for_the_whole_gpu(begun, monkeypatch):
    """With a transfer under way there, it would wait for the trainer, and without a deadline."""
    looked, receive = [], communicated.CommunicatedAttached.receive

    def noted(self, *arguments, look_ahead):
        looked.append(look_ahead)
        return receive(self, *arguments, look_ahead=look_ahead)

    monkeypatch.setattr(communicated.CommunicatedAttached, "receive", noted)
    for cautious in (Rank(), Rank(ToyModel(opaque=False), check_finite=True)):
        assert_next_update_right(cautious, **GLOO)
        assert len(looked) > 2 and not any(looked)
        looked.clear()
    assert_next_update_right(Rank(ToyModel(opaque=False)), **GLOO)
    assert looked[0] is False and all(looked[1:])  # the first write may wait for the GPU too


class InterleavedModel(torch.nn.Module):
    """Its loader copies a tensor in another order of rows: no rows of it load before the others have come."""

    def __init__(self):
        super().__init__()
        self.plain = torch.nn.Parameter(torch.zeros(3, 8), requires_grad=False)
        self.mixed = torch.nn.Parameter(torch.zeros(4, 2, 8), requires_grad=False)

    def load_weights(self, weights):
        for name, weight in weights:
            if name == "mixed":
                self.mixed.data.copy_(weight.view(2, 4, 8).transpose(0, 1))
            else:
                self.plain.data[int(name)].copy_(weight)


def test_with_one_slot_each_bucket_is_loaded_before_the_next_one_begins(begun, monkeypatch):
    make, allocate = [], communicated.ReceivedSlot

    def only_first(*arguments):
        make.append(None)
        if len(make) > 1:
            raise DeviceMemoryError("full", needed_bytes=1, free_bytes=0, margin_bytes=0)
        return allocate(*arguments)

    monkeypatch.setattr(communicated, "ReceivedSlot", only_first)
    rank = Rank(ToyModel(opaque=False))
    with joined(rank) as (connection, communicator, thread):
        trainer = Trainer(connection, communicator)
        connection.receive(wire.Accept, timeout_s=5)
        for number in range(len(TENSORS)):
            trainer.announce(number)
            if number:  # announced before the bytes of the one before have come
                trainer.deliver(number - 1)
                assert trainer.acknowledged(number - 1)
            assert len(begun) <= number + 1
        trainer.deliver(len(TENSORS) - 1)
        assert trainer.acknowledged(len(TENSORS) - 1)
        connection.send(wire.Commit(), 5.0)
        connection.receive(wire.Done, timeout_s=5)
        assert thread.join().error is None
    rank.model.assert_unchanged(loaded(TENSORS, opaque=False))


def test_nothing_is_received_ahead_while_a_tensor_comes_together(monkeypatch):
    """Its memory is allocated meanwhile, for which torch may free other memory and wait for the whole GPU."""
    looked, receive = [], communicated.CommunicatedAttached.receive

    def noted(self, connection, bucket, *arguments, look_ahead):
        looked.append(([entry.index for entry in bucket.entries], look_ahead))
        return receive(self, connection, bucket, *arguments, look_ahead=look_ahead)

    monkeypatch.setattr(communicated.CommunicatedAttached, "receive", noted)
    rank = Rank(InterleavedModel())
    tensors = {"0": torch.ones(8), "1": torch.ones(8), "mixed": torch.arange(64.0).view(8, 8), "2": torch.ones(8)}
    report, (thread,) = update([rank], tensors, bucket_bytes=128, **GLOO)
    assert thread.error is None, report
    assert looked == [([0], False), ([1], True), ([2], False), ([2], False), ([3], True)]
    assert torch.equal(rank.model.mixed, tensors["mixed"].view(2, 4, 8).transpose(0, 1))


@pytest.mark.parametrize("how", ["stalls", "ends"])
def test_loads_that_wait_for_the_next_bucket_have_a_deadline(begun, monkeypatch, how):
    """As when the engine computes on the stream on which a bucket arrives."""
    stream = SimpleNamespace(record_event=lambda: SimpleNamespace(query=lambda: False))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(session.Session, "_device", torch.device("cuda", 0))
    rank = Rank(ToyModel(opaque=False))
    with joined(rank, timeout_s=9.0) as (connection, communicator, thread):
        trainer = Trainer(connection, communicator)
        trainer.first_two(begun)
        trainer.deliver(1)
        assert trainer.acknowledged(1)
        if how == "ends":
            connection.close()
        error = thread.join().error
    assert error.details["reason"] == {"ends": "lost", "stalls": "stalled"}[how]
    assert rank.manager.content is Content.FAILED
