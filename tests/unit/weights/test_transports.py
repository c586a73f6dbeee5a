"""How the bytes travel: which way is chosen, what happens when it fails, and what is left open afterwards."""

import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fake_gpu import OneByOne, gpu_rank
from links import through
from test_update import NOTHING, counts, left_since
from toys import Rank, Receiving, ToyModel, checkpoint, loaded

from integration.waiting import wait_until
from rl_memory_plugins.errors import (
    InvalidRequestError,
    OutOfMemoryError,
    RLMemoryError,
    StateConflictError,
    UnsupportedError,
    WeightUpdateError,
)
from rl_memory_plugins.memory.threads import on_this_gpu
from rl_memory_plugins.tags import Content
from rl_memory_plugins.trainer import ModelSource, push
from rl_memory_plugins.trainer.once import Once
from rl_memory_plugins.trainer.sources.model import as_source
from rl_memory_plugins.weights import bucket_sizes, buffers, cuda_ipc, open_allocations, routes, wire
from rl_memory_plugins.weights.buffers import DirectExport, ShmStaging
from rl_memory_plugins.weights.buffers.staged import _BounceBuffers
from rl_memory_plugins.weights.candidates import candidate_transports, left_out
from rl_memory_plugins.weights.communicators import COMMUNICATORS
from rl_memory_plugins.weights.host_copy import HostCopier
from rl_memory_plugins.weights.manifest import BucketEntry, TensorSpec
from rl_memory_plugins.weights.plan import LoadPlan
from rl_memory_plugins.weights.replay import Layout
from rl_memory_plugins.weights.sender import WeightSender


def send(ranks, source, **options):
    """The sender's report or error, and the receivers' threads, which have ended."""
    options.setdefault("bucket_bytes", 256)
    with WeightSender(len(ranks), timeout_s=10, **options) as endpoint:
        threads = [Receiving(rank, endpoint) for rank in ranks]
        try:
            outcome = endpoint.send(as_source(source))
        except RLMemoryError as error:
            outcome = error
    return outcome, [thread.join() for thread in threads]


@pytest.mark.parametrize(
    ("wanted", "device", "home", "expected"),
    [
        ("auto", "GPU-a", "GPU-a", ["cuda_direct", "cuda_ipc", "shm_pinned", "shm"]),
        ("auto", "GPU-a", None, ["cuda_ipc", "shm_pinned", "shm"]),
        ("auto", "GPU-b", "GPU-a", ["cuda_ipc", "shm_pinned", "shm"]),
        ("auto", "GPU-z", "GPU-a", ["shm_pinned", "shm"]),
        ("auto", "MIG-c", "GPU-a", ["shm_pinned", "shm"]),
        ("auto", "cpu:0", "GPU-a", ["shm"]),
        ("cuda_ipc", "GPU-z", None, ["cuda_ipc"]),
        ("shm", "GPU-a", "GPU-a", ["shm"]),
    ],
)
def test_the_order_in_which_transports_are_tried(wanted, device, home, expected):
    assert candidate_transports(wanted, device, {"GPU-a", "GPU-b"}, home) == expected


@pytest.mark.parametrize(
    ("device", "expected"),
    [("GPU-z", ["tcp"]), ("MIG-c", ["tcp"]), ("GPU-b", ["cuda_ipc", "tcp"]), ("cpu:0", ["tcp"])],
)
def test_the_order_for_ranks_that_have_connected_over_tcp_which_nccl_is_not_in(device, expected):
    assert candidate_transports("auto", device, {"GPU-a", "GPU-b"}, "GPU-a", local=False) == expected


@pytest.mark.parametrize("local", [True, False])
def test_the_report_says_why_nothing_between_gpus_was_tried(gpus, monkeypatch, local):
    monkeypatch.setattr(cuda_ipc, "local_gpus", lambda initialise=False: {"GPU-b": 1})
    rank = gpu_rank()  # on GPU-0, as on another host
    with WeightSender(1, bucket_bytes=256, timeout_s=20, advertise=None if local else "127.0.0.1") as sender:
        receiving = Receiving(rank, sender if local else through(sender, sender.endpoints["*"][1]))
        report = sender.send(ModelSource(checkpoint(3)))
    assert receiving.join().error is None
    assert report["transport"] in (["shm_pinned", "shm"] if local else ["tcp"])
    reasons = {one["transport"]: one["reason"] for one in report["fallbacks"] if one["device"] == "GPU-0"}
    assert "does not see the rank's GPU" in reasons["cuda_ipc"] and "named" in reasons["nccl"]


@pytest.mark.parametrize(("gpus", "why"), [({"GPU-b"}, "does not see the rank's GPU"), ({}, "has not used a GPU")])
def test_a_process_that_has_used_no_gpu_is_not_said_to_lack_the_ranks(gpus, why):
    """Such as one with all tensors in host memory: to look at the GPUs would take memory on one."""
    assert why in left_out("auto", "GPU-z", gpus)["cuda_ipc"]


@pytest.mark.parametrize("wanted", ["auto", "shm", "tcp"])
@pytest.mark.parametrize("device", ["cpu:0", "GPU-a"])
def test_nothing_is_left_out_of_what_is_named_or_of_what_has_no_gpu_or_ours(wanted, device):
    assert left_out(wanted, device, {"GPU-a"}) == {}


@pytest.mark.parametrize("transport", ["shm", "tcp", "gloo"])
def test_a_trainers_default_device_is_not_that_of_our_own_memory(transport):
    rank, tensors = Rank(), checkpoint(3)
    with torch.device("meta"), WeightSender(1, bucket_bytes=256, timeout_s=20, transport=transport) as sender:
        receiving = Receiving(rank, sender)
        sender.send(ModelSource(tensors))
    assert receiving.join().error is None
    rank.model.assert_unchanged(loaded(tensors))


def test_an_unknown_transport_is_refused_with_those_there_are():
    with pytest.raises(InvalidRequestError) as error:
        WeightSender(1, transport="pigeon")
    assert error.value.details["allowed"] == ["auto", *buffers.TRANSPORTS]


@pytest.mark.parametrize("opaque", [False, True])
def test_tensors_are_read_where_they_lie(gpus, opaque):
    gpu, rank = gpus["GPU-0"], gpu_rank(ToyModel(opaque=opaque))
    for seed in (1, 2):
        tensors = checkpoint(seed, opaque=opaque)
        report, (thread,) = send([rank], gpu.place(tensors, per_allocation=3))
        assert report["transport"] == thread.report["transport"] == "cuda_direct"
        assert report["buckets"] == 1 and report["fallbacks"] == []
        rank.model.assert_unchanged(loaded(tensors, opaque=opaque))
        assert gpu.mapped == []


def test_kept_allocations_are_opened_once_and_closed_for_the_trainer(gpus):
    gpu, rank = gpus["GPU-0"], gpu_rank(ToyModel(opaque=False))
    placed = gpu.place(checkpoint(1, opaque=False))
    for seed in range(5):
        tensors = checkpoint(seed, opaque=False)
        for name, tensor in tensors.items():
            placed[name].copy_(tensor)
        report, _ = send([rank], placed, keep_mapped=True)
        assert report["transport"] == "cuda_direct"
        rank.model.assert_unchanged(loaded(tensors, opaque=False))
    assert len(gpu.opened) == len(gpu.mapped) == len(placed)
    open_allocations.release_mapped()
    assert gpu.mapped == []  # at once: the trainer frees its memory next
    send([rank], placed, keep_mapped=True)
    assert len(gpu.opened) == 2 * len(placed)


def test_a_thread_that_spins_does_not_hold_up_the_closing_of_many_allocations(gpus, monkeypatch):
    gpu, rank, intervals = gpus["GPU-0"], gpu_rank(ToyModel(opaque=False)), []
    usual, close = sys.getswitchinterval(), gpu.close

    def watched(address):
        intervals.append(sys.getswitchinterval())
        close(address)

    monkeypatch.setattr(gpu, "close", watched)
    send([rank], gpu.place(checkpoint(1, opaque=False)), keep_mapped=True)
    open_allocations.release_mapped()
    assert intervals and max(intervals) < usual / 10
    assert sys.getswitchinterval() == usual


def test_an_update_from_kept_memory_looks_at_no_tensor_again(gpus, monkeypatch):
    gpu, rank = gpus["GPU-0"], gpu_rank(ToyModel(opaque=False))
    placed = gpu.place(checkpoint(1, opaque=False))
    sent = {}

    def send_again(seed, **options):
        tensors = checkpoint(seed, opaque=False)
        for name, tensor in tensors.items():
            placed[name].copy_(tensor)
        _, (thread,) = send([rank], placed, keep_mapped=True, **options)
        rank.model.assert_unchanged(loaded(tensors, opaque=False))
        sent[seed] = thread.report
        return sent[seed]

    send_again(1)
    with monkeypatch.context() as patch:
        patch.setattr(LoadPlan, "writes", lambda *args: pytest.fail("looked at"))
        send_again(2)
    assert {key: value for key, value in sent[2].items() if key != "seconds"} == {
        key: value for key, value in sent[1].items() if key != "seconds"
    }
    monkeypatch.setattr(routes, "DIRECT_BUCKET_BYTES", 100)
    send_again(3)  # cut otherwise
    rank.model.qkv = torch.nn.Parameter(torch.zeros_like(rank.model.qkv), requires_grad=False)
    send_again(4)  # to other memory


@pytest.mark.parametrize("transport", ["cuda_ipc", "shm", "tcp"])
@pytest.mark.parametrize("bucket_bytes", [100, 256, 1 << 20])  # with tensors cut into rows, and with all in one
def test_a_bucket_as_in_the_latest_update_is_loaded_from_any_slot_without_a_look_at_its_tensors(
    gpus, monkeypatch, transport, bucket_bytes
):
    rank = gpu_rank(ToyModel(opaque=False))

    def send_again(seed, nbytes=bucket_bytes, **options):
        tensors = checkpoint(seed, opaque=False)
        _, (thread,) = send([rank], tensors, transport=transport, bucket_bytes=nbytes, **options)
        rank.model.assert_unchanged(loaded(tensors, opaque=False))
        return {key: value for key, value in thread.report.items() if key != "seconds"}

    first = send_again(1)
    with monkeypatch.context() as patch:
        for name in ("writes", "row_writes"):
            patch.setattr(LoadPlan, name, lambda *args: pytest.fail("looked at"))
        assert send_again(2) == first
    send_again(3, slots=3)
    send_again(4, 60)  # cut otherwise
    send_again(5)
    rank.model.qkv = torch.nn.Parameter(torch.zeros_like(rank.model.qkv), requires_grad=False)
    send_again(6)  # to other memory


def test_what_is_loaded_again_must_lie_in_the_slot():
    slot = torch.arange(64, dtype=torch.uint8)
    words = slot.view(torch.float32)
    layout = Layout([words[4:6], slot[30:40].view(2, 5).t(), words[16:16]], slot, 40)
    other = torch.arange(200, 250, dtype=torch.uint8)
    found = layout.sources(torch.cat([torch.zeros(4, dtype=torch.uint8), other])[4:])
    assert torch.equal(found[0].view(torch.uint8), other[16:24])
    assert torch.equal(found[1], other[30:40].view(2, 5).t()) and found[2].numel() == 0
    assert layout.sources(other[:39]) is None


class Doubled(ModelSource):
    def tensors(self):
        return ((name, tensor * 2) for name, tensor in super().tensors())


@pytest.mark.parametrize("wrap", [lambda one: one, Once], ids=["alone", "once"])
@pytest.mark.parametrize("transport", ["auto", "cuda_ipc", "shm"])
def test_a_subclass_with_tensors_of_its_own_is_asked_for_them(gpus, transport, wrap):
    rank, tensors = gpu_rank(ToyModel(opaque=False)), checkpoint(1, opaque=False)
    report, _ = send([rank], wrap(Doubled(gpus["GPU-0"].place(tensors))), transport=transport)
    assert report["transport"] == ("cuda_ipc" if transport == "auto" else transport)
    rank.model.assert_unchanged(loaded({name: 2 * tensor for name, tensor in tensors.items()}, opaque=False))


def test_a_subclass_with_specs_of_its_own_has_its_tensors_as_before(gpus):
    class Listed(ModelSource):
        def specs(self):
            return super().specs()

    rank, tensors = gpu_rank(ToyModel(opaque=False)), checkpoint(1, opaque=False)
    report, _ = send([rank], Listed(gpus["GPU-0"].place(tensors)))
    assert report["transport"] == "cuda_direct"
    rank.model.assert_unchanged(loaded(tensors, opaque=False))


def test_allocations_that_an_update_does_not_name_are_closed(gpus):
    gpu, rank = gpus["GPU-0"], gpu_rank(ToyModel(opaque=False))
    placed = gpu.place(checkpoint(1, opaque=False))
    send([rank], placed, keep_mapped=True)
    moved = {**placed, **gpu.place({"q.weight": placed["q.weight"] + 1})}
    send([rank], moved, keep_mapped=True)
    assert len(gpu.opened) == len(placed) + 1 and len(gpu.mapped) == len(placed)
    # the same address and handle, but another allocation: what is behind the old mapping is not what is sent
    base = gpu.find(moved["q.weight"].data_ptr()).address
    gpu.memory[base] = gpu.memory[base][0], 999
    send([rank], moved, keep_mapped=True)
    assert gpu.opened.count(base.to_bytes(64, "big")) == 2 and len(gpu.mapped) == len(placed)
    send([rank], moved)
    assert gpu.mapped == []
    send([rank], moved, keep_mapped=True)
    assert len(gpu.mapped) == len(placed)
    rank.receiver.close()
    assert gpu.mapped == []


def test_a_trainer_that_dies_leaves_no_kept_allocation_open(gpus):
    gpu, rank = gpus["GPU-0"], gpu_rank(ToyModel(opaque=False))
    send([rank], gpu.place(checkpoint(1, opaque=False)), keep_mapped=True)
    assert gpu.mapped
    (connection,) = open_allocations._leases.values()
    connection.close()  # as the kernel does
    wait_until(lambda: gpu.mapped == [], "nothing is mapped")


def test_a_failed_update_closes_what_was_kept(gpus):
    gpu, rank = gpus["GPU-0"], gpu_rank(ToyModel(opaque=False), check_finite=True)
    placed = gpu.place(checkpoint(1, opaque=False))
    send([rank], placed, keep_mapped=True)
    placed["o.weight"].fill_(float("nan"))
    outcome, (thread,) = send([rank], placed, keep_mapped=True)
    assert outcome.details["name"] == thread.error.details["name"] == "o.weight"
    assert gpu.mapped == []


def test_many_allocations_are_staged_unless_they_are_kept(gpus, monkeypatch):
    gpu, rank = gpus["GPU-0"], gpu_rank()
    monkeypatch.setattr(routes, "MIN_MEAN_ALLOCATION", 1 << 10)
    placed = gpu.place(checkpoint(1))
    report, _ = send([rank], placed)
    assert report["transport"] == "cuda_ipc"
    assert [(one["transport"], "keep_mapped" in one["reason"]) for one in report["fallbacks"]] == [
        ("cuda_direct", True)
    ]
    assert send([rank], placed, keep_mapped=True)[0]["transport"] == "cuda_direct"
    assert send([rank], placed, transport="cuda_direct")[0]["transport"] == "cuda_direct"


@pytest.mark.parametrize("bucket_bytes", [1, 256, 1 << 20])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_each_slot_of_staging_is_an_allocation_opened_once(gpus, bucket_bytes, slots):
    gpu, rank = gpus["GPU-0"], gpu_rank()
    for seed in range(3):
        tensors = checkpoint(seed)
        report, _ = send([rank], OneByOne(tensors), bucket_bytes=bucket_bytes, slots=slots)
        assert report["transport"] == "cuda_ipc"
        rank.model.assert_unchanged(loaded(tensors))
        assert len(gpu.opened) == slots * (seed + 1)
        assert not gpu.mapped and not gpu.memory


def test_small_slots_have_pages_of_their_own(gpus, monkeypatch):
    monkeypatch.setattr(buffers.staged, "_PAGE_BYTES", 1 << 16)
    staging = buffers.CudaStaging("GPU-0", 4096, 3)
    assert [len(memory) for memory, _ in gpus["GPU-0"].memory.values()] == [1 << 16] * 3
    attached = buffers.attach(*staging.export(), device="GPU-0")
    assert [len(slot) for slot in attached._slots] == [len(slot) for slot in staging._slots] == [4096] * 3
    staging.close()


def test_slots_that_cannot_all_be_allocated_are_freed(gpus):
    gpus["GPU-0"].capacity = 2 * 4096
    with pytest.raises(OutOfMemoryError):
        buffers.CudaStaging("GPU-0", 4096, 3)
    assert gpus["GPU-0"].memory == {}


@pytest.mark.parametrize(
    ("devices", "options", "slots"),
    [
        ([1], {}, 3),
        ([1], {"slots": 2}, 2),
        ([0], {"transport": "cuda_ipc"}, 2),
        ([1], {"transport": "shm"}, 2),
        ([0, 1], {}, 2),
    ],
)
def test_where_all_buckets_come_from_another_gpu_there_is_a_third_slot(gpus, monkeypatch, devices, options, slots):
    offered, used, deliver = [], set(), wire.Connection.send

    def noted(connection, message, *arguments):
        if isinstance(message, wire.Offer):
            offered.append(message.manifest.slots)
        if isinstance(message, wire.Bucket):
            used.add(message.slot)
        deliver(connection, message, *arguments)

    monkeypatch.setattr(wire.Connection, "send", noted)
    ranks = [gpu_rank(ToyModel(opaque=False), number) for number in devices]
    tensors = checkpoint(3, opaque=False)
    report, threads = send(ranks, gpus["GPU-0"].place(tensors), **options)
    assert [thread.error for thread in threads] == [None] * len(ranks) and report["buckets"] >= slots
    assert offered == [slots] * len(ranks) and used == set(range(slots))
    for rank in ranks:
        rank.model.assert_unchanged(loaded(tensors, opaque=False))


def test_each_gpu_has_staging_of_its_own(gpus):
    ranks = [gpu_rank(ToyModel(i, 2), i) for i in range(2)]
    tensors = checkpoint(3)
    placed = gpus["GPU-0"].place(tensors)
    report, threads = send(ranks, placed)
    assert [thread.report["transport"] for thread in threads] == ["cuda_direct", "cuda_ipc"]
    assert report["transport"] == "cuda_ipc"
    assert len(gpus["GPU-1"].opened) == 2 and not gpus["GPU-1"].memory
    for i, rank in enumerate(ranks):
        rank.model.assert_unchanged(loaded(tensors, i, 2))


@pytest.mark.parametrize(
    ("denied", "transport", "refused"),
    [
        ({"export"}, "shm_pinned", ["cuda_direct", "cuda_ipc"]),
        ({"open"}, "shm_pinned", ["cuda_direct", "cuda_ipc"]),
        ({"open", "register"}, "shm", ["cuda_direct", "cuda_ipc", "shm_pinned"]),
    ],
)
def test_what_is_denied_is_named_and_replaced(gpus, denied, transport, refused):
    gpu, rank = gpus["GPU-0"], gpu_rank()
    tensors = checkpoint(4)
    placed = gpu.place(tensors)
    held = len(gpu.memory)
    gpu.denied = denied
    report, (thread,) = send([rank], placed)
    assert report["transport"] == thread.report["transport"] == transport
    assert [one["transport"] for one in report["fallbacks"]] == refused
    assert all(one["reason"] and one["device"] == "GPU-0" for one in report["fallbacks"])
    rank.model.assert_unchanged(loaded(tensors))
    assert len(gpu.memory) == held and not gpu.mapped and not gpu.registered


def test_staging_takes_no_more_memory_than_the_tensors(gpus):
    gpu, rank = gpus["GPU-0"], gpu_rank()
    tensors = checkpoint(5)
    gpu.capacity = sum(-(-tensor.nbytes // 256) * 256 for tensor in tensors.values()) + 1024
    report, _ = send([rank], OneByOne(tensors), bucket_bytes=1 << 30)
    assert report["transport"] == "cuda_ipc" and report["fallbacks"] == []
    assert report["staging_bytes"] <= gpu.capacity
    rank.model.assert_unchanged(loaded(tensors))


def test_small_models_are_sent_in_several_buckets_too(gpus, monkeypatch):
    monkeypatch.setattr(bucket_sizes, "MIN_STAGED_BUCKET_BYTES", 256)
    rank, tensors = gpu_rank(), checkpoint(5)
    report, _ = send([rank], OneByOne(tensors), bucket_bytes=1 << 30)
    assert report["buckets"] >= 4
    assert report["staging_bytes"] < 0.75 * sum(-(-tensor.nbytes // 256) * 256 for tensor in tensors.values())
    rank.model.assert_unchanged(loaded(tensors))


def test_where_memory_is_short_buckets_are_smaller(gpus, monkeypatch):
    monkeypatch.setattr(bucket_sizes, "MIN_STAGED_BUCKET_BYTES", 256)
    ranks = [gpu_rank(ToyModel(i, 2), i) for i in range(2)]
    tensors = checkpoint(6)
    gpus["GPU-1"].capacity = 1024
    report, _ = send(ranks, OneByOne(tensors), bucket_bytes=1 << 30)
    assert report["transport"] == "cuda_ipc" and report["fallbacks"] == []
    assert report["buckets"] > 3
    for i, rank in enumerate(ranks):
        rank.model.assert_unchanged(loaded(tensors, i, 2))


@pytest.mark.parametrize(("stable", "group"), [(False, 0), (True, 0), (False, 200), (True, 1 << 20)])
def test_staging_leaves_room_for_tensors_that_are_made_meanwhile(gpus, monkeypatch, stable, group):
    """Stable ones wait for a common copy. A source may make them in groups, though not more than there are."""
    monkeypatch.setattr(bucket_sizes, "MIN_STAGED_BUCKET_BYTES", 256)
    monkeypatch.setattr(buffers.staged, "GROUP_BYTES", 128)
    tensors = checkpoint(6)
    sizes = [tensor.nbytes for tensor in tensors.values()]
    room = 2 * max(sizes) + (3 * 128 if stable else 0) + min(2 * group, sum(sizes))
    gpu, left = gpus["GPU-0"], []

    class Watched(OneByOne):
        def __init__(self, tensors):
            super().__init__(tensors)
            self.stable = stable
            self.group_bytes = group

        def tensors(self):
            for name, tensor in super().tensors():
                left.append(gpu.free_bytes())
                yield name, tensor

    plenty, _ = send([gpu_rank()], Watched(tensors), bucket_bytes=1024)
    left.clear()
    gpu.capacity = plenty["staging_bytes"] + room - 1  # not enough for the tensors beside such slots
    report, _ = send([gpu_rank()], Watched(tensors), bucket_bytes=1024)
    assert report["transport"] == "cuda_ipc" and min(left) >= room
    assert report["staging_bytes"] < plenty["staging_bytes"]
    rank = gpu_rank()
    gpu.capacity += 1 << 16
    report, _ = send([rank], gpu.place(tensors), bucket_bytes=1024, transport="cuda_ipc")
    assert report["buckets"] == 4  # tensors that are there need no room


def test_a_gpu_that_is_full_leaves_the_others_their_buckets(gpus, monkeypatch):
    monkeypatch.setattr(bucket_sizes, "MIN_STAGED_BUCKET_BYTES", 256)
    ranks = [gpu_rank(ToyModel(i, 2), i) for i in range(2)]
    gpus["GPU-1"].capacity = 1
    report, threads = send(ranks, OneByOne(checkpoint(6)), bucket_bytes=1024)
    assert [thread.report["transport"] for thread in threads] == ["cuda_ipc", "shm_pinned"]
    assert report["buckets"] == 4


def test_no_memory_for_staging_is_no_reason_to_fail(gpus):
    gpu, rank = gpus["GPU-0"], gpu_rank()
    gpu.capacity = 1
    report, _ = send([rank], OneByOne(checkpoint(4)))
    assert report["transport"] == "shm_pinned"
    assert [one["transport"] for one in report["fallbacks"]] == ["cuda_ipc"]


def test_a_transport_that_is_asked_for_is_used_or_nothing_is(gpus):
    gpu, rank = gpus["GPU-0"], gpu_rank()
    assert send([rank], OneByOne(checkpoint(1)), transport="shm")[0]["transport"] == "shm"
    assert send([rank], OneByOne(checkpoint(1)), transport="shm_pinned")[0]["transport"] == "shm_pinned"
    before = rank.model.snapshot()
    gpu.denied = {"open"}
    error, (thread,) = send([rank], checkpoint(2), transport="cuda_ipc")
    assert isinstance(error, UnsupportedError) and "open is denied" in str(error)
    assert [one["transport"] for one in error.details["tried"]] == ["cuda_ipc"]
    assert isinstance(thread.error, UnsupportedError)
    error, _ = send([rank], OneByOne(checkpoint(2)), transport="cuda_direct")
    assert isinstance(error, UnsupportedError) and "one at a time" in str(error)
    rank.model.assert_unchanged(before)
    assert rank.manager.content is Content.VALID and not gpu.memory


def test_a_cpu_engine_gets_shared_memory_whatever_the_trainer_has(gpus):
    report, _ = send([Rank()], gpus["GPU-0"].place(checkpoint(1)))
    assert report["transport"] == "shm" and report["fallbacks"] == []


def test_a_handle_for_another_gpu_is_refused(gpus, monkeypatch):
    rank = gpu_rank()
    monkeypatch.setattr(
        routes, "CudaStaging", lambda device, *arguments, **options: buffers.CudaStaging("GPU-1", *arguments)
    )
    before = rank.model.snapshot()
    error, (thread,) = send([rank], OneByOne(checkpoint(1)))
    for one in (error, thread.error):
        assert type(one) is WeightUpdateError
        assert one.details["reason"] == "wrong device"
        assert (one.details["device"], one.details["got"]) == ("GPU-0", "GPU-1")
    rank.model.assert_unchanged(before)
    assert rank.manager.content is Content.VALID and not gpus["GPU-1"].memory


@pytest.mark.parametrize("held", [True, False])
def test_staging_is_told_whether_the_source_holds_its_tensors(gpus, monkeypatch, held):
    """More of those that it makes one by one would live at a time, for which no room was kept."""
    told = []

    def make(*arguments, **options):
        told.append(options["held"])
        return buffers.CudaStaging(*arguments, **options)

    monkeypatch.setattr(routes, "CudaStaging", make)
    tensors = gpus["GPU-0"].place(checkpoint(1))
    send([gpu_rank()], tensors if held else OneByOne(tensors), transport="cuda_ipc")
    assert told == [held]


def test_a_tensor_that_moved_is_not_sent_from_its_old_place(gpus):
    tensors = gpus["GPU-0"].place(checkpoint(1))
    export = DirectExport(list(tensors.values()), "GPU-0", keep=False)
    name = next(iter(tensors))
    entry = BucketEntry(0, 0, tensors[name].nbytes)
    spec = TensorSpec(name, "bfloat16", tuple(tensors[name].shape))
    assert export.put(0, entry, spec, tensors[name]).nbytes == entry.nbytes
    with pytest.raises(WeightUpdateError, match="has moved"):
        export.put(0, entry, spec, tensors[name].clone())


def test_scattered_or_foreign_tensors_are_staged(gpus):
    gpu, rank = gpus["GPU-0"], gpu_rank()
    tensors = checkpoint(5)
    scattered = {
        **gpu.place(tensors),
        "o.weight": gpu.place({"o": tensors["o.weight"].t().contiguous()})["o"].t(),
    }
    report, _ = send([rank], scattered)
    assert report["transport"] == "cuda_ipc" and "contiguous" in report["fallbacks"][0]["reason"]
    rank.model.assert_unchanged(loaded(tensors))
    foreign = {**gpu.place(tensors), "o.weight": tensors["o.weight"]}  # as memory of expandable segments
    report, _ = send([rank], foreign)
    assert report["transport"] == "cuda_ipc" and "cannot export" in report["fallbacks"][0]["reason"]


@pytest.mark.parametrize(
    "change",
    [
        {"slot_bytes": 1 << 40},
        {"slot_bytes": 0},
        {"slot_bytes": "many"},
        {"allocations": []},
        {"allocations": [[b"short", 0, 1, 1]]},
        {"allocations": [["no bytes", 0, 1, 1]]},
        {"allocations": [[b"x" * 64, 0]]},
        {"process": None, "allocations": 3},
    ],
)
def test_a_staging_buffer_that_is_described_badly_is_refused(gpus, change):
    staging = buffers.CudaStaging("GPU-0", 4096, 2)
    description, fds = staging.export()
    with pytest.raises(WeightUpdateError):
        buffers.attach({**description, **change}, fds, device="GPU-0")
    missing = {key: value for key, value in description.items() if key not in change}
    with pytest.raises(WeightUpdateError):
        buffers.attach(missing, fds, device="GPU-0")
    staging.close()


@pytest.mark.parametrize("entry", [(0, 0, 8, 1), (0, 0, 8, -1), (0, 4096, 160, 0), (0, 1, 160, 0)])
def test_entries_outside_what_was_offered_are_refused(gpus, monkeypatch, entry):
    rank = gpu_rank()
    monkeypatch.setattr(DirectExport, "put", lambda *arguments: BucketEntry(*entry))
    error, (thread,) = send([rank], gpus["GPU-0"].place(checkpoint(1), per_allocation=100))
    assert type(error) is type(thread.error) is WeightUpdateError
    assert rank.manager.content is Content.FAILED and not gpus["GPU-0"].mapped


@pytest.mark.parametrize("process", ["trainer", "engine"])  # another's, and the receiver's own
@pytest.mark.parametrize("kind", [DirectExport, buffers.CudaStaging])
def test_a_trainer_that_lies_about_a_size_is_refused(gpus, monkeypatch, kind, process):
    """One byte behind the end would be a fault on a GPU, which ends the engine."""
    gpu, rank = gpus["GPU-0"], gpu_rank()
    before = rank.model.snapshot()
    honest = kind.export

    def export(self):
        description, fds = honest(self)
        allocations = [one._replace(nbytes=one.nbytes + 1) for one in description["allocations"]]
        return {**description, "allocations": allocations, "process": process}, fds

    monkeypatch.setattr(kind, "export", export)
    transport = "cuda_direct" if kind is DirectExport else "cuda_ipc"
    error, (thread,) = send([rank], gpu.place(checkpoint(1)), transport=transport)
    assert type(error) is type(thread.error) is WeightUpdateError
    assert thread.error.details["reason"] == "wrong size"
    assert thread.error.details["nbytes"] == thread.error.details["got"] + 1
    assert rank.manager.content is Content.VALID and gpu.mapped == []
    rank.model.assert_unchanged(before)


def test_a_trainer_that_names_memory_of_the_engine_as_its_own_is_refused(gpus, monkeypatch):
    honest = DirectExport.export

    def export(self):
        description, fds = honest(self)
        allocations = [one._replace(address=4096) for one in description["allocations"]]
        return {**description, "allocations": allocations, "process": "engine"}, fds

    monkeypatch.setattr(DirectExport, "export", export)
    rank = gpu_rank()
    error, _ = send([rank], gpus["GPU-0"].place(checkpoint(1)), transport="cuda_direct")
    assert isinstance(error, UnsupportedError)
    assert rank.manager.content is Content.VALID


def test_fifty_updates_by_every_way_leave_nothing_behind(gpus):
    gpu, rank = gpus["GPU-0"], gpu_rank()
    placed = gpu.place(checkpoint(1))
    held = len(gpu.memory)
    broken = gpu_rank(load_opaque=lambda weights: next(iter(weights)))
    ways = [one for one in buffers.TRANSPORTS if one not in COMMUNICATORS]  # which a failed update ends
    for transport in ways:
        send([rank], placed, transport=transport)
    before = counts()
    for number in range(50):
        target = broken if number % 5 == 4 else rank
        outcome, threads = send([target], placed, transport=ways[number % 4], keep_mapped=number % 2)
        assert isinstance(outcome, WeightUpdateError if target is broken else dict)
        del outcome, threads
    open_allocations.release_mapped()
    assert len(gpu.memory) == held and not gpu.mapped and not gpu.registered
    wait_until(lambda: left_since(before) == NOTHING, "nothing is left")


@pytest.mark.parametrize("transport", ["cuda_ipc", "cuda_direct"])
def test_a_failed_update_ends_once_no_rank_has_the_trainers_memory_open(gpus, monkeypatch, transport):
    gpu, open_at_end = gpus["GPU-0"], []
    close = gpu.close

    def slow(address):
        threading.Event().wait(0.3)
        close(address)

    monkeypatch.setattr(gpu, "close", slow)
    rank, placed = gpu_rank(load_opaque=lambda weights: next(iter(weights))), gpu.place(checkpoint(1))
    held = len(gpu.memory)
    with WeightSender(1, timeout_s=10, transport=transport) as endpoint:
        thread = Receiving(rank, endpoint)
        with pytest.raises(WeightUpdateError):
            endpoint.send(as_source(placed))
        open_at_end += gpu.mapped
        assert len(gpu.memory) == held
        thread.join()
    assert open_at_end == []


def test_overlapping_destinations_are_written_in_order():
    class Tied(torch.nn.Module):
        """Two names of the checkpoint go to one parameter, the second to its end only."""

        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(8), requires_grad=False)

        def load_weights(self, weights):
            for name, tensor in weights:
                (self.weight.data if name == "first" else self.weight.data[4:]).copy_(tensor)

    rank = Rank(Tied())
    send([rank], {"first": torch.ones(8), "second": torch.full((4,), 2.0)})
    assert rank.model.weight.tolist() == [1, 1, 1, 1, 2, 2, 2, 2]


@pytest.mark.parametrize("sizes", [(0,), (1,), (1 << 20, 1 << 20), ((2 << 20) + 1,), (5, (13 << 20) + 5, 0, 3 << 20)])
@pytest.mark.parametrize("threads", [1, 3])
def test_copies_by_several_threads_are_whole(sizes, threads):
    sources = [torch.randint(0, 256, (nbytes,), dtype=torch.uint8) for nbytes in sizes]
    targets = [torch.zeros(nbytes + 1, dtype=torch.uint8) for nbytes in sizes]
    copier = HostCopier(threads)
    for _ in range(2):
        for source, target in zip(sources, targets, strict=True):
            copier.add(target[:-1], source)
        copier.run()
        for source, target in zip(sources, targets, strict=True):
            assert torch.equal(target[:-1], source) and int(target[-1]) == 0
            target.zero_()
    copier.run()
    assert not any(target.any() for target in targets)  # nothing is copied twice
    copier.close()


class Wrapper(torch.Tensor):
    """Has no memory of its own, as a DTensor has not."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    __torch_dispatch__ = None


def offloaded_view():
    tensor = torch.ones(8)
    view = tensor[4:]
    tensor.untyped_storage().resize_(0)
    return view


@pytest.mark.parametrize("make", [lambda: Wrapper(torch.ones(4)), offloaded_view], ids=["wrapper", "offloaded"])
def test_what_has_no_memory_is_refused_and_not_read(make):
    copier = HostCopier(1)
    with pytest.raises(WeightUpdateError, match="has no memory"):
        copier.add(torch.zeros(4), make())
    with pytest.raises(WeightUpdateError, match="has no memory"):
        copier.add(make(), torch.zeros(4))
    copier.add(torch.zeros(0), torch.zeros(8)[4:4])
    copier.run()


def test_shared_memory_takes_tensors_of_any_layout():
    staging = ShmStaging(4096, 1)
    tensor = torch.arange(12, dtype=torch.float32).view(3, 4)
    spec = TensorSpec("a", "float32", (4, 3))
    staging.put(0, BucketEntry(0, 256, 48), spec, tensor.t())
    staging.publish()
    assert torch.equal(buffers.typed(staging._slots[0], 256, 48, "float32", (4, 3)), tensor.t())
    staging.close()


class OnGpu(torch.Tensor):
    """A host tensor that says it lies on the first GPU."""

    is_cuda = True
    device = torch.device("cuda", 0)


class FakeStream:
    cuda_stream = 0

    def __init__(self):
        self.waits = []  # for itself, or for other streams

    def synchronize(self):
        self.waits.append(self)

    def wait_stream(self, other):
        self.waits.append(other)


@pytest.mark.parametrize("denied", [set(), {"register"}])
def test_locking_pages_destroys_nothing_that_was_put(gpus, monkeypatch, denied):
    gpus["GPU-0"].denied = denied
    monkeypatch.setattr(buffers.host, "gpu_name", lambda index: f"GPU-{index}")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: FakeStream())
    staging = ShmStaging(4096, 2, pinned=True)
    spec = TensorSpec("a", "float32", (4,))
    staging.put(0, BucketEntry(0, 0, 16), spec, torch.ones(4))
    staging.put(1, BucketEntry(1, 0, 16), spec, torch.full((4,), 2.0).as_subclass(OnGpu))
    assert staging._slots[0][:16].view(torch.float32).tolist() == [1] * 4
    assert staging._slots[1][:16].view(torch.float32).tolist() == [2] * 4
    assert len(gpus["GPU-0"].registered) == (not denied)
    staging.close()


@pytest.mark.parametrize("end", ["publish", "close"])
@pytest.mark.parametrize("kind", ["host", "gpu"])
def test_every_stream_that_a_source_gave_a_tensor_on_is_waited_for(gpus, monkeypatch, kind, end):
    monkeypatch.setattr(buffers.host, "gpu_name", lambda index: f"GPU-{index}")
    current = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    if kind == "host":
        staging = ShmStaging(4096, 1, pinned=True)
    else:
        staging = buffers.CudaStaging("GPU-0", 4096, 1)
        staging._slots = [slot.as_subclass(OnGpu) for slot in staging._slots]
    streams = [FakeStream(), FakeStream()]
    for number, stream in enumerate(streams):  # as a source that yields inside of `with torch.cuda.stream(...)`
        current.append(stream)
        tensor = torch.full((4,), float(number)).as_subclass(OnGpu)
        staging.put(0, BucketEntry(number, 256 * number, 16), TensorSpec(str(number), "float32", (4,)), tensor)
    current.append(FakeStream())
    getattr(staging, end)()
    assert all(stream.waits for stream in streams)
    waits = [list(stream.waits) for stream in streams]
    staging.close()
    assert [stream.waits for stream in streams] == waits  # of a later bucket they are not


def test_a_bounce_buffer_is_read_on_all_streams_before_it_is_filled_again():
    bounce = _BounceBuffers.__new__(_BounceBuffers)  # which would pin memory
    bounce._buffers, bounce._current, bounce._used = [torch.zeros(256, dtype=torch.uint8)] * 2, 0, 0
    bounce.copier, bounce._filled, bounce._stream = HostCopier(1), [], None
    first, second = FakeStream(), FakeStream()
    for stream in (first, first, second):
        bounce.copy(torch.zeros(16), torch.ones(16), stream)
    assert first.waits == [] and second.waits == [first]  # so an event on the second stands for both


def test_the_stream_on_which_bounced_tensors_leave_is_waited_for(gpus, monkeypatch):
    """A source may make another stream current after the last of them."""
    current, left = [FakeStream()], []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    staging = buffers.CudaStaging("GPU-0", 4096, 1, stable=True)
    staging._slots = [slot.as_subclass(OnGpu) for slot in staging._slots]
    staging._bounce = SimpleNamespace(
        copy=lambda *arguments: None, flush=lambda: left.append(current[-1]), copier=SimpleNamespace(close=lambda: None)
    )
    staging.put(0, BucketEntry(0, 0, 16), TensorSpec("a", "float32", (4,)), torch.ones(4))
    current.append(FakeStream())
    staging.publish()
    assert left == current[1:] and current[1].waits
    staging.close()


def test_an_update_whose_end_does_not_arrive_keeps_nothing_open(gpus, monkeypatch):
    gpu, rank = gpus["GPU-0"], gpu_rank(ToyModel(opaque=False))
    deliver = wire.Connection.send

    def send_but_done(connection, message, *arguments):
        if isinstance(message, wire.Done):
            raise WeightUpdateError("the trainer is gone")
        deliver(connection, message, *arguments)

    monkeypatch.setattr(wire.Connection, "send", send_but_done)
    outcome, (thread,) = send([rank], gpu.place(checkpoint(1, opaque=False)), keep_mapped=True)
    assert isinstance(outcome, WeightUpdateError) and str(thread.error) == "the trainer is gone"
    assert gpu.opened and gpu.mapped == []


@pytest.mark.parametrize("first", [True, False])
def test_a_buffer_that_cannot_be_closed_hides_nothing_and_leaves_no_socket(monkeypatch, first):
    close = ShmStaging.close

    def fail(staging):
        close(staging)
        raise ValueError("the GPU is lost")

    class Breaking(OneByOne):
        def tensors(self):
            yield from super().tensors()
            if first:
                raise ValueError("the disk is gone")

    monkeypatch.setattr(ShmStaging, "close", fail)
    endpoint = WeightSender(1, timeout_s=10, bucket_bytes=256)
    thread = Receiving(Rank(), endpoint)
    with pytest.raises(WeightUpdateError, match="the disk is gone" if first else "the GPU is lost"):
        endpoint.send(Breaking(checkpoint(1)))
    thread.join()
    assert not any(Path(path).exists() for path in endpoint.endpoints.values())


def test_memory_that_torch_only_keeps_is_used_for_staging(gpus, monkeypatch):
    gpu, rank = gpus["GPU-0"], gpu_rank()
    gpu.capacity = 1
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: setattr(gpu, "capacity", 1 << 24))
    report, _ = send([rank], OneByOne(checkpoint(4)))
    assert report["transport"] == "cuda_ipc" and report["fallbacks"] == []


def test_a_tensor_that_others_have_moved_away_is_refused_before_it_is_read():
    tensors = checkpoint(1)
    tensors["o.weight"].untyped_storage().resize_(0)
    with pytest.raises(InvalidRequestError, match="has no memory") as caught:
        ModelSource(tensors).specs()
    assert caught.value.details["name"] == "o.weight"


def test_another_thread_works_on_this_gpu_and_stream(monkeypatch):
    stream = SimpleNamespace(device="cuda:3")
    current = []

    @contextmanager
    def entered(what):
        current.append(what)
        yield
        current.remove(what)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "device", entered)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    assert on_this_gpu(lambda: list(current))() == ["cuda:3", stream]
    assert current == []


def test_the_engines_call_works_on_this_gpu(monkeypatch):
    wrapped = []
    monkeypatch.setattr(push, "on_this_gpu", lambda run: wrapped.append(run) or run)
    with pytest.raises(StateConflictError):
        push.push_weights(fail_busy, checkpoint(1))
    assert len(wrapped) == 1


def fail_busy(body):
    raise StateConflictError("busy")
