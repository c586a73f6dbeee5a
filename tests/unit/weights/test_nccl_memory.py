"""The slots of NCCL at both ends, where a GPU has little memory."""

from types import SimpleNamespace

import pytest
import torch
from fake_gpu import OneByOne

from rl_memory_plugins.errors import DeviceMemoryError, HostMemoryError, OutOfMemoryError, UnsupportedError
from rl_memory_plugins.weights import bucket_sizes, routes
from rl_memory_plugins.weights.buffers import CudaStaging, NcclStaging, communicated
from rl_memory_plugins.weights.manifest import ALIGNMENT, Manifest
from rl_memory_plugins.weights.routes import Routes
from rl_memory_plugins.weights.slices import Slice

SPECS = OneByOne({str(number): torch.zeros(32, 8) for number in range(16)}).specs()  # of 1 KiB each


class Rank(SimpleNamespace):
    __hash__ = object.__hash__


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(bucket_sizes, "MIN_STAGED_BUCKET_BYTES", 1024)
    monkeypatch.setattr(routes.over_nccl, "require", lambda theirs: None)
    monkeypatch.setattr(routes.joining, "choose", lambda rank, transport, device: None)


def offered(gpus, *, resident=(), specs=SPECS, **options):
    """The routes of a trainer on the first GPU whose rank is on the second one, and the size of the offered slots."""
    made = Routes(
        Manifest(specs, 1 << 20, 2), "nccl", [], keep_mapped=False, resident=resident, stable=False, **options
    )
    made._own_gpu = "GPU-0"
    rank = Rank(device="GPU-1", nccl={}, candidate_transports=["nccl"], refused=[], communicator=None)
    rank.connection = SimpleNamespace(is_local=True, peer="rank 0")
    description, _ = made.assign(rank).buffer.export()
    assert all(bucket[-1].offset + bucket[-1].nbytes <= description["slot_bytes"] for bucket in made.buckets())
    return made, description["slot_bytes"]


def test_memory_that_torch_only_keeps_is_used(gpus, monkeypatch):
    gpu = gpus["GPU-0"]
    gpu.capacity = 1
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: setattr(gpu, "capacity", 1 << 24))
    made, slot_bytes = offered(gpus)
    assert slot_bytes == 4096
    made.close()


@pytest.mark.parametrize(("capacity", "expected"), [(1 << 24, 4096), (8192, 2048), (3000, 1024)])
def test_buckets_shrink_where_the_trainers_gpu_is_full(gpus, capacity, expected):
    gpus["GPU-0"].capacity = capacity
    made, slot_bytes = offered(gpus)
    assert slot_bytes == expected and len(made.buckets()) == 16 * 1024 // expected
    made.close()
    assert gpus["GPU-0"].memory == {}


def test_without_memory_for_the_smallest_buckets_the_trainer_gets_that_error(gpus):
    gpus["GPU-0"].capacity = 2000
    with pytest.raises(OutOfMemoryError):
        offered(gpus)


def test_a_source_that_makes_its_tensors_is_left_the_memory_for_them(gpus):
    """Two of the largest: beside slots of 2 KiB they have no room."""
    gpus["GPU-0"].capacity = 2 * (2048 + ALIGNMENT) + 2047
    made, slot_bytes = offered(gpus, resident=None)
    assert slot_bytes == 1024
    made.close()


def test_a_small_model_has_small_slots(gpus):
    made, slot_bytes = offered(gpus, specs=SPECS[:4])
    assert 2 * slot_bytes <= 4096
    made.close()


@pytest.mark.parametrize(
    ("transport", "options", "slots"),
    [
        ("cuda_ipc", {}, 3),
        ("cuda_ipc", {"free_slots": False}, 2),
        ("cuda_ipc", {"may_divide": True}, 2),
        ("cuda_ipc", {"resident": [torch.ones(1)]}, 2),  # in host memory: no copy between GPUs overlaps
        ("nccl", {}, 3),
        ("nccl", {"may_divide": True}, 2),
        ("nccl", {"free_slots": False}, 2),
        ("nccl", {"resident": [torch.ones(1)]}, 2),
        ("nccl", {"ranks": 2}, 2),  # each may need other slices, from slots of its own
        ("cuda_ipc", {"ranks": 2}, 3),
    ],
)
def test_there_is_a_third_slot_where_buckets_go_from_one_gpu_to_another(gpus, monkeypatch, transport, options, slots):
    monkeypatch.setattr(routes, "gpu_of_all", lambda resident, local: None)
    monkeypatch.setattr(routes, "current_gpu", lambda gpus: "GPU-0")
    rank = SimpleNamespace(device="GPU-1", connection=SimpleNamespace(is_local=transport == "cuda_ipc"))
    manifest, given = Manifest(SPECS, 1 << 20, 2), {"keep_mapped": False, "resident": None, "stable": False}
    ranks = [rank] * {"ranks": 1, **options}["ranks"]
    made = Routes(
        manifest,
        transport,
        ranks,
        **{**given, "free_slots": True, **{name: one for name, one in options.items() if name != "ranks"}},
    )
    assert made.manifest.slots == slots


@pytest.mark.parametrize("short", [False, True])
def test_processes_that_may_send_parts_cut_the_same_buckets_and_give_up_their_slots_for_whole_tensors(
    gpus, monkeypatch, short
):
    gpu = gpus["GPU-0"]
    monkeypatch.setattr(routes, "NCCL_PART_BUCKET_BYTES", 2048)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: setattr(gpu, "capacity", 1 << 24))
    gpu.capacity = 1 if short else 1 << 24
    made, slot_bytes = offered(gpus, may_divide=True, resident=None)
    assert slot_bytes == 2048
    assert made.divide(["nccl"]) == made.buckets() and len(made.buckets()) == 8
    assert gpu.memory == {}
    gpu.capacity = 1 if short else 1 << 24
    made.part_buffer("nccl", 512)
    assert made.staging_bytes() == 2 * (512 + ALIGNMENT)
    made.close()
    assert gpu.memory == {}


@pytest.mark.parametrize("part", [None, Slice(0, ((0, 16),))])
def test_buckets_are_only_cut_for_a_rank_that_wants_less_than_all(gpus, part):
    made, _ = offered(gpus)
    (route,) = made.in_use()
    made.cut({route.ranks[0]: [part] + [None] * 15}, made.buckets())
    assert (route.cut is None) == (part is None)
    made.close()


def test_slots_whose_seals_cannot_be_made_are_freed(gpus, monkeypatch):
    def full(*size, **options):
        raise RuntimeError("no pinned memory")

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(RuntimeError, match="no pinned memory"):
        NcclStaging("GPU-0", 4096, 2)
    assert gpus["GPU-0"].memory == {}


class Slots:
    """A rank's memory for slots.

    Attributes:
        room: For how many there is some.
        cached: How many more torch's cache holds.
        error: What the last one raises.
    """

    def __init__(self, monkeypatch, room, cached=0, error=None):
        self.room, self.cached, self.error, self.made = room, cached, error, []
        monkeypatch.setattr(communicated, "ReceivedSlot", self._make)
        monkeypatch.setattr(torch.cuda, "empty_cache", self._empty)

    def _make(self, nbytes, device):
        if len(self.made) == self.room:
            raise self.error or DeviceMemoryError("full", needed_bytes=nbytes, free_bytes=0, margin_bytes=0)
        slot = SimpleNamespace(memory=torch.zeros(nbytes, dtype=torch.uint8), free=lambda: self.made.remove(slot))
        self.made.append(slot)
        return slot

    def _empty(self):
        self.room, self.cached = self.room + self.cached, 0


def attached():
    communicator, kept = SimpleNamespace(transport="nccl"), SimpleNamespace(drop=lambda communicator: None)
    return communicated.CommunicatedAttached(4096, communicator, kept, "GPU-0")


@pytest.mark.parametrize(("room", "cached", "count"), [(2, 0, 2), (0, 2, 2), (1, 1, 2), (1, 0, 1)])
def test_a_rank_takes_what_torch_only_keeps_and_else_does_with_one_slot(monkeypatch, room, cached, count):
    slots = Slots(monkeypatch, room, cached)
    buffer = attached()
    assert len(slots.made) == 1
    buffer.look_ahead()
    assert len(buffer._slots) == len(slots.made) == count


def test_a_rank_without_memory_for_one_slot_refuses(monkeypatch):
    Slots(monkeypatch, 0)
    with pytest.raises(UnsupportedError, match="full"):
        attached()


@pytest.mark.parametrize("error", [HostMemoryError("no page"), UnsupportedError("the driver refuses")])
def test_a_rank_that_has_accepted_does_without_a_second_slot(monkeypatch, error):
    """Other ranks write to their weights by now."""
    Slots(monkeypatch, 1, error=error)
    buffer = attached()
    buffer.look_ahead()
    assert len(buffer._slots) == 1


def test_a_rank_that_fails_otherwise_frees_its_slots(monkeypatch):
    slots = Slots(monkeypatch, 1, error=RuntimeError("the GPU is lost"))
    buffer = attached()
    with pytest.raises(RuntimeError, match="the GPU is lost"):
        buffer.look_ahead()
    buffer.close()
    assert slots.made == []


@pytest.mark.parametrize("full", ["GPU-0", "GPU-1"])
def test_slots_on_the_gpu_of_a_rank_leave_memory_for_tensors_on_the_trainers(gpus, full):
    """The source makes its tensors there; the rank's GPU needs room for the slots alone."""
    made = Routes(Manifest(SPECS, 1 << 20, 2), "cuda_ipc", [], keep_mapped=False, resident=None, stable=False)
    made._own_gpu = "GPU-0"
    slots = 2 * 4096
    gpus[full].capacity = 2 * 1024 if full == "GPU-0" else slots
    staging = made._staging(lambda slot_bytes, count: CudaStaging("GPU-1", slot_bytes, count), "GPU-1", 1 << 20)
    assert staging.nbytes == slots
    assert gpus["GPU-1"].memory and not gpus["GPU-0"].memory
    staging.close()
