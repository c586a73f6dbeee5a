"""The weight stream on a GPU: between processes, by every transport, and when either end breaks off."""

from __future__ import annotations

import json
import os
import signal
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from processes import other_process, run

from integration.bench_wire import Engine, Rank, checkpoint
from integration.waiting import wait_until
from rl_memory_plugins.errors import RLMemoryError, UnsupportedError, WeightUpdateError
from rl_memory_plugins.memory.cuda_device import gpu_name
from rl_memory_plugins.memory.cuda_vmm import CudaVmmAllocator, set_torch_option
from rl_memory_plugins.tags import Tag
from rl_memory_plugins.trainer import ModelSource
from rl_memory_plugins.weights import buffers, checksums
from rl_memory_plugins.weights.buffers.staged import CudaStaging
from rl_memory_plugins.weights.cuda_ipc import CudaGpu
from rl_memory_plugins.weights.manifest import BucketEntry
from rl_memory_plugins.weights.open_allocations import release_mapped
from rl_memory_plugins.weights.plan import Batch
from rl_memory_plugins.weights.sender import WeightSender
from rl_memory_plugins.weights.source import spec_of

MiB = 1 << 20
MODEL = "100m"
BUCKET = 16 * MiB


@pytest.fixture(scope="module")
def shared_engine():
    engine = Engine(MODEL)
    yield engine
    engine.close()


@pytest.fixture
def engine(shared_engine):
    yield shared_engine
    release_mapped()
    torch.cuda.empty_cache()
    assert shared_engine.call("state")["mapped"] == 0


class OneByOne:
    """A source that makes each tensor when its turn comes, in memory that it uses again."""

    def __init__(self, tensors, before=lambda number: None):
        from rl_memory_plugins.trainer import ModelSource

        self._source = ModelSource(tensors)
        self._before = before
        self.specs = self._source.specs

    def tensors(self):
        memory = {}
        for number, (name, tensor) in enumerate(self._source.tensors()):
            self._before(number)
            key = tuple(tensor.shape)
            if key not in memory:
                memory[key] = torch.empty_like(tensor, pin_memory=tensor.is_pinned())
            memory[key].copy_(tensor)
            yield name, memory[key]


def randomised(place="cuda", seed=0):
    torch.manual_seed(seed)
    tensors = checkpoint(MODEL, place)
    for tensor in tensors.values():
        tensor.copy_(torch.randn(tensor.shape, device="cuda"))
    return tensors


def assert_arrived(engine, tensors):
    merged = checksums.merge_checksums([engine.call("checksums")])
    assert merged.partial == merged.opaque == []
    assert merged.tensors == {name: checksums.tensor_checksum(tensor.cuda()) for name, tensor in tensors.items()}


def updated(engine, source, **options):
    options.setdefault("bucket_bytes", BUCKET)
    report, error = engine.update(source, timeout_s=20, **options)
    assert error is None
    return report


def free_bytes():
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


@pytest.mark.parametrize("place", ["cuda", "pinned", "cpu"])
@pytest.mark.parametrize("transport", [one for one in buffers.TRANSPORTS if one != "nccl"])
def test_every_transport_carries_tensors_from_everywhere(engine, transport, place):
    for seed in (1, 2):
        tensors = randomised(place, seed)
        if transport == "cuda_direct" and place != "cuda":
            with pytest.raises(UnsupportedError, match="not all tensors are"):
                engine.update(tensors, transport=transport)
            continue
        report = updated(engine, tensors, transport=transport)
        assert report["transport"] == report["receivers"][0]["transport"] == transport
        assert_arrived(engine, tensors)


@pytest.mark.parametrize("place", ["cuda", "pinned", "cpu"])
def test_a_source_may_use_its_memory_again(engine, place):
    tensors = randomised(place, 3)
    for transport in ("cuda_ipc", "shm_pinned"):
        report = updated(engine, OneByOne(tensors), transport=transport)
        assert report["transport"] == transport
        assert_arrived(engine, tensors)


@pytest.mark.parametrize("stable", [False, True])
@pytest.mark.parametrize("transport", ["cuda_ipc", "shm_pinned"])
def test_a_source_may_give_each_tensor_on_another_stream(engine, transport, stable):
    tensors = randomised(seed=6)
    source = OneByOne(tensors)
    source.stable = stable

    def made_on_two_streams():
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        for number, (name, tensor) in enumerate(tensors.items()):
            with torch.cuda.stream(streams[number % 2]):
                torch.cuda._sleep(20_000_000)
                yield name, tensor + 0

    source.tensors = made_on_two_streams
    updated(engine, source, transport=transport)
    assert_arrived(engine, tensors)


@pytest.mark.parametrize("name", ["bfloat16", "bool", "float8_e4m3fn", "float8_e8m0fnu", "uint16", "uint32", "uint64"])
def test_small_tensors_of_every_dtype_are_packed_and_written(name):
    """Not all of them by one kernel: that takes only some dtypes."""
    given = torch.arange(64, dtype=torch.uint8, device="cuda") % 2
    source = given.view(getattr(torch, name))
    staging = CudaStaging(gpu_name(0), MiB, 1, stable=True)
    try:
        spec = spec_of("tensor", source)
        staging.put(0, BucketEntry(0, 512, 64), spec, source)
        staging.put(0, BucketEntry(0, 1024, 64), spec, source)
        staging.publish()
        for offset in (512, 1024):
            assert torch.equal(staging._slots[0][offset : offset + 64], given)
    finally:
        staging.close()
    written = [torch.zeros_like(given).view(source.dtype) for _ in range(2)]
    Batch([(destination, source) for destination in written], group=True).run()
    for destination in written:
        assert torch.equal(destination.view(torch.uint8), given)


@pytest.mark.parametrize("gap", [0, 512])
@pytest.mark.parametrize("pausable", [False, True])
def test_the_driver_copies_many_tensors_of_a_trainers_memory_at_once(monkeypatch, pausable, gap):
    """Pausable memory consists of many mappings. Without gaps in the slot neighbours are one copy."""
    if gap:
        monkeypatch.delattr(CudaGpu, "copy")  # of one at a time
    vmm = CudaVmmAllocator(0)
    with vmm.region(Tag.WEIGHTS) if pausable else nullcontext():
        tensors = [torch.empty(512 << number % 14, dtype=torch.uint8, device="cuda") for number in range(64)]
    staging = CudaStaging(gpu_name(0), 64 * MiB, 1, stable=True)
    try:
        offset, given = 0, {}
        for number, tensor in enumerate(tensors):
            tensor.random_(0, 256)
            given[offset] = tensor
            staging.put(0, BucketEntry(number, offset, tensor.nbytes), spec_of(str(number), tensor), tensor)
            offset += tensor.nbytes + gap
        staging.publish()
        torch.cuda.synchronize()
        for offset, tensor in given.items():
            assert torch.equal(staging._slots[0][offset : offset + tensor.nbytes], tensor)
    finally:
        staging.close()
        vmm.close()


def test_small_tensors_that_are_cast_are_cast_each_to_its_own_dtype():
    """torch's one kernel for many takes the first one's dtype for all."""
    sources = [torch.arange(8, device="cuda", dtype=torch.float32) for _ in range(2)]
    written = [torch.zeros(8, dtype=dtype, device="cuda") for dtype in (torch.bfloat16, torch.float16)]
    Batch(zip(written, sources, strict=True), group=True).run()
    for destination in written:
        assert destination.tolist() == list(range(8))


@pytest.mark.parametrize("place", ["cuda", "pinned", "cpu"])
def test_master_weights_arrive_in_the_dtype_that_is_sent(engine, place):
    """Those in host memory are cast on the GPU."""
    tensors = {name: tensor.float() for name, tensor in randomised(place, 5).items()}
    if place == "pinned":
        tensors = {name: tensor.pin_memory() for name, tensor in tensors.items()}
    updated(engine, ModelSource(tensors, dtype=torch.bfloat16))
    assert_arrived(engine, {name: tensor.bfloat16() for name, tensor in tensors.items()})


def test_work_that_is_in_flight_is_finished_first(engine):
    tensors = randomised(seed=4)
    for transport in ("cuda_direct", "cuda_ipc", "shm_pinned"):
        torch.cuda._sleep(200_000_000)
        for tensor in tensors.values():
            tensor.add_(1)
        updated(engine, tensors, transport=transport)
        assert_arrived(engine, tensors)


def test_auto_keeps_allocations_open_until_they_are_released(engine):
    tensors = randomised(seed=5)
    updated(engine, tensors)
    assert_arrived(engine, tensors)  # both processes have loaded their kernels by now
    del tensors
    release_mapped()
    torch.cuda.empty_cache()
    before = free_bytes()
    tensors = randomised(seed=5)
    for step in range(3):
        report = updated(engine, tensors, keep_mapped=True)
        assert report["transport"] == "cuda_direct" and report["fallbacks"] == []
        assert_arrived(engine, tensors)
        mapped = engine.call("state")["mapped"]
        assert 0 < mapped < len(tensors)  # torch puts small tensors together
        next(iter(tensors.values())).add_(step)
    release_mapped()
    assert engine.call("state")["mapped"] == 0
    del tensors
    torch.cuda.empty_cache()
    assert free_bytes() >= before - 8 * MiB  # nobody holds what the trainer has freed


def test_memory_that_cannot_be_exported_is_staged(engine):
    kinds = {}
    set_torch_option("expandable_segments", True)
    try:
        kinds["expandable"] = randomised(seed=6)
    finally:
        set_torch_option("expandable_segments", False)
    with CudaVmmAllocator(0).region(Tag.WEIGHTS):
        kinds["pausable"] = randomised(seed=7)
    for tensors in kinds.values():
        report = updated(engine, tensors, keep_mapped=True)
        assert report["transport"] == "cuda_ipc"
        assert [one["transport"] for one in report["fallbacks"]] == ["cuda_direct"]
        assert "cannot export" in report["fallbacks"][0]["reason"]
        assert_arrived(engine, tensors)


def test_where_cuda_ipc_is_denied_pinned_host_memory_is_used(engine, monkeypatch):
    def find(self, address):
        found = real(self, address)
        return found and found._replace(handle=bytes(64))

    real = CudaGpu.find
    monkeypatch.setattr(CudaGpu, "find", find)  # handles that no driver takes
    tensors = randomised(seed=8)
    report = updated(engine, tensors, keep_mapped=True)
    assert report["transport"] == "shm_pinned"
    assert [one["transport"] for one in report["fallbacks"]] == ["cuda_direct", "cuda_ipc"]
    assert all("cuIpcOpenMemHandle" in one["reason"] for one in report["fallbacks"])
    assert_arrived(engine, tensors)


def test_a_handle_for_another_gpu_is_refused(engine, monkeypatch):
    def export(self):
        description, fds = real(self)
        return {**description, "device": "GPU-00000000-0000-0000-0000-000000000000"}, fds

    real = buffers.CudaStaging.export
    monkeypatch.setattr(buffers.CudaStaging, "export", export)
    before = engine.call("state")["content"]
    with pytest.raises(WeightUpdateError) as error:
        engine.update(randomised(), transport="cuda_ipc")
    assert error.value.details["reason"] == "wrong device"
    assert error.value.details["device"] == engine.device == gpu_name(0)
    assert engine.call("state")["content"] == before


@pytest.mark.parametrize("nbytes", [1 << 20, 5 * MiB, 64 * MiB])
def test_the_driver_knows_the_size_of_memory_that_another_process_exports(nbytes):
    """Also of a small allocation, which shares its pages with others."""
    gpu = CudaGpu(0)
    address = gpu.allocate(nbytes)
    torch.cuda.synchronize()
    found = gpu.find(address)
    assert gpu.bytes_from(address) >= nbytes
    code = f"""
        import pytest
        from rl_memory_plugins.errors import WeightUpdateError
        from rl_memory_plugins.weights.cuda_ipc import Allocation, CudaGpu
        from rl_memory_plugins.weights.open_allocations import Mappings
        gpu, mappings = CudaGpu(0), Mappings()
        honest = Allocation({found.handle!r}, {found.address}, {found.nbytes}, {found.serial})
        (memory,) = mappings.open(gpu, "trainer", [honest])
        assert len(memory) == honest.nbytes
        assert honest.nbytes <= gpu.bytes_from(memory.data_ptr()) < honest.nbytes + {2 * MiB}
        mappings.close()
        with pytest.raises(WeightUpdateError) as error:
            mappings.open(gpu, "trainer", [honest._replace(nbytes=honest.nbytes + {2 * MiB})])
        assert error.value.details["reason"] == "wrong size" and not mappings._open
        print("refused")
    """
    assert run(code) == "refused\n"
    gpu.free(address)


@pytest.mark.parametrize("kind", [buffers.DirectExport, buffers.CudaStaging])
def test_a_trainer_that_lies_about_a_size_leaves_the_engine_alive(engine, monkeypatch, kind):
    real = kind.export

    def export(self):
        description, fds = real(self)
        allocations = [one._replace(nbytes=one.nbytes + 2 * MiB) for one in description["allocations"]]
        return {**description, "allocations": allocations}, fds

    tensors, before = randomised(seed=11), engine.call("state")["content"]
    transport = "cuda_direct" if kind is buffers.DirectExport else "cuda_ipc"
    with monkeypatch.context() as patch:
        patch.setattr(kind, "export", export)
        with pytest.raises(WeightUpdateError) as error:
            engine.update(tensors, transport=transport)
    assert error.value.details["reason"] == "wrong size"
    assert engine.call("state")["content"] == before
    assert updated(engine, tensors, transport=transport)["transport"] == transport
    assert_arrived(engine, tensors)


def test_a_handle_may_be_opened_twice(tmp_path):
    gpu = CudaGpu(0)
    address = gpu.allocate(4 * MiB)
    gpu.view(address, 4 * MiB).fill_(7)
    torch.cuda.synchronize()
    found = gpu.find(address)
    assert found.address == address and found.nbytes >= 4 * MiB
    code = f"""
        import torch
        from rl_memory_plugins.weights.cuda_ipc import Allocation, CudaGpu
        from rl_memory_plugins.weights.open_allocations import Mappings
        gpu = CudaGpu(0)
        one, two = Mappings(), Mappings()
        allocation = Allocation({found.handle!r}, {found.address}, {found.nbytes}, {found.serial})
        (first,) = one.open(gpu, "trainer", [allocation])
        (second,) = two.open(gpu, "trainer", [allocation, allocation][:1])
        assert first.data_ptr() == second.data_ptr()
        one.close()
        assert int(second[: {4 * MiB}].sum(dtype=torch.int64)) == 7 * {4 * MiB}
        two.close()
        print("read")
    """
    assert run(code) == "read\n"
    gpu.free(address)


def test_trainer_and_engine_may_be_one_process():
    rank = Rank("tiny")
    outcome = {}
    tensors = checkpoint("tiny")
    for transport in ("cuda_direct", "cuda_ipc", "shm_pinned"):
        next(iter(tensors.values())).add_(1)
        with WeightSender(1, timeout_s=10, transport=transport, keep_mapped=True) as sender:

            def receive(sender=sender):
                outcome["report"] = rank.receive(endpoints=sender.endpoints, token=sender.token, timeout_s=10)

            thread = threading.Thread(target=receive)
            thread.start()
            assert sender.send(ModelSource(tensors))["transport"] == transport
            thread.join(10)
        merged = checksums.merge_checksums([rank.receiver.checksums()])
        assert merged.tensors == {n: checksums.tensor_checksum(tensor) for n, tensor in tensors.items()}
    release_mapped()


TRAINER = """
    import time, torch
    from integration.bench_wire import checkpoint
    from rl_memory_plugins.trainer import ModelSource
    from rl_memory_plugins.weights.sender import WeightSender
    from test_weight_stream import OneByOne

    def stall(number):
        if {stall} and number == 20:
            print("sent", flush=True)
            time.sleep(60)

    tensors = checkpoint("100m")
    options = dict(timeout_s=60, bucket_bytes=4 << 20, keep_mapped={keep})
    with WeightSender(["{device}"], **options) as sender:
        print(sender.endpoints["{device}"], sender.token, flush=True)
        report = sender.send(OneByOne(tensors, stall) if {stall} else ModelSource(tensors))
    print(report["transport"], flush=True)
    time.sleep(60)
"""


def killed_trainer(engine, **options):
    """Runs an update from a process that is killed once it says that it is time; the receiver's error."""
    environment = {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    }
    failures = []
    with other_process(TRAINER.format(device=engine.device, **options), **environment) as trainer:
        path, token = trainer.first_line.split()

        def receive():
            try:
                engine.call("receive", endpoints={engine.device: path}, token=token, timeout_s=20)
            except RLMemoryError as error:
                failures.append(error)

        thread = threading.Thread(target=receive)
        thread.start()
        word = trainer.stdout.readline()
        if not options["stall"]:
            thread.join(20)
            assert engine.call("state")["mapped"] > 0
        os.kill(trainer.pid, signal.SIGKILL)
        trainer.wait()
        thread.join(20)
    return word, failures


def test_a_trainer_that_is_killed_while_its_memory_is_open(engine):
    updated(engine, randomised())
    free = free_bytes()
    word, failures = killed_trainer(engine, stall=True, keep=False)
    assert word == "sent\n"
    assert failures[0].code == "WeightUpdateError" and failures[0].details["reason"] == "lost"
    assert engine.call("state")["content"] == "failed"
    wait_until(lambda: free_bytes() >= free - 8 * MiB, "the memory is free", 10)
    tensors = randomised(seed=9)
    updated(engine, tensors)
    assert_arrived(engine, tensors)


def test_a_trainer_that_is_killed_after_an_update_gives_its_memory_back(engine):
    updated(engine, randomised())
    free = free_bytes()
    word, failures = killed_trainer(engine, stall=False, keep=True)
    assert word == "cuda_direct\n" and failures == []
    wait_until(lambda: engine.call("state")["mapped"] == 0, "nothing is mapped", 10)
    wait_until(lambda: free_bytes() >= free - 8 * MiB, "the memory is free", 10)
    updated(engine, randomised())


def test_an_engine_that_is_killed_costs_the_trainer_nothing():
    engine = Engine("tiny")
    tensors = checkpoint("tiny")
    free = free_bytes()

    def kill(number):
        if number == 5:
            engine.process.kill()
            engine.process.wait()

    for source in (OneByOne(tensors, kill),):
        with pytest.raises(WeightUpdateError) as error:
            engine.update(source, bucket_bytes=1, transport="cuda_ipc", timeout_s=5)
        assert error.value.details["reason"] == "lost"
    engine.close()
    torch.cuda.empty_cache()
    assert free_bytes() >= free  # and what the engine held


def test_five_hundred_updates_grow_nothing(engine):
    tensors = randomised(seed=10)
    options = [
        {"transport": "cuda_direct"},
        {"transport": "cuda_direct", "keep_mapped": True},
        {"transport": "cuda_ipc"},
        {"transport": "shm_pinned"},
        {"transport": "shm"},
    ]

    def states():
        release_mapped()
        torch.cuda.empty_cache()
        state = engine.call("state")
        del state["content"]
        return json.dumps(state), len(list(Path("/proc/self/fd").iterdir())), free_bytes()

    for _ in range(2):
        for each in options:
            updated(engine, tensors, **each)
    before = states()
    for number in range(500):
        updated(engine, tensors, **options[number % len(options)])
    wait_until(lambda: states()[:2] == before[:2], "both are as before", 10)
    assert states()[2] >= before[2] - 4 * MiB
    assert_arrived(engine, tensors)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_devices_are_known_by_uuid_whatever_their_order():
    engine = Engine("tiny", CUDA_VISIBLE_DEVICES=f"{gpu_name(1)},{gpu_name(0)}")
    try:
        assert engine.device == gpu_name(1)
        for index, expected in ((1, "cuda_direct"), (0, "cuda_ipc")):
            tensors = {name: tensor.to(f"cuda:{index}") + index for name, tensor in checkpoint("tiny").items()}
            report = updated(engine, tensors, keep_mapped=True)
            assert report["transport"] == expected
            assert_arrived(engine, tensors)
            release_mapped()
        hidden = Engine("tiny", CUDA_VISIBLE_DEVICES=gpu_name(1))
        hidden.close()
        assert hidden.device == gpu_name(1)
    finally:
        engine.close()
