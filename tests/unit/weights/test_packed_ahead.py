"""Buckets that are packed while the one before them travels to another GPU: the order, and what waits for what."""

import weakref

import pytest
import torch
from fake_gpu import OneByOne, gpu_rank
from test_transports import send
from toys import ToyModel, checkpoint, loaded

from rl_memory_plugins.errors import UnsupportedError, WeightUpdateError
from rl_memory_plugins.tags import Content
from rl_memory_plugins.weights import bucket_sizes, buffers, routes, wire
from rl_memory_plugins.weights.buffers import staged
from rl_memory_plugins.weights.communicators import SEAL_BYTES
from rl_memory_plugins.weights.manifest import BucketEntry, Manifest
from rl_memory_plugins.weights.packing import Packing
from rl_memory_plugins.weights.routes import Route
from rl_memory_plugins.weights.source import name_of, spec_of


class OnFirst(torch.Tensor):
    """A host tensor that says it lies on the first GPU."""

    is_cuda = True
    device = torch.device("cuda", 0)


class OnSecond(OnFirst):
    device = torch.device("cuda", 1)


class FakeStream:
    order = None  # where to note waits for other streams

    def __init__(self, name):
        self.cuda_stream = name
        self.waits = []  # for itself, or for other streams

    def synchronize(self):
        self.waits.append(self)

    def wait_stream(self, other):
        self.waits.append(other)
        if self.order is not None:
            self.order.append(f"{self.cuda_stream} waits for {other.cuda_stream}")

    def record_event(self):
        return f"event of {self.cuda_stream}"

    def __ne__(self, other):  # as torch's streams, which are not `!=` what is no stream
        return isinstance(other, FakeStream) and self is not other

    __hash__ = object.__hash__


@pytest.fixture
def streams(monkeypatch):
    """The current streams of the two GPUs."""
    found = {0: FakeStream("first"), 1: FakeStream("second")}
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: found[device if isinstance(device, int) else device.index]
    )
    monkeypatch.setattr(staged, "gpu_name", lambda index: f"GPU-{index}")
    return found


def staging_on(kind, device, place, slots=2, **options):
    staging = getattr(buffers, kind)(device, 4096, slots, **options)
    staging._slots = [slot.as_subclass(place) for slot in staging._slots]
    return staging


def put(staging, slot, number, tensor):
    staging.put(slot, BucketEntry(number, 256 * number, tensor.nbytes), spec_of(str(number), tensor), tensor)


def at(staging, slot, number, like):
    memory = staging._slots[slot].as_subclass(torch.Tensor)
    return buffers.typed(memory, 256 * number, like.nbytes, "float32", like.shape)


VALUES = torch.arange(12, dtype=torch.float32).view(3, 4)
BOTH_GPUS = pytest.mark.parametrize("place", [OnFirst, OnSecond], ids=["another GPU", "the same GPU"])


def test_a_tensor_on_another_gpu_is_copied_on_its_own_stream_and_no_thread_waits(gpus, streams):
    staging = staging_on("CudaStaging", "GPU-1", OnSecond)
    put(staging, 1, 0, VALUES.as_subclass(OnFirst))
    put(staging, 1, 1, (VALUES + 1)[1:].as_subclass(OnFirst))
    assert gpus["GPU-0"].copied == [(48, "first"), (32, "first")]
    assert torch.equal(at(staging, 1, 0, VALUES), VALUES) and torch.equal(at(staging, 1, 1, VALUES[1:]), VALUES[1:] + 1)
    assert staging.publish() == ["event of first"] and streams[0].waits == streams[1].waits == []
    staging.close()
    assert streams[0].waits == [streams[0]]  # before the memory is freed


@pytest.fixture
def own_streams(monkeypatch):
    """The streams that are made."""
    made = []

    def make(gpu, priority):
        made.append(FakeStream(f"own of {gpu}"))
        return made[-1]

    monkeypatch.setattr(torch.cuda, "Stream", make)
    return made


def test_tensors_that_do_not_change_are_copied_together_between_what_their_stream_is_given(
    gpus, streams, own_streams, monkeypatch
):
    order, copy_many = [], gpus["GPU-0"].copy_many
    monkeypatch.setattr(FakeStream, "order", order)
    monkeypatch.setattr(gpus["GPU-0"], "copy_many", lambda *copies: order.append("copies") or copy_many(*copies))
    staging = staging_on("CudaStaging", "GPU-1", OnSecond, stable=True)
    for number in range(3):
        put(staging, 1, number, (VALUES + number).as_subclass(OnFirst))
    put(staging, 1, 3, torch.empty(0).as_subclass(OnFirst))
    assert gpus["GPU-0"].copied == []
    assert sorted(staging.publish()) == ["event of first", "event of own of 0"]
    (own,) = own_streams
    assert gpus["GPU-0"].copied == [([48, 48, 48], "own of 0")]
    assert order == ["own of 0 waits for first", "copies", "first waits for own of 0"]
    for number in range(3):
        assert torch.equal(at(staging, 1, number, VALUES), VALUES + number)
    put(staging, 0, 0, (VALUES + 9).as_subclass(OnFirst))
    staging.publish()
    assert gpus["GPU-0"].copied[1:] == [(48, "first")] and torch.equal(at(staging, 0, 0, VALUES), VALUES + 9)
    staging.close()


def test_a_group_of_copies_begins_when_it_is_large_or_its_stream_changes(gpus, streams, own_streams, monkeypatch):
    monkeypatch.setattr(staged, "GROUP_BYTES", 96)
    staging = staging_on("CudaStaging", "GPU-1", OnSecond, stable=True)
    put(staging, 0, 0, VALUES.as_subclass(OnFirst))
    put(staging, 0, 1, VALUES.as_subclass(OnFirst))
    assert gpus["GPU-0"].copied == [([48, 48], "own of 0")]
    put(staging, 0, 2, VALUES.as_subclass(OnFirst))
    streams[0] = FakeStream("other")
    put(staging, 0, 3, VALUES.as_subclass(OnFirst))
    assert gpus["GPU-0"].copied[1:] == [(48, "first")]
    assert sorted(staging.publish()) == ["event of first", "event of other", "event of own of 0"]
    assert gpus["GPU-0"].copied[2:] == [(48, "other")]
    staging.close()


def test_tensors_that_something_else_holds_are_copied_a_bucket_at_a_time(gpus, streams, own_streams, monkeypatch):
    """Each copy of several has a cost of its own, and to wait with it takes no memory."""
    monkeypatch.setattr(staged, "GROUP_BYTES", 96)
    staging = staging_on("CudaStaging", "GPU-1", OnSecond, stable=True, held=True)
    for number in range(5):
        put(staging, 0, number, VALUES.as_subclass(OnFirst))
    assert gpus["GPU-0"].copied == []
    staging.publish()
    assert gpus["GPU-0"].copied == [([48] * 5, "own of 0")]
    staging.close()


def unknown(address):
    raise UnsupportedError("no allocation contains it")


@pytest.mark.parametrize(
    ("order", "offsets", "copies"),
    [
        ([0, 1, 2, 3], [0, 1, 2, 3], [1024]),
        ([0, 1, 3, 2], [0, 1, 2, 3], [512, 256, 256]),
        ([0, 1, 2, 3], [0, 1, 3, 4], [512, 512]),  # the slot has room in between
        ([2, 3, 0, 1], [0, 1, 2, 3], [512, 512]),
    ],
)
@pytest.mark.parametrize("case", ["one allocation", "two allocations", "unknown memory"])
def test_tensors_that_lie_together_in_one_allocation_are_one_copy(
    gpus, streams, own_streams, monkeypatch, order, offsets, copies, case
):
    made = {str(number): torch.full((64,), float(number)) for number in range(4)}
    placed = list(gpus["GPU-0"].place(made, per_allocation=4).values())
    start = placed[0].data_ptr()
    if case == "unknown memory":
        monkeypatch.setattr(gpus["GPU-0"], "bytes_from", unknown)
    elif case == "two allocations":  # neighbours of which no copy may cover both
        ends = [start + 512, start + 1024]
        ends_of = lambda address: next(end for end in ends if address < end) - address  # noqa: E731
        monkeypatch.setattr(gpus["GPU-0"], "bytes_from", ends_of)
        copies = {1: [512, 512]}.get(len(copies), copies)
    expected = [256] * 4 if case == "unknown memory" else copies
    staging = staging_on("CudaStaging", "GPU-1", OnSecond, stable=True, held=True)
    for number, place in zip(order, offsets, strict=True):
        put(staging, 0, place, placed[number].as_subclass(OnFirst))
    staging.publish()
    ((sizes, _),) = gpus["GPU-0"].copied
    assert sizes == (expected if len(expected) > 1 else expected[0])
    for number, place in zip(order, offsets, strict=True):
        assert torch.equal(at(staging, 0, place, made[str(number)]), made[str(number)])
    staging.close()


@BOTH_GPUS
def test_tensors_are_copied_on_the_streams_on_which_they_were_made(gpus, streams, own_streams, place):
    staging = staging_on("CudaStaging", "GPU-1", OnSecond, stable=True)
    a, b = FakeStream("a"), FakeStream("b")
    for number, stream in enumerate([a, a, b, a]):
        streams[place.device.index] = stream
        put(staging, 0, number, VALUES.as_subclass(place))
    staging.publish()
    copied = gpus[f"GPU-{place.device.index}"].copied
    assert [sizes for sizes, _ in copied] == [[48] * 2, 48, 48]
    assert own_streams[0].waits[0] is a and [stream for _, stream in copied][1:] == ["b", "a"]
    staging.close()


def test_tensors_of_two_gpus_that_alternate_are_copied_together_too(gpus, streams, own_streams):
    staging = staging_on("CudaStaging", "GPU-1", OnSecond, stable=True)
    for number in range(6):
        put(staging, 0, number, (VALUES + number).as_subclass(OnSecond if number % 2 else OnFirst))
    staging.publish()
    for gpu in gpus.values():
        assert [sizes for sizes, _ in gpu.copied] == [[48] * 3]
    for number in range(6):
        assert torch.equal(at(staging, 0, number, VALUES), VALUES + number)
    staging.close()


def test_copies_that_have_not_begun_are_given_up_with_the_update(gpus, streams, own_streams):
    staging = staging_on("CudaStaging", "GPU-1", OnSecond, stable=True)
    put(staging, 0, 0, VALUES.as_subclass(OnFirst))
    staging.close()
    assert gpus["GPU-0"].copied == []


def test_a_tensor_that_does_not_lie_as_it_is_sent_is_copied_by_torch_and_waited_for_too(gpus, streams):
    staging = staging_on("CudaStaging", "GPU-1", OnSecond)
    put(staging, 0, 0, VALUES.as_subclass(OnFirst))
    put(staging, 0, 1, VALUES.t().as_subclass(OnFirst))
    assert len(gpus["GPU-0"].copied) == 1 and torch.equal(at(staging, 0, 1, VALUES.t()), VALUES.t())
    assert sorted(staging.publish()) == ["event of first", "event of second"]
    staging.close()


@pytest.mark.parametrize("start", [0, 4])
@BOTH_GPUS
def test_a_tensor_on_a_gpu_without_memory_is_refused_and_not_read(gpus, streams, place, start):
    staging = staging_on("CudaStaging", "GPU-1", OnSecond)
    tensor = torch.ones(12)
    part = tensor[start:].as_subclass(place)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(WeightUpdateError, match="has no memory"):
        put(staging, 0, 0, part)
    assert gpus["GPU-0"].copied == gpus["GPU-1"].copied == []
    staging.close()


@BOTH_GPUS
def test_a_tensor_that_leaves_its_memory_before_its_copy_begins_is_not_read(gpus, streams, own_streams, place):
    staging = staging_on("CudaStaging", "GPU-1", OnSecond, stable=True)
    leaving = torch.ones(12)
    for number, tensor in enumerate([VALUES, leaving]):
        put(staging, 0, number, tensor.as_subclass(place))
    leaving.untyped_storage().resize_(0)
    with pytest.raises(WeightUpdateError, match="has left its memory"):
        staging.publish()
    assert gpus["GPU-0"].copied == gpus["GPU-1"].copied == []
    staging.close()


@BOTH_GPUS
def test_a_tensor_that_consists_of_others_is_left_to_torch(gpus, streams, monkeypatch, place):
    """Such as a quantised one, which has no memory of its own."""
    given = []

    class Apart(place):
        __tensor_flatten__ = None

        def data_ptr(self):
            return 0

    tensor = VALUES.as_subclass(Apart)
    monkeypatch.setattr(OnSecond, "copy_", lambda self, source, **options: given.append(source))
    staging = staging_on("CudaStaging", "GPU-1", OnSecond, stable=True)
    put(staging, 0, 0, tensor)
    staging.put_whole(1, [BucketEntry(1, 0, 48)], [spec_of("1", tensor)], iter([("1", tensor)]))
    assert given == [tensor, tensor] and gpus["GPU-0"].copied == gpus["GPU-1"].copied == []
    staging.close()


@pytest.mark.parametrize("count", [1, 2])
@BOTH_GPUS
def test_copies_that_the_driver_refuses_fail_the_update(gpus, streams, own_streams, monkeypatch, place, count):
    def refuse(*arguments):
        raise UnsupportedError(
            "cuMemcpy failed with CUDA_ERROR_INVALID_VALUE (1)", cuda_error="CUDA_ERROR_INVALID_VALUE"
        )

    for call in ("copy", "copy_many"):
        monkeypatch.setattr(gpus[f"GPU-{place.device.index}"], call, refuse)
    staging = staging_on("CudaStaging", "GPU-1", OnSecond, stable=True)
    for number in range(count):
        put(staging, 0, number, (VALUES + number).as_subclass(place))
    with pytest.raises(WeightUpdateError, match="a GPU cannot copy") as error:
        staging.publish()
    assert error.value.details == {"cuda_error": "CUDA_ERROR_INVALID_VALUE"}
    staging.close()


@pytest.mark.parametrize("case", ["one gpu", "no way", "host"])
def test_otherwise_a_bucket_is_whole_when_it_is_published(gpus, streams, monkeypatch, case):
    if case == "no way":
        gpus["GPU-0"].denied = {"reach"}
    staging = staging_on("CudaStaging", "GPU-1", OnSecond)
    if case == "host":
        monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
        put(staging, 0, 1, VALUES.as_subclass(OnFirst))
        put(staging, 0, 0, VALUES)
    else:
        put(staging, 0, 0, VALUES.as_subclass(OnSecond if case == "one gpu" else OnFirst))
    assert list(staging.publish()) == []
    assert streams[1].waits[-1] is streams[1] and torch.equal(at(staging, 0, 0, VALUES), VALUES)
    if case == "host":
        assert streams[0].waits == [streams[0]]
        put(staging, 1, 0, VALUES.as_subclass(OnFirst))
        assert len(staging.publish()) > 0  # the next bucket has nothing of the host's
    staging.close()


def test_what_nccl_sends_is_behind_all_copies_and_no_thread_waits(gpus, streams, monkeypatch):
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory, **options: torch.zeros(*size, **options))
    staging = staging_on("NcclStaging", "GPU-0", OnFirst)
    other = FakeStream("other")
    current, streams[0] = streams[0], other
    put(staging, 0, 0, VALUES.as_subclass(OnFirst))
    streams[0] = current
    assert list(staging.publish()) == [] and current.waits == [other] and other.waits == []
    entries = [BucketEntry(0, 0, 48)]
    for seal in (b"a" * SEAL_BYTES, b"b" * SEAL_BYTES):
        sent = staging.sent(0, entries, seal)
        assert bytes(sent.tolist()) == bytes(VALUES.view(torch.uint8).flatten().tolist()) + seal
    assert len(staging.sent(0, entries, b"")) == 48
    staging.close()
    assert other.waits == [other]  # what is given up early may still be read


def test_what_nccl_sends_waits_for_the_copies_that_begin_last(gpus, streams, own_streams, monkeypatch):
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory, **options: torch.zeros(*size, **options))
    order, copy_many = [], gpus["GPU-0"].copy_many
    monkeypatch.setattr(FakeStream, "order", order)
    monkeypatch.setattr(gpus["GPU-0"], "copy_many", lambda *copies: order.append("copies") or copy_many(*copies))
    staging = staging_on("NcclStaging", "GPU-0", OnFirst, stable=True, held=True)
    for number in (0, 2, 1):  # no neighbours
        put(staging, 0, number, (VALUES + number).as_subclass(OnFirst))
    assert list(staging.publish()) == []
    own = "own of 0"
    assert order == [f"{own} waits for first", "copies", f"first waits for {own}", f"first waits for {own}"]
    assert streams[0].waits == own_streams[0:1] * 2
    staging.close()


def test_pieces_that_are_cut_for_a_rank_are_copied_at_once(gpus, streams, monkeypatch):
    """Nothing else holds them: together they would take as much memory as a slot."""
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory, **options: torch.zeros(*size, **options))
    staging = staging_on("NcclStaging", "GPU-0", OnFirst, stable=True, held=True)
    staging.copy_at_once()
    put(staging, 0, 0, VALUES.as_subclass(OnFirst))
    assert gpus["GPU-0"].copied == [(48, "first")]
    staging.close()


def test_what_nccl_sends_from_host_memory_has_been_read(gpus, streams, monkeypatch):
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory, **options: torch.zeros(*size, **options))
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
    staging = buffers.NcclStaging("GPU-0", 4096, 2, stable=True)
    staging._slots = [slot.as_subclass(OnFirst) for slot in staging._slots]
    put(staging, 0, 0, VALUES)
    staging.publish()
    assert streams[0].waits == [streams[0]]
    staging.close()


@pytest.mark.parametrize("stable", [True, False])
@BOTH_GPUS
def test_staging_on_a_gpu_takes_tensors_of_any_layout(gpus, streams, own_streams, stable, place):
    tensors = [
        VALUES.t(),
        torch.arange(40, dtype=torch.bfloat16)[8:24].view(2, 8),  # not at the start of its memory
        torch.randn(5, 3).to(torch.float8_e4m3fn),
        torch.ones(3).to(torch.float8_e8m0fnu),
        torch.ones(3, dtype=torch.uint16),
        torch.tensor(7, dtype=torch.int64),
        torch.tensor([[True], [False]]),
        torch.zeros(0, 4, dtype=torch.float16),
        torch.ones(3, dtype=torch.bfloat16),
    ]
    staging = staging_on("CudaStaging", "GPU-1", OnSecond, stable=stable)
    for slot in (1, 0):
        for number, tensor in enumerate(tensors):
            put(staging, slot, number, tensor.as_subclass(place))
        staging.publish()
        memory = staging._slots[slot].as_subclass(torch.Tensor)
        for number, tensor in enumerate(tensors):
            arrived = buffers.typed(memory, 256 * number, tensor.nbytes, name_of(tensor.dtype), tensor.shape)
            assert torch.equal(arrived.to(torch.float64), tensor.to(torch.float64)), number
    staging.close()


class OfFirst(OneByOne):
    """Tensors of the first GPU, one after the other in one allocation, as torch places many."""

    def __init__(self, gpu, tensors):
        self.held = gpu.place(tensors, per_allocation=len(tensors))
        super().__init__(self.held)

    def tensors(self):
        return ((name, tensor.as_subclass(OnFirst)) for name, tensor in self.held.items())


@pytest.mark.parametrize(("held", "copies"), [(True, [2304]), (False, [1536, 768])], ids=["held", "not held"])
def test_nccl_sends_neighbours_on_its_own_gpu_as_one_copy(gpus, streams, own_streams, monkeypatch, held, copies):
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory, **options: torch.zeros(*size, **options))
    monkeypatch.setattr(staged, "GROUP_BYTES", 1536)
    put_whole = buffers.NcclStaging.put_whole
    staging, whole = staging_on("NcclStaging", "GPU-0", OnFirst, stable=True, held=held), []
    monkeypatch.setattr(
        buffers.NcclStaging, "put_whole", lambda *given: whole.extend(given[2]) or put_whole(*given), raising=False
    )
    tensors = {str(number): torch.full((64,), float(number)) for number in range(9)}
    source = OfFirst(gpus["GPU-0"], tensors)
    manifest = Manifest(source.specs(), 4096, 2)
    (entries,) = manifest.buckets()
    packing = Packing(source, manifest, [Route("nccl", staging)])
    packed = packing.pack(1, entries)
    packing.finish()
    assert [nbytes for nbytes, _ in gpus["GPU-0"].copied] == copies and packed.copies == []
    sent = staging.sent(1, entries, b"")
    assert torch.equal(sent.as_subclass(torch.Tensor).view(torch.float32), torch.cat(list(tensors.values())))
    assert streams[0].waits == []  # no thread waits
    assert whole == entries
    staging.close()


class Copy:
    """A copy that ends when it is waited for, or after some questions."""

    def __init__(self, log, number, questions):
        self._log, self._number, self._questions = log, number, questions

    def query(self):
        self._questions -= 1
        return self._questions < 0

    def synchronize(self):
        self._log.append(("ended", self._number))


@pytest.fixture
def log(monkeypatch):
    """What happens in the trainer. The copies of each bucket to a GPU have only begun when it is packed."""
    found, publish, deliver = [], buffers.CudaStaging.publish, wire.Connection.send
    monkeypatch.setattr(Copy, "questions", 1 << 30, raising=False)

    def begun(self):
        publish(self)
        number = sum(what == "packed" for what, _ in found)
        found.append(("packed", number))
        return [Copy(found, number, Copy.questions)]

    def noted(connection, message, *arguments):
        if isinstance(message, wire.Bucket):
            found.append(("announced", sum(what == "announced" for what, _ in found)))
        deliver(connection, message, *arguments)

    monkeypatch.setattr(buffers.CudaStaging, "publish", begun)
    monkeypatch.setattr(wire.Connection, "send", noted)
    return found


@pytest.mark.parametrize(("slots", "questions"), [(2, 99), (3, 99), (1, 99), (2, 0), (2, 1)])
def test_a_bucket_is_announced_once_its_copies_have_ended_with_the_next_one_behind_them(
    gpus, log, monkeypatch, slots, questions
):
    monkeypatch.setattr(Copy, "questions", questions)  # one before the slot is awaited, one after it
    rank, tensors = gpu_rank(), checkpoint(3)
    report, (thread,) = send([rank], OneByOne(tensors), bucket_bytes=512, slots=slots)
    assert thread.error is None and report["transport"] == "cuda_ipc" and report["buckets"] > 4
    numbers, overlaps = range(report["buckets"]), slots > 1 and questions > 1
    expected = [("packed", 0)] if overlaps else []
    for number in numbers:
        packed = number + overlaps
        expected += [("packed", packed)] if packed in numbers else []
        expected += [("ended", number), ("announced", number)]
    assert log == expected
    rank.model.assert_unchanged(loaded(tensors))


def test_a_source_that_fails_while_a_bucket_travels_leaves_it_unannounced_and_nothing_open(gpus, log):
    class Failing(OneByOne):
        def tensors(self):
            yield from list(super().tensors())[:3]
            raise RuntimeError("the gather failed")

    rank = gpu_rank(ToyModel(opaque=False))
    former = rank.model.snapshot()
    outcome, _ = send([rank], Failing(checkpoint(3, opaque=False)), bucket_bytes=512)
    assert isinstance(outcome, WeightUpdateError) and "the gather failed" in str(outcome)
    assert ("packed", 0) in log and not any(what == "announced" for what, _ in log)
    assert rank.manager.content is Content.VALID and not gpus["GPU-0"].mapped
    rank.model.assert_unchanged(former)


def test_buckets_for_another_gpu_are_smaller(gpus, monkeypatch):
    monkeypatch.setattr(routes, "PEER_BUCKET_BYTES", 256)
    monkeypatch.setattr(bucket_sizes, "MIN_STAGED_BUCKET_BYTES", 1024)
    for number, smaller in ((0, False), (1, True)):
        ranks = [gpu_rank(ToyModel(opaque=False), number)]
        placed = gpus["GPU-0"].place(checkpoint(3, opaque=False))
        report, _ = send(ranks, placed, transport="cuda_ipc", bucket_bytes=1024)
        assert (report["staging_bytes"] <= 2 * 512) == smaller


class FromFirst(OneByOne):
    """Tensors of the first GPU, for an engine on the second."""

    def tensors(self):
        return ((name, tensor.as_subclass(OnFirst)) for name, tensor in super().tensors())


@pytest.fixture
def on_second(monkeypatch):
    """Slots that say they lie on the second GPU."""
    make = buffers.CudaStaging.__init__

    def made(self, *arguments, **options):
        make(self, *arguments, **options)
        self._slots = [slot.as_subclass(OnSecond) for slot in self._slots]

    monkeypatch.setattr(buffers.CudaStaging, "__init__", made)
    monkeypatch.setattr(buffers.CudaStaging, "publish", lambda self: self._begin_copies() or ())


@pytest.mark.parametrize("bucket_bytes", [64, 256, 512, 1 << 20])
def test_tensors_of_another_gpu_arrive_whole_or_in_parts(gpus, streams, own_streams, on_second, bucket_bytes):
    rank, tensors = gpu_rank(rank=1), checkpoint(3)
    report, _ = send([rank], FromFirst(tensors), bucket_bytes=bucket_bytes, transport="cuda_ipc")
    copied = sum(sum(nbytes) if isinstance(nbytes, list) else nbytes for nbytes, _ in gpus["GPU-0"].copied)
    assert copied == report["bytes"]
    rank.model.assert_unchanged(loaded(tensors))


@BOTH_GPUS
def test_a_lazy_negation_on_a_gpu_is_in_the_bytes(gpus, streams, own_streams, on_second, place):
    class Negated(OneByOne):
        def tensors(self):
            return ((name, torch._neg_view(tensor.neg()).as_subclass(place)) for name, tensor in super().tensors())

    rank, tensors = gpu_rank(rank=1), checkpoint(3)
    send([rank], Negated(tensors), transport="cuda_ipc")
    rank.model.assert_unchanged(loaded(tensors))


@pytest.mark.parametrize("bucket_bytes", [256, 1 << 20])
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("ends", "the source ended before it yielded o.weight"),
        ("name", "the source yielded x.weight"),
        ("shape", "the source yielded o.weight torch.bfloat16"),
        ("dtype", "the source yielded o.weight torch.float32"),
    ],
)
def test_a_source_on_another_gpu_that_does_not_yield_what_it_lists(
    gpus, streams, own_streams, on_second, fault, message, bucket_bytes
):
    class Faulty(FromFirst):
        def tensors(self):
            for name, tensor in super().tensors():
                if name != "o.weight":
                    yield name, tensor
                elif fault == "ends":
                    return
                elif fault == "name":
                    yield "x.weight", tensor
                else:
                    yield name, tensor.float() if fault == "dtype" else tensor[:1]

    rank = gpu_rank(rank=1)
    outcome, _ = send([rank], Faulty(checkpoint(3)), transport="cuda_ipc", bucket_bytes=bucket_bytes)
    assert isinstance(outcome, WeightUpdateError) and message in str(outcome)
    assert not gpus["GPU-1"].mapped


@pytest.mark.parametrize("transport", ["cuda_ipc", "shm"])
def test_a_source_that_makes_its_tensors_makes_each_when_the_last_has_gone(gpus, transport):
    class Making(OneByOne):
        last = staticmethod(lambda: None)

        def tensors(self):
            for name, tensor in self._source.tensors():
                assert self.last() is None, f"the last one lives when {name} is made"
                made = tensor.clone()
                self.last = weakref.ref(made)
                yield name, made
                del made

    rank, tensors = gpu_rank(), checkpoint(3)
    send([rank], Making(tensors), transport=transport, bucket_bytes=1 << 20)
    rank.model.assert_unchanged(loaded(tensors))
