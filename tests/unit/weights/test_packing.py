"""Sources that make tensors where they are sent from."""

from __future__ import annotations

import pytest
import torch
from fake_gpu import gpu_rank
from test_transports import FakeStream, OnGpu, send
from toys import ToyModel, checkpoint, loaded

from rl_memory_plugins.errors import WeightUpdateError
from rl_memory_plugins.trainer import QuantisedSource
from rl_memory_plugins.trainer.once import Once
from rl_memory_plugins.trainer.sources import quantised
from rl_memory_plugins.trainer.sources.drafted import with_draft
from rl_memory_plugins.weights import buffers
from rl_memory_plugins.weights.manifest import BucketEntry, Manifest, TensorSpec
from rl_memory_plugins.weights.source import spec_of


class Placing:
    """Makes each tensor in its place if it has one."""

    def __init__(self, tensors, breaks_at=None):
        self._tensors = tensors
        self._breaks_at = breaks_at
        self.placed, self.places = [], None

    def specs(self):
        return [spec_of(name, tensor) for name, tensor in self._tensors.items()]

    def tensors(self):
        return iter(self._tensors.items())

    def tensors_in(self, places):
        self.places = places
        for name, tensor in self._tensors.items():
            if name == self._breaks_at:
                raise WeightUpdateError("broken")
            if name in places:
                self.placed.append(name)
                yield name, places[name].copy_(tensor)
            else:
                yield name, tensor.clone()


@pytest.fixture
def copied(monkeypatch):
    """How many bytes the trainer copies into its slots."""
    copied = []
    put = buffers.CudaStaging.put

    def noting(self, slot, entry, spec, tensor):
        memory = self._slots[slot]
        start = memory.data_ptr() + entry.offset
        copied.append(0 if tensor.data_ptr() == start else entry.nbytes)
        return put(self, slot, entry, spec, tensor)

    monkeypatch.setattr(buffers.CudaStaging, "put", noting)
    return copied


@pytest.mark.parametrize("wrap", [lambda one: one, Once], ids=["alone", "once"])
@pytest.mark.parametrize("bucket_bytes", [64, 256, 1 << 20])
def test_tensors_that_lie_whole_in_a_bucket_are_made_there(gpus, copied, bucket_bytes, wrap):
    rank, tensors = gpu_rank(), checkpoint(3)
    source = Placing(tensors)
    report, _ = send([rank], wrap(source), bucket_bytes=bucket_bytes, transport="cuda_ipc")
    entries = [one for bucket in Manifest(source.specs(), bucket_bytes).buckets() for one in bucket]
    if report["buckets"] == len(Manifest(source.specs(), bucket_bytes).buckets()):
        whole = {source.specs()[one.index].name for one in entries if one.nbytes == source.specs()[one.index].nbytes}
        assert set(source.placed) == whole
    assert sum(copied) == sum(tensors[name].nbytes for name in tensors.keys() - set(source.placed))
    assert source.placed
    rank.model.assert_unchanged(loaded(tensors))
    assert not any(name in source.places for name in tensors), "the memory is gone"


def test_tensors_for_several_gpus_are_made_once_and_copied(gpus):
    ranks = [gpu_rank(ToyModel(i, 2), i) for i in range(2)]
    tensors = checkpoint(4)
    source = Placing(tensors)
    send(ranks, source, transport="cuda_ipc")
    assert source.places is None
    for i, rank in enumerate(ranks):
        rank.model.assert_unchanged(loaded(tensors, i, 2))


def test_a_subclass_that_changes_what_is_sent_is_asked_for_that(gpus):
    class Doubling(Placing):
        def tensors(self):
            for name, tensor in super().tensors():
                yield name, tensor * 2

    rank, tensors = gpu_rank(), checkpoint(5)
    source = Doubling(tensors)
    send([rank], source, transport="cuda_ipc")
    assert source.places is None
    rank.model.assert_unchanged(loaded({name: tensor * 2 for name, tensor in tensors.items()}))


def test_a_proxy_that_changes_what_is_sent_is_asked_for_that(gpus):
    """Some versions of Python find an attribute of a protocol that only `__getattr__` gives."""

    class Proxy:
        def __init__(self, source):
            self._source = source

        def __getattr__(self, name):
            return getattr(self._source, name)

        def tensors(self):
            for name, tensor in self._source.tensors():
                yield name, tensor * 2

    rank, tensors = gpu_rank(), checkpoint(5)
    source = Placing(tensors)
    send([rank], Proxy(source), transport="cuda_ipc")
    assert source.places is None
    rank.model.assert_unchanged(loaded({name: tensor * 2 for name, tensor in tensors.items()}))


def test_a_source_has_no_places_after_an_update_that_broke_off(gpus):
    tensors = checkpoint(6)
    source = Placing(tensors, breaks_at="norm.weight")
    error, _ = send([gpu_rank()], Once(source), bucket_bytes=1 << 20, transport="cuda_ipc")
    assert "broken" in str(error)
    assert source.placed and not any(name in source.places for name in tensors)
    assert not gpus["GPU-0"].memory


def test_the_stream_of_a_tensor_that_was_made_in_its_place_is_waited_for(gpus, monkeypatch):
    stream = FakeStream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    staging = buffers.CudaStaging("GPU-0", 4096, 1)
    staging._slots = [slot.as_subclass(OnGpu) for slot in staging._slots]
    entry, spec = BucketEntry(0, 256, 16), TensorSpec("a", "float32", (4,))
    staging.put(0, entry, spec, staging.place(0, entry, spec))
    staging.publish()
    assert stream.waits == [stream]
    staging.close()


class Quantised(torch.nn.Module):
    """Takes the tensors as they are named."""

    def __init__(self, specs):
        super().__init__()
        for spec in specs:
            memory = torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype))
            self.register_parameter(spec.name.replace(".", "/"), torch.nn.Parameter(memory, requires_grad=False))

    def load_weights(self, weights):
        for name, tensor in weights:
            self._parameters[name.replace(".", "/")].data.copy_(tensor)


@pytest.mark.parametrize("drafted", [False, True])
def test_weights_are_quantised_into_buckets(gpus, copied, monkeypatch, drafted):
    monkeypatch.setattr(quantised, "GROUP_VALUES", 3000)
    generator = torch.Generator().manual_seed(1)
    tensors = {f"{i}.weight": torch.randn(20 + i, 48, generator=generator).bfloat16() for i in range(20)}
    tensors["norm.weight"] = torch.ones(48)
    config = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    source = QuantisedSource(tensors, config, [f"{i}.weight_scale_inv" for i in range(20)])
    expected = dict(source.tensors())
    rank = gpu_rank(Quantised(source.specs()))
    sent = source
    if drafted:
        sent = with_draft(source, QuantisedSource({}, config, ["a.weight_scale_inv"]))
    report, _ = send([rank], sent, bucket_bytes=4096, transport="cuda_ipc")
    assert report["buckets"] > 5
    assert sum(copied) < 0.5 * report["bytes"]
    for name, tensor in expected.items():
        arrived = rank.model._parameters[name.replace(".", "/")]
        assert torch.equal(arrived.float(), tensor.float()), name
