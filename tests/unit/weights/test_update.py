"""Whole updates over the real socket and shared memory, and every way in which one breaks off."""

import contextlib
import errno
import gc
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from helpers import no_collection
from toys import Rank, Receiving, ToyModel, Tracked, checkpoint, loaded, update

from rl_memory_plugins.errors import (
    AuthenticationError,
    HostMemoryError,
    InvalidRequestError,
    ManifestError,
    StateConflictError,
    WeightUpdateError,
)
from rl_memory_plugins.memory.weights_content import KeptWeights
from rl_memory_plugins.tags import Content
from rl_memory_plugins.trainer import ModelSource, push_adapter, push_weights
from rl_memory_plugins.weights import wire
from rl_memory_plugins.weights.buffers import host
from rl_memory_plugins.weights.checksums import tensor_checksum
from rl_memory_plugins.weights.listener import Listener
from rl_memory_plugins.weights.sender import WeightSender
from rl_memory_plugins.weights.source import TensorSource


@pytest.mark.parametrize("bucket_bytes", [1, 256, 1024, 1 << 20], ids=["oversize", "256", "1024", "one bucket"])
def test_two_ranks_get_what_the_loader_would_give_them(bucket_bytes):
    ranks = [Rank(ToyModel(i, 2), i) for i in range(2)]
    for seed in (1, 2):
        tensors = checkpoint(seed)
        report, threads = update(ranks, tensors, bucket_bytes=bucket_bytes)
        for i, rank in enumerate(ranks):
            rank.model.assert_unchanged(loaded(tensors, i, 2))
            assert rank.manager.content is Content.VALID
            assert threads[i].report in report["receivers"]
            assert threads[i].report["opaque"] == 2
            assert rank.manager.device.calls["synchronize"] >= report["buckets"]
        assert report["tensors"] == len(tensors)
        assert report["bytes"] == sum(tensor.nbytes for tensor in tensors.values())
    # per model: two traces, the second of the opaque tensors alone, and a load in each update; the second traces none
    assert [rank.model.loads for rank in ranks] == [4, 4]


def test_the_last_step_of_the_engine_ends_between_the_offer_and_the_first_write():
    rank, ended = Rank(), []

    def end_step():
        unchanged = all(torch.equal(one, former[name]) for name, one in rank.model.snapshot().items())
        ended.append((rank.manager.content, rank.model.loads, unchanged))

    former, rank.receiver.before_writing = rank.model.snapshot(), end_step
    _, (thread,) = update([rank], checkpoint(1))
    # The offer was looked at before, which needs no more than the loader's two traces.
    assert ended == [(Content.VALID, 2, True)]
    assert {"connect", "validate", "drain"} <= thread.report["seconds"].keys()


def test_the_last_step_ends_on_a_rank_that_refuses_an_offer_too():
    """Other ranks may have accepted theirs, and all must go on with the same tokens."""
    rank, ended = Rank(), []
    rank.receiver.before_writing = lambda: ended.append(rank.manager.content)
    outcome, _ = update([rank], checkpoint(1) | {"unknown": torch.zeros(1)})
    assert isinstance(outcome, ManifestError) and ended == [Content.VALID]
    with pytest.raises(InvalidRequestError):
        rank.receiver.receive({}, "token", 1.0)
    assert len(ended) == 2


def test_a_step_that_fails_leaves_the_weights_valid():
    rank = Rank()
    former = rank.model.snapshot()

    def end_step():
        raise RuntimeError("the device is gone")

    rank.receiver.before_writing = end_step
    outcome, (thread,) = update([rank], checkpoint(1))
    assert isinstance(outcome, WeightUpdateError) and "the device is gone" in str(thread.error)
    assert rank.manager.content is Content.VALID
    rank.model.assert_unchanged(former)


@pytest.mark.parametrize("bucket_bytes", [32, 1 << 20], ids=["in parts", "one bucket"])
def test_a_tensor_that_is_negated_without_a_copy_is_sent_as_it_reads(bucket_bytes):
    """As the imaginary part of a conjugate: its memory holds the opposite values."""
    tensors = checkpoint(1)
    negated = tensors | {name: torch._neg_view(-tensor) for name, tensor in tensors.items()}
    assert negated["q.weight"].is_neg() and ModelSource(negated).resident() is None
    rank = Rank()
    update([rank], negated, bucket_bytes=bucket_bytes)
    rank.model.assert_unchanged(loaded(tensors))
    assert tensor_checksum(negated["q.weight"]) == tensor_checksum(tensors["q.weight"])


def test_without_opaque_tensors_the_loader_only_traces():
    rank = Rank(ToyModel(opaque=False))
    for seed in range(3):
        tensors = checkpoint(seed, opaque=False)
        update([rank], tensors)
        rank.model.assert_unchanged(loaded(tensors, opaque=False))
    assert rank.model.loads == 1


class WithStatistics(ToyModel):
    """Its loader writes a buffer, and memory that torch knows under no name."""

    def __init__(self):
        super().__init__(opaque=False)
        self.register_buffer("mean", torch.zeros(4))
        self.kept = {"count": torch.zeros(2)}

    def load_weights(self, weights):
        def others():
            for name, weight in weights:
                if name == "mean":
                    self.mean.copy_(weight)
                elif name == "count":
                    self.kept["count"].fill_(0)
                    self.kept["count"][:1].copy_(weight)
                else:
                    yield name, weight

        super().load_weights(others())


@pytest.mark.parametrize("known", [True, False])
def test_memory_that_the_model_has_replaced_is_not_written(known):
    """The plan would hold what the model has dropped, and the update would say that it arrived."""
    model = WithStatistics()
    rank = Rank(model, buffers=lambda: dict(model.named_buffers())) if known else Rank(model)
    for seed in range(3):
        tensors = {**checkpoint(seed, opaque=False), "mean": torch.randn(4), "count": torch.ones(1) * seed}
        _, (thread,) = update([rank], tensors)
        assert thread.error is None and rank.manager.content is Content.VALID
        assert torch.equal(model.mean, tensors["mean"])
        assert model.kept["count"].tolist() == [seed, 0]
        assert thread.report["opaque"] == (1 if known else 2)  # what nobody can watch is left to the loader
        model.mean, model.kept["count"] = model.mean.clone(), model.kept["count"].clone()


def test_the_checksums_after_a_buffer_was_replaced_are_those_of_the_model():
    model = WithStatistics()
    rank = Rank(model, buffers=lambda: dict(model.named_buffers()))
    tensors = {**checkpoint(1, opaque=False), "mean": torch.randn(4)}
    update([rank], tensors)
    assert "mean" in rank.receiver.checksums()["regions"]
    model.mean = torch.zeros(4)
    assert rank.receiver.checksums()["layout"] == "engine"  # no plan says any longer where the checkpoint's names lie


def test_a_changed_parameter_drops_the_plan():
    rank = Rank(ToyModel(opaque=False))
    update([rank], checkpoint(1, opaque=False))
    rank.model.norm.data = rank.model.norm.data.clone()
    tensors = checkpoint(2, opaque=False)
    update([rank], tensors)
    rank.model.assert_unchanged(loaded(tensors, opaque=False))
    assert rank.model.loads == 2


def test_an_opaque_loader_may_keep_its_tensors():
    model = ToyModel()

    def keep_all(weights):
        model.load_weights(list(weights))  # takes everything before it loads anything

    rank = Rank(model, load_opaque=keep_all)
    tensors = checkpoint(3)
    update([rank], tensors, bucket_bytes=1)
    model.assert_unchanged(loaded(tensors))


def test_a_rejection_lists_all_ranks_mismatches_and_touches_nothing():
    tensors = checkpoint()
    tensors["q.weight"] = torch.zeros(3, 8, dtype=torch.bfloat16)
    tensors["norm.weight"] = tensors["norm.weight"].double()
    tensors["bogus.weight"] = torch.zeros(2)
    tensors["ignored.weight"] = torch.zeros(2)
    ranks = [Rank(ToyModel(i, 2), i) for i in range(2)]
    before = [rank.model.snapshot() for rank in ranks]
    error, threads = update(ranks, tensors)
    assert isinstance(error, ManifestError)
    found = {(m["kind"], m["name"]): tuple(m["ranks"]) for m in error.details["mismatches"]}
    assert found[("shape", "q.weight")] in [(0, 1), (1,), (0,)]  # the messages may differ by rank
    assert found[("dtype", "norm.weight")] == (0, 1)
    assert found[("unknown", "bogus.weight")] == (0, 1)
    assert ("unknown", "ignored.weight") in found
    for rank, snapshot, thread in zip(ranks, before, threads, strict=True):
        assert isinstance(thread.error, ManifestError)
        rank.model.assert_unchanged(snapshot)
        assert rank.manager.content is Content.VALID
    assert not isinstance(update(ranks, checkpoint(5))[0], Exception)  # the next correct call works


def test_one_rank_that_rejects_stops_the_others():
    ranks = [Rank(ToyModel(0, 2), 0), Rank(ToyModel(1, 2), 1)]
    ranks[1].model.extra = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    error, threads = update(ranks, checkpoint())
    assert isinstance(error, ManifestError)
    assert [(m["kind"], m["name"], m["ranks"]) for m in error.details["mismatches"]] == [("missing", "extra", [1])]
    assert all(isinstance(thread.error, ManifestError) for thread in threads)
    assert ranks[0].manager.content is Content.VALID


class PipelineStage(ToyModel):
    """Takes only some names, as a rank of a pipeline does."""

    def __init__(self, mine):
        super().__init__(opaque=False)
        self.mine = mine

    def load_weights(self, weights):
        super().load_weights((name, weight) for name, weight in weights if self.mine(name))


def test_a_name_that_only_another_rank_uses_is_known():
    stages = [
        PipelineStage(lambda name: name != "norm.weight"),
        PipelineStage(lambda name: name == "norm.weight"),
    ]
    del stages[0].norm
    for name in ("embed", "qkv", "o", "experts"):
        delattr(stages[1], name)
    ranks = [Rank(stage, i) for i, stage in enumerate(stages)]
    tensors = checkpoint(opaque=False)
    report, _ = update(ranks, tensors)
    assert report["tensors"] == len(tensors)
    assert torch.equal(stages[1].norm, tensors["norm.weight"])


def test_partial_updates_need_valid_weights():
    rank = Rank()
    update([rank], checkpoint(1))
    part = {"q.weight": checkpoint(2)["q.weight"]}
    report, threads = update([rank], part, partial=True)
    assert report["tensors"] == 1 and threads[0].report["partial"]
    rank.model.assert_unchanged(loaded(checkpoint(1) | part))
    rank.manager.content = Content.STALE
    error, threads = update([rank], part, partial=True)
    assert isinstance(error, StateConflictError) and isinstance(threads[0].error, StateConflictError)
    assert rank.manager.content is Content.STALE


class Source:
    """A source whose tensors come from a function of the plain ones."""

    def __init__(self, tensors, change):
        self._source = ModelSource(tensors)
        self._change = change

    def specs(self):
        return self._source.specs()

    def tensors(self):
        return self._change(self._source.tensors())


def dropping_last(tensors):
    items = list(tensors)
    yield from items[:-1]


def raising(tensors):
    yield next(tensors)
    raise RuntimeError("the trainer's gather failed")


def adding(tensors):
    yield from tensors
    yield "extra", torch.zeros(1)


def reordering(tensors):
    yield from reversed(list(tensors))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dropping_last, "ended before"),
        (raising, "gather failed"),
        (adding, "do not list"),
        (reordering, "but its specs list"),
    ],
)
def test_a_source_that_breaks_its_word_fails_the_update(change, message):
    ranks = [Rank(ToyModel(i, 2), i) for i in range(2)]
    source = Source(checkpoint(), change)
    assert isinstance(source, TensorSource)
    error, threads = update(ranks, source)
    assert isinstance(error, WeightUpdateError) and message in str(error)
    for rank, thread in zip(ranks, threads, strict=True):
        assert isinstance(thread.error, WeightUpdateError) and message in str(thread.error)
        began = change is not reordering
        assert rank.manager.content is (Content.FAILED if began else Content.VALID)
    assert not isinstance(update(ranks, checkpoint(4))[0], Exception)
    assert ranks[0].manager.content is Content.VALID


def test_a_loader_that_fails_in_the_middle_is_reported_to_all():
    ranks = [Rank(ToyModel(i, 2), i) for i in range(2)]
    update(ranks, checkpoint(1))

    def failing(weights):
        for name, _ in weights:
            raise RuntimeError(f"cannot pack {name}")

    ranks[1].receiver._model.load_opaque = failing
    error, threads = update(ranks, checkpoint(2))
    assert isinstance(error, WeightUpdateError) and "cannot pack packed.weight" in str(error)
    assert error.details["rank"] == 1
    for rank, thread in zip(ranks, threads, strict=True):
        assert isinstance(thread.error, WeightUpdateError) and "cannot pack" in str(thread.error)
        assert rank.manager.content is Content.FAILED


def test_a_loader_that_hides_a_failure_or_stops_early_is_found_out():
    def swallowing(weights):
        try:
            list(weights)
        except Exception:
            return

    def early(weights):
        next(iter(weights))

    for load_opaque, source in ((swallowing, Source(checkpoint(), raising)), (early, checkpoint())):
        rank = Rank(load_opaque=load_opaque)
        error, threads = update([rank], source)
        assert isinstance(error, WeightUpdateError) and isinstance(threads[0].error, WeightUpdateError)
        assert rank.manager.content is Content.FAILED


class Looking(ToyModel):
    """Its loader compares values of one tensor: there the trace, which has none, breaks off."""

    def load_weights(self, weights):
        def looked_at():
            for name, weight in weights:
                if name == "norm.weight":
                    assert not torch.equal(weight, torch.full_like(weight, 99.0))
                yield name, weight

        super().load_weights(looked_at())


def test_an_update_must_be_complete_also_where_the_trace_breaks_off():
    rank, tensors = Rank(Looking(opaque=False)), checkpoint(1, opaque=False)
    lacking = {name: tensor for name, tensor in tensors.items() if name not in ("o.weight", "v.weight")}
    error, (thread,) = update([rank], lacking)
    assert isinstance(error, WeightUpdateError) and error.details["reason"] == "incomplete"
    assert thread.error.details["missing"] == ["qkv", "o"]
    assert rank.manager.content is Content.FAILED
    report, (thread,) = update([rank], tensors)
    assert thread.report["opaque"] == 1
    rank.model.assert_unchanged(loaded(tensors, opaque=False))
    assert rank.manager.content is Content.VALID


class Indexing(ToyModel):
    """Its loader writes one parameter through indices."""

    rows = 2

    def load_weights(self, weights):
        def others():
            for name, weight in weights:
                if name == "norm.weight":
                    self.norm.data[torch.arange(self.rows)] = weight[: self.rows]
                else:
                    yield name, weight

        super().load_weights(others())


def test_an_update_must_be_complete_also_where_indices_say_what_is_written():
    model = Indexing(opaque=False)
    rank, tensors = Rank(model), checkpoint(1, opaque=False)
    error, (thread,) = update([rank], tensors)
    assert isinstance(error, WeightUpdateError) and error.details["reason"] == "incomplete"
    assert thread.error.details["missing"] == ["norm"]
    assert rank.manager.content is Content.FAILED
    model.rows = len(model.norm)
    update([rank], tensors)
    rank.model.assert_unchanged(loaded(tensors, opaque=False))
    assert rank.manager.content is Content.VALID


def test_a_value_that_is_not_finite_is_named_when_asked_for():
    tensors = checkpoint()
    tensors["o.weight"][0, 0] = float("nan")
    rank = Rank(check_finite=True)
    error, _ = update([rank], tensors)
    assert isinstance(error, WeightUpdateError) and error.details["name"] == "o.weight"
    assert rank.manager.content is Content.FAILED
    assert not isinstance(update([Rank()], tensors)[0], Exception)


def test_a_rank_whose_address_space_has_no_room_for_the_buckets(monkeypatch):
    """As under `ulimit -v`."""
    make, tensors, rank = host._map, checkpoint(1), Rank()

    def limited(fd, slot_bytes, slots):
        if threading.current_thread() is not trainer:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return make(fd, slot_bytes, slots)

    trainer = threading.current_thread()
    monkeypatch.setattr(host, "_map", limited)
    error, _ = update([rank], tensors)
    assert isinstance(error, HostMemoryError) and error.details["needed_bytes"] > 0
    assert rank.manager.content is Content.VALID
    monkeypatch.undo()
    update([rank], tensors)
    rank.model.assert_unchanged(loaded(tensors))


def test_a_wrong_token_and_a_wrong_protocol_are_turned_away():
    rank = Rank()
    tensors = checkpoint()
    with WeightSender(1, timeout_s=10) as sender:
        stranger = Receiving(Rank(), sender, token="guessed")
        other_version = connect(sender)
        other_version.send(wire.Hello(99, "fake:0", sender.token, 0), 1.0)
        noise = connect(sender)
        noise._sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
        silent = connect(sender)
        outcome = {}
        sending = threading.Thread(target=lambda: outcome.update(sender.send(ModelSource(tensors))))
        sending.start()
        assert isinstance(stranger.join().error, AuthenticationError)
        with pytest.raises(WeightUpdateError, match="protocol"):
            other_version.receive(wire.Offer, timeout_s=5)
        with pytest.raises(WeightUpdateError, match="announced"):
            noise.receive(wire.Offer, timeout_s=5)
        welcome = Receiving(rank, sender).join()
        sending.join(60)
        assert welcome.error is None and outcome["tensors"] == len(tensors)
        assert stranger.rank.manager.content is Content.VALID
        for connection in (other_version, noise, silent):
            connection.close()


def connect(sender):
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(next(iter(sender.endpoints.values())))
    return wire.Connection(sock, "the trainer")


def test_devices_are_matched_by_name():
    ranks = [Rank(ToyModel(i, 2), i) for i in range(2)]
    tensors = checkpoint()
    with WeightSender(["fake:0", "fake:1"], timeout_s=10) as sender:
        assert set(sender.endpoints) == {"fake:0", "fake:1"}
        with pytest.raises(InvalidRequestError, match="fake:7"):
            Rank(rank=7).receiver.receive(sender.endpoints, sender.token, 1.0)
        threads = [Receiving(rank, sender) for rank in ranks]
        sender.send(ModelSource(tensors))
    for i, thread in enumerate(threads):
        assert thread.join().error is None
        ranks[i].model.assert_unchanged(loaded(tensors, i, 2))


def test_a_receiver_that_does_not_come_is_named():
    with (
        WeightSender(["fake:0", "fake:1"], timeout_s=6) as sender,
        pytest.raises(WeightUpdateError, match="1 of 2 receivers did not connect") as error,
    ):
        waiting = Receiving(Rank(), sender)
        sender.send(ModelSource(checkpoint()))
    assert error.value.details["missing"] == ["fake:1"]
    assert isinstance(waiting.join().error, WeightUpdateError)


def session_in_the_middle(sender):
    """A receiver that goes silent after it accepted: its connection."""
    connection = connect(sender)
    connection.send(wire.Hello(wire.PROTOCOL, "fake:9", sender.token, 9), 1.0)

    def accept():
        _, fds = connection.receive_with_fds(wire.Offer, timeout_s=10)
        wire.close_fds(fds)
        connection.send(wire.Accept([]), 1.0)

    threading.Thread(target=accept, daemon=True).start()
    return connection


def test_a_receiver_that_stalls_is_named_and_the_others_are_told():
    rank = Rank()
    with WeightSender(2, bucket_bytes=256, timeout_s=6) as sender:
        silent = session_in_the_middle(sender)
        thread = Receiving(rank, sender)
        with pytest.raises(WeightUpdateError, match="rank 9 on fake:9 stalled") as error:
            sender.send(ModelSource(checkpoint()))
    assert error.value.details["stalled_ranks"] == [9]
    assert "rank 9" in str(thread.join().error)
    assert rank.manager.content is Content.FAILED
    silent.close()


def test_a_trainer_that_stalls_does_not_hang_the_engine():
    rank = Rank()
    with WeightSender(1, bucket_bytes=256, timeout_s=10) as sender:

        def stall(tensors):
            yield next(tensors)
            thread.join()
            yield from tensors

        thread = Receiving(rank, sender, timeout_s=4.0)
        with pytest.raises(WeightUpdateError, match="the trainer stalled"):
            sender.send(Source(checkpoint(), stall))
    assert thread.join().error.details["reason"] == "stalled"
    assert rank.manager.content is Content.FAILED


TRAINER = """
import sys, time
sys.path[:0] = {path!r}
from toys import checkpoint
from test_update import Source
from rl_memory_plugins.weights.sender import WeightSender

def first_only(tensors):
    for number, item in enumerate(tensors):
        if number == 2:
            print("sent", flush=True)
            time.sleep(60)
        yield item

with WeightSender(1, bucket_bytes=1, slots=1, timeout_s=60, directory={directory!r}) as sender:
    print(sender.endpoints["*"], sender.token, flush=True)
    sender.send(Source(checkpoint(), first_only))
"""


def test_a_trainer_that_is_killed_leaves_failed_weights_and_nothing_else(tmp_path):
    before = counts()
    script = TRAINER.format(path=[str(Path(__file__).parent), *sys.path], directory=str(tmp_path))
    trainer = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    path, token = trainer.stdout.readline().split()
    rank = Rank()
    outcome = []

    def receive():
        try:
            rank.receiver.receive({"*": path}, token, 30.0)
        except WeightUpdateError as error:
            outcome.append(error)

    thread = threading.Thread(target=receive, daemon=True)
    thread.start()
    assert trainer.stdout.readline() == "sent\n"
    time.sleep(0.2)
    assert rank.manager.content is Content.UPDATING
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    thread.join(30)
    assert outcome and outcome[0].details["reason"] == "lost" and outcome[0].code == "WeightUpdateError"
    rank.manager.finish_writing(False)
    assert rank.manager.content is Content.FAILED
    trainer.stdout.close()
    assert left_since(before) == NOTHING
    tensors = checkpoint(9)
    update([rank], tensors)
    rank.model.assert_unchanged(loaded(tensors))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([(1, 0, 16)], "was next"),
        ([(0, 0, 8)], "invalid byte range"),
        ([(0, 1 << 40, 160)], "invalid byte range"),
        ([(0, -256, 160)], "invalid byte range"),
        ([], "committed without sending"),
        ([(0, 0, 160)], "committed without sending"),
    ],
)
def test_a_trainer_that_breaks_the_protocol_is_refused(entries, message):
    """A trainer that follows the handshake and then sends `entries` and a commit."""
    from rl_memory_plugins.weights.buffers import ShmStaging
    from rl_memory_plugins.weights.manifest import BucketEntry, Manifest

    rank = Rank(ToyModel(opaque=False))
    manifest = Manifest(ModelSource(checkpoint(opaque=False)).specs())
    buffer = ShmStaging(manifest.slot_bytes(), 2)
    with contextlib.closing(Listener(1, timeout_s=5.0)) as endpoint:
        thread = Receiving(rank, endpoint)
        endpoint.connect()
        connection = endpoint.ranks[0].connection
        description, fds = buffer.export()
        connection.send(wire.Offer(manifest, description), 5.0, fds)
        connection.receive(wire.Accept, timeout_s=5)
        connection.send(wire.Bucket(0, [BucketEntry(*entry) for entry in entries]), 5.0)
        with contextlib.suppress(WeightUpdateError):  # it may have given up already
            connection.send(wire.Commit(), 5.0)
        assert message in str(thread.join().error)
    assert rank.manager.content is (Content.FAILED if entries else Content.VALID)
    buffer.close()


def counts():
    gc.collect()
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "rl-memory" in line]
    return len(list(Path("/proc/self/fd").iterdir())), len(maps)


def left_since(before):
    """What `counts` counts more than before. What another test has left may go at any time, and is none of it."""
    return tuple(max(now - then, 0) for now, then in zip(counts(), before, strict=True))


NOTHING = (0, 0)


def test_fifty_sessions_leave_no_descriptor_mapping_or_directory(tmp_path):
    rank = Rank()
    broken = Rank(load_opaque=lambda weights: next(iter(weights)))
    update([rank], checkpoint())
    before = counts()
    for seed in range(50):
        with WeightSender(1, bucket_bytes=256, timeout_s=10, directory=tmp_path) as sender:
            mode = stat.S_IMODE(next(tmp_path.iterdir()).stat().st_mode)
            assert mode == 0o700
            thread = Receiving(broken if seed % 5 == 4 else rank, sender)
            try:
                sender.send(ModelSource(checkpoint(seed)))
            except WeightUpdateError:
                assert seed % 5 == 4
        thread.join()
        del thread
    assert left_since(before) == NOTHING
    assert not list(tmp_path.iterdir())
    sender.close()  # once more does no harm


def engine(rank):
    """What the engine does with the body of the HTTP call."""

    def post(body):
        rank.manager.require_writable()
        try:
            report = rank.receiver.receive(body["endpoints"], body["token"], body["timeout_s"])
        except Exception:
            rank.manager.finish_writing(False)
            raise
        rank.manager.finish_writing(True)
        return {"version": body["weight_version"], "report": report}

    return post


def test_push_weights_does_it_all():
    rank = Rank()
    tensors = checkpoint(6)
    report = push_weights(engine(rank), tensors, weight_version="step-6", timeout_s=10)
    assert report["engine"]["version"] == "step-6"
    assert report["engine"]["report"] == report["receivers"][0]
    rank.model.assert_unchanged(loaded(tensors))


def test_a_push_names_the_version_that_the_weights_must_have():
    def refuse(body):
        raise StateConflictError("another version", base_version=body.get("base_version"))

    def version_of(push):
        with pytest.raises(StateConflictError) as refused:
            push()
        return refused.value.details["base_version"]

    assert version_of(lambda: push_weights(refuse, checkpoint(), base_version="41")) == "41"
    assert version_of(lambda: push_weights(refuse, checkpoint())) is None
    tensors, config = {"a.lora_A.weight": torch.zeros(1, 2)}, {"r": 1}
    assert version_of(lambda: push_adapter(refuse, "policy", tensors, config, base_version="41")) == "41"


def test_push_weights_raises_the_more_specific_error_and_does_not_wait_it_out():
    start = time.monotonic()
    asleep = StateConflictError("the weights are asleep")

    def refuse(body):
        raise asleep

    with pytest.raises(StateConflictError, match="asleep"):
        push_weights(refuse, checkpoint(), timeout_s=30)
    with pytest.raises(ManifestError) as error:
        push_weights(engine(Rank()), checkpoint() | {"bogus": torch.zeros(1)}, timeout_s=30)
    assert error.value.details["mismatches"][0]["ranks"] == [0]

    def finish_fails(body):
        engine(Rank())(body)
        raise StateConflictError("the prefix cache could not be reset")

    with pytest.raises(StateConflictError, match="prefix cache"):
        push_weights(finish_fails, checkpoint(), timeout_s=30)
    with pytest.raises(WeightUpdateError, match="did not answer"):
        push_weights(lambda body: (engine(Rank())(body), time.sleep(12)), checkpoint(), timeout_s=6)
    assert time.monotonic() - start < 29


def test_a_push_without_a_thread_leaves_nothing(monkeypatch, tmp_path):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(WeightUpdateError, match="can't start new thread"):
        push_weights(engine(Rank()), checkpoint(), directory=tmp_path, timeout_s=10)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("timeout_s", [0, -1, 1e300, float("nan")])
def test_a_time_that_cannot_be_waited_is_refused(timeout_s):
    with pytest.raises(InvalidRequestError, match="timeout_s"):
        WeightSender(1, timeout_s=timeout_s)


def failing_loader(weights):
    for name, _ in weights:
        raise RuntimeError(f"cannot pack {name}")


def cut_off(rank):
    """An engine that breaks in the middle, and answers with an error of its own."""

    def post(body):
        with contextlib.suppress(WeightUpdateError):
            engine(rank)(body)
        raise StateConflictError("broken")

    return post


def test_a_failed_update_leaves_its_source_at_once():
    source = Tracked(checkpoint())
    with no_collection(), WeightSender(1, bucket_bytes=256, timeout_s=10) as sender:
        thread = Receiving(Rank(load_opaque=failing_loader), sender)
        try:
            sender.send(source)
        except WeightUpdateError as error:
            assert source.given and source.open == source.alive() == 0  # while the error is still held
            gone = weakref.ref(error)
        assert gone() is None
    thread.join()


def test_a_tensor_that_is_sent_in_parts_is_given_up_with_its_update():
    source = Tracked({"embed.weight": torch.zeros(10, 8, dtype=torch.bfloat16)})
    with no_collection(), WeightSender(1, bucket_bytes=16, timeout_s=5) as sender:
        silent = session_in_the_middle(sender)
        with pytest.raises(WeightUpdateError, match="stalled"):
            sender.send(source)
        assert source.given == 1 and source.open == source.alive() == 0
        silent.close()


def test_a_failed_push_leaves_its_source_and_its_error_at_once():
    source = Tracked(checkpoint())
    with no_collection():
        try:
            push_weights(cut_off(Rank(load_opaque=failing_loader)), source, timeout_s=10)
        except StateConflictError as error:
            assert source.given and source.open == source.alive() == 0
            gone = weakref.ref(error)
        assert gone() is None


def test_an_engine_that_refuses_leaves_no_cycle():
    def refuse(body):
        raise StateConflictError("asleep")

    with no_collection():
        try:
            push_weights(refuse, checkpoint(), timeout_s=10)
        except StateConflictError as error:
            gone = weakref.ref(error)
        assert gone() is None


@pytest.mark.parametrize("missing", ["gone", "file/below"])
def test_a_directory_that_is_not_there_is_refused(tmp_path, missing):
    (tmp_path / "file").touch()
    before = counts()
    with pytest.raises(InvalidRequestError, match=missing) as caught:
        WeightSender(1, directory=tmp_path / missing)
    assert caught.value.details["field"] == "directory"
    assert caught.value.details["got"] == str(tmp_path / missing)
    del caught
    assert left_since(before) == NOTHING


def test_a_module_is_sent_with_tied_weights_once_and_in_the_dtype_asked_for():
    module = torch.nn.Module()
    module.embed = torch.nn.Linear(2, 3, bias=False)
    module.head = torch.nn.Linear(2, 3, bias=False)
    module.head.weight = module.embed.weight
    module.register_buffer("bias", torch.zeros(2, dtype=torch.int64))
    module.register_buffer("scratch", torch.zeros(2), persistent=False)
    source = ModelSource(module, dtype=torch.bfloat16)
    assert [(spec.name, spec.dtype) for spec in source.specs()] == [
        ("bias", "int64"),
        ("embed.weight", "bfloat16"),
    ]
    sent = dict(source.tensors())
    assert torch.equal(sent["embed.weight"], module.embed.weight.detach().bfloat16())


def processor_seconds_of_an_update(count):
    """The seconds of processors that an update of `count` small tensors takes, on both sides."""
    model = torch.nn.Module()
    model.experts = torch.nn.Parameter(torch.zeros(count, 4), requires_grad=False)

    def load_weights(weights):
        for name, weight in weights:
            model.experts.data[int(name)].copy_(weight)

    model.load_weights = load_weights
    rank = Rank(model)
    values = torch.arange(count * 4.0).view(count, 4)
    start = time.process_time()
    update([rank], {str(i): values[i] for i in range(count)}, bucket_bytes=1 << 20, timeout_s=300)
    took = time.process_time() - start
    assert torch.equal(model.experts, values)
    return took


def test_ten_times_the_tensors_take_about_ten_times_as_long():
    """A search through all names for each name would take a hundred times as long."""
    few, many = processor_seconds_of_an_update(2_000), processor_seconds_of_an_update(20_000)
    assert many < 35 * few


@pytest.mark.parametrize("opaque", [False, True])
def test_an_update_of_all_but_the_kept_weights_is_complete(opaque):
    """The same manifest is not complete once nothing is kept any more."""
    rank = Rank(ToyModel(opaque=opaque))
    tensors = checkpoint(opaque=opaque)
    update([rank], tensors)
    before = rank.model.snapshot()
    others = checkpoint(1, opaque=opaque)
    del others["norm.weight"], others["embed.weight"]
    for _ in range(2):
        rank.manager.content = Content.STALE
        rank.manager._kept = KeptWeights(frozenset({"norm", "embed"}))
        _, (receiving,) = update([rank], others)
        assert receiving.error is None
        assert rank.manager.content is Content.VALID
    assert torch.equal(rank.model.norm, before["norm"])
    assert torch.equal(rank.model.embed, before["embed"])
    assert torch.equal(rank.model.o, others["o.weight"])
    outcome, (receiving,) = update([rank], others)
    assert isinstance(outcome, ManifestError)
    assert {m["name"] for m in outcome.details["mismatches"]} == {"norm", "embed"}
