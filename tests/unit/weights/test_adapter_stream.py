"""Adapters over the real stream: the sender and the receiver of weight updates, with adapters of a toy."""

import threading

import pytest
import torch
from toys import Rank

from rl_memory_plugins.errors import InvalidRequestError, ManifestError, RLMemoryError, WeightUpdateError
from rl_memory_plugins.tags import Content
from rl_memory_plugins.trainer import ModelSource
from rl_memory_plugins.weights.adapters import RankAdapters
from rl_memory_plugins.weights.manifest import Mismatch
from rl_memory_plugins.weights.sender import WeightSender

TENSORS = {"layer.lora_A.weight": torch.arange(12.0).view(3, 4), "layer.lora_B.weight": torch.ones(6, 3)}


class Slots:
    """Layers of a toy: `layers`, with ranks up to 4."""

    def __init__(self, *layers):
        self.layers = layers or ("layer",)
        self.added = {}

    def check(self, name, config):
        if config["r"] > 4:
            raise InvalidRequestError("the rank is too large", field="config")

    def fit(self, config, specs):
        wrong = [Mismatch("shape", spec.name, "not a matrix") for spec in specs if len(spec.shape) != 2]
        return wrong, [spec.name for spec in specs if spec.name.split(".")[0] not in self.layers]

    def add(self, number, name, config, tensors):
        if name == "refused":
            raise ValueError("no slot")
        self.added[number] = (name, config, tensors)

    def remove(self, number):
        self.added.pop(number, None)


class Sent(threading.Thread):
    def __init__(self, ranks, slots, sender, name="policy", config=None):
        super().__init__(daemon=True)
        self.adapters = [
            RankAdapters(rank.receiver, lambda mine=mine: mine) for rank, mine in zip(ranks, slots, strict=True)
        ]
        self.arguments = (name, 7, config or {"r": 3}, sender.endpoints, sender.token, 10.0)
        self.reports, self.errors = [], []
        self.start()

    def run(self):
        def one(adapters):
            try:
                self.reports.append(adapters.prepare_adapter(*self.arguments))
            except RLMemoryError as error:
                self.errors.append(error)

        threads = [threading.Thread(target=one, args=(adapters,)) for adapters in self.adapters]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def send(tensors, ranks, slots, **options):
    sender = WeightSender([rank.manager.device.name for rank in ranks], timeout_s=10, bucket_bytes=32)
    sent = Sent(ranks, slots, sender, **options)
    error = None
    try:
        sender.send(ModelSource(tensors))
    except RLMemoryError as caught:
        error = caught
    sent.join(60)
    return sent, error


def test_the_tensors_arrive_whole_and_the_weights_stay():
    rank, slots = Rank(), Slots()
    before = rank.model.snapshot()
    sent, error = send(TENSORS, [rank], [slots])
    assert error is None and sent.errors == []
    name, config, tensors = slots.added[7]
    assert (name, config) == ("policy", {"r": 3}) and tensors.keys() == TENSORS.keys()
    for key, tensor in TENSORS.items():
        assert torch.equal(tensors[key], tensor) and tensors[key].data_ptr() != tensor.data_ptr()
    (report,) = sent.reports
    assert report["bytes"] == sum(tensor.nbytes for tensor in TENSORS.values())
    assert {"connect", "validate", "load", "add"} <= report["seconds"].keys()
    assert "drain" not in report["seconds"]
    rank.model.assert_unchanged(before)
    assert rank.manager.content is Content.VALID and rank.manager.epoch == 0


def test_a_configuration_is_refused_before_the_rank_connects():
    rank, slots = Rank(), Slots()
    adapters = RankAdapters(rank.receiver, lambda: slots)
    with pytest.raises(InvalidRequestError, match="too large"):
        adapters.prepare_adapter("policy", 7, {"r": 5}, {"*": "/no/such/socket"}, "t", 1.0)


def test_a_name_may_be_absent_on_some_ranks_and_not_on_all():
    ranks = [Rank(rank=0), Rank(rank=1)]
    slots = [Slots("layer"), Slots("other")]
    both = {**TENSORS, "other.lora_A.weight": torch.ones(3, 4)}
    sent, error = send(both, ranks, slots)
    assert error is None and len(sent.reports) == 2
    slots = [Slots("layer"), Slots("other")]
    sent, error = send({**both, "absent.lora_A.weight": torch.zeros(3, 4)}, ranks, slots)
    assert isinstance(error, ManifestError)
    assert [(found["kind"], found["name"]) for found in error.details["mismatches"]] == [
        ("unknown", "absent.lora_A.weight")
    ]
    assert [mine.added for mine in slots] == [{}, {}]
    assert all(rank.manager.content is Content.VALID for rank in ranks)


def test_a_shape_that_does_not_fit_is_a_mismatch():
    rank, slots = Rank(), Slots()
    _, error = send({**TENSORS, "layer.lora_A.weight": torch.ones(3)}, [rank], [slots])
    assert isinstance(error, ManifestError) and "not a matrix" in error.message
    assert slots.added == {}


def test_an_adapter_without_tensors_is_none():
    rank, slots = Rank(), Slots()
    _, error = send({}, [rank], [slots])
    assert isinstance(error, ManifestError) and "no tensors" in error.message
    assert slots.added == {}


def test_what_the_engine_refuses_is_a_failed_update():
    rank, slots = Rank(), Slots()
    sent, _ = send(TENSORS, [rank], [slots], name="refused")
    (error,) = sent.errors
    assert isinstance(error, WeightUpdateError) and "no slot" in error.message
    assert rank.manager.content is Content.VALID


def test_versions_are_forgotten():
    rank, slots = Rank(), Slots()
    slots.added = {1: "a", 2: "b", 3: "c"}
    adapters = RankAdapters(rank.receiver, lambda: slots)
    adapters.calls["forget_adapters"]([1, 3])
    adapters.calls["abort_adapter"](9)
    assert slots.added == {2: "b"}
