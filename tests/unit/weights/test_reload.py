"""Models whose engine transforms weights after loading: its own reload loads them, or nothing does."""

from contextlib import contextmanager

import pytest
import torch
from toys import Rank, checkpoint, update

from rl_memory_plugins.errors import ManifestError, UnsupportedError, WeightUpdateError
from rl_memory_plugins.memory.weights_content import KeptWeights
from rl_memory_plugins.tags import Content


class Linear(torch.nn.Module):
    """Stored transposed; its checkpoint has `weight` and `bias`."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4, 4), requires_grad=False)
        self.bias = torch.nn.Parameter(torch.zeros(4), requires_grad=False)


class PackingEngine:
    """A square weight is the trap: the checkpoint's tensor fits into the packed one, and would be garbage there."""

    why = "weights are stored transposed"
    is_temporary = None
    optional = {}

    def __init__(self):
        self.model = torch.nn.ModuleDict({"one": Linear(), "two": Linear()})
        self.calls = []

    def load_weights(self, weights):
        parameters = dict(self.model.named_parameters())
        for name, weight in weights:
            parameters[name].data.copy_(weight)

    def suits(self, plan):
        return True

    @contextmanager
    def checkpoint_layout(self):
        packed = {name: parameter.data for name, parameter in self.model.named_parameters()}
        for parameter in self.model.parameters():
            parameter.data = torch.empty_like(parameter.data)
        try:
            yield dict(self.model.named_parameters())
        finally:
            for name, parameter in self.model.named_parameters():
                parameter.data = packed[name]

    def load(self, weights, plan):
        self.calls.append(plan.partial or bool(plan.omitted))
        for name, weight in list(weights):  # it keeps them all until the end
            self.model.get_parameter(name).data.copy_(weight.t() if weight.dim() == 2 else weight)


def rank_of(engine):
    return Rank(engine.model, reload=lambda: engine)


@pytest.fixture
def engine():
    made = PackingEngine()
    made.model.load_weights = made.load_weights
    return made


def tensors(seed=0, names=("one.weight", "one.bias", "two.weight", "two.bias")):
    torch.manual_seed(seed)
    return {name: torch.randn(4, 4) if name.endswith("weight") else torch.randn(4) for name in names}


def assert_holds(engine, sent):
    for name, tensor in sent.items():
        assert torch.equal(engine.model.get_parameter(name), tensor.t() if tensor.dim() == 2 else tensor), name


def test_all_tensors_take_the_engine_s_reload_once(engine):
    rank = rank_of(engine)
    for seed in (1, 2):
        sent = tensors(seed)
        _, (receiving,) = update([rank], sent)
        assert receiving.error is None
        assert (receiving.report["opaque"], receiving.report["replayed"]) == (4, 0)
        assert_holds(engine, sent)
    assert engine.calls == [False, False]
    assert rank.receiver.checksums()["layout"] == "engine"


def test_a_manifest_is_checked_against_the_checkpoint_s_shapes(engine):
    rank = rank_of(engine)
    sent = tensors()
    sent["one.weight"] = torch.zeros(4, 3)
    del sent["two.bias"]
    error, _ = update([rank], sent)
    assert isinstance(error, ManifestError)
    assert {(m["kind"], m["name"]) for m in error.details["mismatches"]} == {
        ("shape", "one.weight"),
        ("missing", "one.weight"),
        ("missing", "two.bias"),
    }
    assert engine.calls == [] and not any(parameter.any() for parameter in engine.model.parameters())


def test_a_partial_update_gives_whole_layers(engine):
    rank = rank_of(engine)
    update([rank], first := tensors(1))
    error, _ = update([rank], tensors(2, ("one.weight",)), partial=True)
    assert isinstance(error, ManifestError)
    assert [(m["kind"], m["name"]) for m in error.details["mismatches"]] == [("missing", "one.bias")]
    assert_holds(engine, first)
    _, (receiving,) = update([rank], second := tensors(2, ("one.weight", "one.bias")), partial=True)
    assert receiving.error is None
    assert_holds(engine, {**first, **second})
    assert engine.calls == [False, True]


def test_an_engine_that_cannot_is_left_as_it_is():
    def refuse():
        raise UnsupportedError("layer one is packed", layers={"one": "Packing"})

    rank = Rank(reload=refuse)
    before = rank.model.snapshot()
    error, (receiving,) = update([rank], checkpoint(1))
    assert isinstance(error, UnsupportedError) and isinstance(receiving.error, UnsupportedError)
    assert error.details["layers"] == {"one": "Packing"}
    assert rank.model.loads == 0
    rank.model.assert_unchanged(before)


class Borrowing(PackingEngine):
    """Reads the weights only where it is told to, or when all have come; its biases are copies."""

    def load(self, weights, plan):
        self.waiting, self.storages, self.reads = [], {}, 0
        weights.lend({"one.weight", "two.weight"}, self.read)
        for name, tensor in weights:
            self.storages[name] = tensor.untyped_storage().data_ptr()
            self.waiting.append((name, tensor))
        self.read()

    def read(self):
        self.reads += bool(self.waiting)
        for name, tensor in self.waiting:
            self.model.get_parameter(name).data.copy_(tensor.t() if tensor.dim() == 2 else tensor)
        self.waiting = []


def test_a_loader_that_keeps_no_tensors_gets_them_where_they_have_arrived():
    engine = Borrowing()
    engine.model.load_weights = engine.load_weights
    update([rank_of(engine)], sent := tensors(1))
    assert_holds(engine, sent)
    assert engine.storages["one.weight"] == engine.storages["two.weight"]
    assert len(set(engine.storages.values())) == 3


def test_lent_tensors_are_read_before_the_trainer_writes_to_their_memory():
    engine = Borrowing()
    engine.model.load_weights = engine.load_weights
    update([rank_of(engine)], sent := tensors(1), bucket_bytes=64)
    assert_holds(engine, sent)
    assert engine.reads > 1


def test_a_tensor_that_comes_in_parts_is_not_lent():
    engine = Borrowing()
    engine.model.load_weights = engine.load_weights
    update([rank_of(engine)], sent := tensors(1), bucket_bytes=32)
    assert_holds(engine, sent)
    assert len(set(engine.storages.values())) == 4


def test_a_reload_that_did_not_do_its_work_fails_the_update(engine):
    def load(weights, plan):
        list(weights)
        raise WeightUpdateError("the reload skipped a layer")

    engine.load = load
    rank = rank_of(engine)
    error, _ = update([rank], tensors())
    assert isinstance(error, WeightUpdateError)
    assert rank.manager.content is Content.FAILED


def test_a_transformation_that_is_seen_later_voids_the_plans(engine):
    seen, asked = [], []

    def reload():
        asked.append(len(seen))
        return engine if seen else None

    rank = Rank(engine.model, reload=reload, transformed=lambda: len(seen))
    for seed in (1, 2):
        sent = tensors(seed)
        _, (receiving,) = update([rank], sent)
        assert (receiving.report["opaque"], receiving.report["replayed"]) == (0, 4)
        for name, tensor in sent.items():
            assert torch.equal(engine.model.get_parameter(name), tensor), name
    assert asked == [0]  # for the plan, and not again where nothing is opaque
    seen.append("one")
    sent = tensors(3)
    _, (receiving,) = update([rank], sent)
    assert (receiving.report["opaque"], receiving.report["replayed"]) == (4, 0)
    assert_holds(engine, sent)


def test_an_update_may_leave_out_layers_that_are_kept_as_a_whole(engine):
    rank = rank_of(engine)
    update([rank], tensors(1))
    sent = tensors(2, ("two.weight", "two.bias"))

    def push(*kept):
        rank.manager.content = Content.STALE
        rank.manager._kept = KeptWeights(frozenset(kept))
        return update([rank], sent)[0]

    error = push("one.weight")
    assert isinstance(error, ManifestError)
    assert {m["name"] for m in error.details["mismatches"]} == {"one.weight", "one.bias"}
    for _ in range(2):
        assert push("one.weight", "one.bias")["tensors"] == 2
        assert engine.calls[-1] is True
        assert_holds(engine, {**tensors(1), **sent})
    assert isinstance(push("one.bias"), ManifestError)
    sent = tensors(2, ("one.bias", "two.weight", "two.bias"))
    assert isinstance(push("one.weight", "one.bias"), ManifestError)
