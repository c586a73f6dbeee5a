"""Moving storages into a region, with storages of the CPU and a region that only counts."""

from contextlib import contextmanager

import pytest
import torch

from rl_memory_plugins.errors import DeviceMemoryError, UnsupportedError
from rl_memory_plugins.memory import adoption
from rl_memory_plugins.memory.adoption import in_groups, make_room, move_storages
from rl_memory_plugins.memory.allocator import Allocator
from rl_memory_plugins.memory.emptied import host_copies
from rl_memory_plugins.trainer.offloading import Offloader, host_view
from rl_memory_plugins.trainer.targets import Targets


class Region(Allocator):
    """Notes what is done; `full` regions allocate nothing."""

    def __init__(self):
        self.log = []
        self.device = self
        self.full = False
        self.free = 0
        self.is_open = False

    @contextmanager
    def region(self, tag):
        self.log.append(tag)
        if self.full:
            raise torch.OutOfMemoryError("no room")
        self.is_open = True
        yield
        self.is_open = False

    def memory_info(self):
        return self.free, self.free

    def trim(self, min_bytes=0):
        self.log.append("trim")

    def synchronize(self):
        self.log.append("synchronize")


def test_a_storage_moves_under_all_its_views():
    whole = torch.arange(1000.0)
    view, tied = whole[10:20].view(2, 5).t(), torch.nn.Parameter(whole[500:])
    whole_address = whole.data_ptr()
    keeps_its_place = torch.empty(0).set_(whole.untyped_storage())
    blocker = [torch.empty(1000) for _ in range(8)]
    move_storages(Region(), "mine", [whole])
    assert torch.equal(whole, torch.arange(1000.0))
    assert torch.equal(view, torch.arange(10.0, 20.0).view(2, 5).t()) and tied[0] == 500
    whole[10] = -1
    assert view[0, 0] == -1 and keeps_its_place[10] == -1
    assert len(blocker) == 8 and whole_address


@pytest.mark.parametrize("group_bytes", [1000, 10])
def test_storages_are_allocated_in_the_region_only(monkeypatch, group_bytes):
    monkeypatch.setattr(adoption, "GROUP_BYTES", group_bytes)
    region, resize, allocated = Region(), torch.UntypedStorage.resize_, []

    def note(storage, nbytes):
        if nbytes:
            allocated.append(region.is_open)
        return resize(storage, nbytes)

    monkeypatch.setattr(torch.UntypedStorage, "resize_", note)
    move_storages(region, "mine", [torch.ones(10), torch.ones(100)])
    assert allocated == [True, True]


def test_storages_move_in_groups(monkeypatch):
    monkeypatch.setattr(adoption, "GROUP_BYTES", 100)
    tensors = [torch.full((nbytes,), number, dtype=torch.uint8) for number, nbytes in enumerate([60, 40, 1, 300, 5])]
    region = Region()
    move_storages(region, "mine", tensors)
    moved = ["trim", "synchronize", "mine"]
    large = ["trim", "synchronize", "trim", "mine"]  # through host memory
    assert region.log == [*moved, *moved, *large, *moved, "synchronize"]
    for number, tensor in enumerate(tensors):
        assert tensor.eq(number).all()


def test_groups_are_of_one_device(monkeypatch):
    monkeypatch.setattr(adoption, "GROUP_BYTES", 100)
    first, second = (torch.empty(1, device=device).untyped_storage() for device in ("cpu", "meta"))
    third = torch.empty(1).untyped_storage()
    assert list(in_groups({first: 1, second: 1, third: 200})) == [[first], [second], [third]]
    assert list(in_groups({first: 50, third: 50})) == [[first, third]]
    assert list(in_groups({})) == []


def test_room_is_one_segment_for_rounded_sizes(monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "empty", lambda nbytes, **options: asked.append((nbytes, options["device"])))
    make_room([1, 512, 513], torch.device("cuda", 1))
    make_room([1], torch.device("cpu"))
    assert asked == [(4 * 512, torch.device("cuda", 1))]


def test_out_of_memory_keeps_the_content():
    tensor, region = torch.arange(100.0), Region()
    region.full = True
    with pytest.raises(DeviceMemoryError, match="move 400 bytes into the region mine") as caught:
        move_storages(region, "mine", [tensor])
    assert caught.value.details["needed_bytes"] == 400
    assert torch.equal(tensor, torch.arange(100.0))


def test_out_of_memory_between_two_storages_keeps_the_content(monkeypatch):
    resize, calls = torch.UntypedStorage.resize_, []

    def full(storage, nbytes):
        calls.append(nbytes)
        if len(calls) == 4:
            raise torch.OutOfMemoryError("no room")
        return resize(storage, nbytes)

    tensors = [torch.full((100,), number, dtype=torch.uint8) for number in range(3)]
    monkeypatch.setattr(torch.UntypedStorage, "resize_", full)
    with pytest.raises(DeviceMemoryError):
        move_storages(Region(), "mine", tensors)
    assert calls[:4] == [0, 100, 0, 100]
    assert [tensor.tolist() for tensor in tensors] == [[number] * 100 for number in range(3)]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("group_bytes", [1000, 10])
def test_every_error_keeps_the_content(monkeypatch, error, group_bytes):
    monkeypatch.setattr(adoption, "GROUP_BYTES", group_bytes)
    resize, calls = torch.UntypedStorage.resize_, []

    def fail(storage, nbytes):
        calls.append(nbytes)
        if len(calls) == 2:
            raise error("interrupted")
        return resize(storage, nbytes)

    tensor = torch.full((100,), 7, dtype=torch.uint8)
    monkeypatch.setattr(torch.UntypedStorage, "resize_", fail)
    with pytest.raises(error, match="interrupted"):
        move_storages(Region(), "mine", [tensor])
    assert tensor.tolist() == [7] * 100


class Device(Region):
    """Notes how many bytes the storage has when the region opens."""

    @contextmanager
    def region(self, tag):
        self.log.append(self.storage.nbytes())
        yield


@pytest.mark.parametrize(
    ("free", "device_free", "left"), [(1 << 30, 0, 0), (1 << 30, 209, 0), (1 << 30, 210, 100), (200 << 20, 0, 100)]
)
def test_a_large_storage_moves_through_host_memory_if_the_device_lacks_memory(monkeypatch, free, device_free, left):
    monkeypatch.setattr(adoption, "GROUP_BYTES", 10)
    monkeypatch.setattr(adoption, "free_host_bytes", lambda: free)
    tensor, device = torch.full((100,), 7, dtype=torch.uint8), Device()
    device.storage, device.free = tensor.untyped_storage(), device_free
    move_storages(device, "mine", [tensor])
    assert [entry for entry in device.log if isinstance(entry, int)] == [left]
    assert tensor.tolist() == [7] * 100


class OtherProcess:
    """Takes all the memory that this process gives back, `for_calls` allocations long."""

    def __init__(self, monkeypatch, for_calls=10**9):
        self.calls_left, resize = for_calls, torch.UntypedStorage.resize_
        monkeypatch.setattr(adoption, "GROUP_BYTES", 10)
        monkeypatch.setattr(adoption, "free_host_bytes", lambda: 1 << 40)
        monkeypatch.setattr(adoption, "RETURN_S", 0.0)
        monkeypatch.setattr(adoption, "POLL_S", 0.0)

        def full(storage, nbytes):
            if nbytes and self.calls_left > 0:
                self.calls_left -= 1
                raise torch.OutOfMemoryError("no room")
            return resize(storage, nbytes)

        monkeypatch.setattr(torch.UntypedStorage, "resize_", full)

    def ends(self):
        self.calls_left = 0


def left_in_host_memory(monkeypatch, device_free=0):
    """A tensor whose move has failed, with the memory of the device taken by another process."""
    tensor, region, other = torch.full((100,), 7, dtype=torch.uint8), Region(), OtherProcess(monkeypatch)
    region.free = device_free
    with pytest.raises(DeviceMemoryError, match="in host memory") as caught:
        move_storages(region, "mine", [tensor])
    assert caught.value.details["in_host_memory_bytes"] == 100
    assert tensor.untyped_storage().nbytes() == 0
    other.ends()
    return tensor


@pytest.mark.parametrize("device_free", [0, 1000], ids=["through host memory", "on the device"])
def test_content_outlives_the_memory_that_another_process_takes(monkeypatch, device_free):
    tensor = left_in_host_memory(monkeypatch, device_free)
    assert host_view(tensor).tolist() == [7] * 100
    Offloader([tensor], moves=lambda _: True).load()
    assert tensor.tolist() == [7] * 100
    assert tensor.untyped_storage() not in host_copies


def test_the_next_adoption_brings_the_content_back(monkeypatch):
    tensor, region, targets = left_in_host_memory(monkeypatch), Region(), Targets(gradients=False)
    targets.add([[tensor]], "mine")
    none, cpu = (lambda _: False), torch.device("cpu")
    new = targets.without_tag(cpu, none, lambda tag: True, none)
    move_storages(region, "mine", new["mine"])
    assert "mine" in region.log
    assert tensor.tolist() == [7] * 100
    assert tensor.untyped_storage() not in host_copies


def test_an_adoption_leaves_alone_what_an_offloader_has_moved():
    tensor, targets = torch.ones(100), Targets(gradients=False)
    targets.add([[tensor]], "mine")
    offloader = Offloader([tensor], moves=lambda _: True)
    offloader.offload()
    none = lambda _: False  # noqa: E731
    assert targets.without_tag(torch.device("cpu"), none, lambda tag: True, none) == {}
    offloader.load()


def test_a_storage_waits_for_the_memory_that_it_had(monkeypatch):
    tensor = torch.full((100,), 7, dtype=torch.uint8)
    OtherProcess(monkeypatch, for_calls=4)
    monkeypatch.setattr(adoption, "RETURN_S", 60.0)
    with pytest.raises(DeviceMemoryError, match="move 100 bytes into the region mine") as caught:
        move_storages(Region(), "mine", [tensor])
    assert "in_host_memory_bytes" not in caught.value.details
    assert tensor.tolist() == [7] * 100 and tensor.untyped_storage() not in host_copies


def test_each_storage_of_a_group_keeps_its_content(monkeypatch):
    tensors = [torch.full((100,), number, dtype=torch.uint8) for number in range(3)]
    other = OtherProcess(monkeypatch)
    monkeypatch.setattr(adoption, "GROUP_BYTES", 1000)
    with pytest.raises(DeviceMemoryError) as caught:
        move_storages(Region(), "mine", tensors)
    assert caught.value.details["in_host_memory_bytes"] == 100  # the others have not been emptied
    other.ends()
    assert [host_view(tensor).tolist() for tensor in tensors] == [[number] * 100 for number in range(3)]


@pytest.mark.parametrize(
    ("backends", "setting", "warns"),
    [("cpu:gloo,cuda:nccl", None, True), ("nccl", "1", True), ("nccl", "0", False), ("gloo", None, False)],
)
def test_registrations_of_nccl_are_warned_of_once(monkeypatch, caplog, backends, setting, warns):
    adoption._warn_of_nccl.cache_clear()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda: backends)
    monkeypatch.delenv("NCCL_GRAPH_REGISTER", raising=False)
    if setting is not None:
        monkeypatch.setenv("NCCL_GRAPH_REGISTER", setting)
    for _ in range(2):
        move_storages(Region(), "mine", [torch.ones(1)])
    assert caplog.text.count("set NCCL_GRAPH_REGISTER=0") == int(warns)


def test_memory_of_other_code_is_refused():
    plain, foreign = torch.ones(8), torch.frombuffer(bytearray(32), dtype=torch.float32)
    address = plain.data_ptr()
    with pytest.raises(UnsupportedError, match="use Offloader"):
        move_storages(Region(), "mine", [plain, foreign])
    assert plain.data_ptr() == address


def test_an_allocator_without_adoption_says_so():
    region = Region()
    region.name = "toy"
    with pytest.raises(UnsupportedError, match="the toy allocator adopts no tensors"):
        region.adopt("mine", [])
