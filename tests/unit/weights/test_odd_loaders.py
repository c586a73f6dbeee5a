"""Loaders that do more than to copy tensors into parameters: an update gives what they themselves would give."""

from __future__ import annotations

import pytest
import torch
from test_transports import send
from toys import Rank

from rl_memory_plugins.engines.saved_layers import SavedLayers
from rl_memory_plugins.errors import ManifestError, WeightUpdateError
from rl_memory_plugins.tags import Content
from rl_memory_plugins.trainer import ModelSource
from rl_memory_plugins.weights.manifest import Manifest, TensorSpec
from rl_memory_plugins.weights.model_loader import ModelLoader
from rl_memory_plugins.weights.plan import trace


class Odd(torch.nn.Module):
    """Parameters by their names and values, and a loader that is a function of the model and the tensors."""

    def __init__(self, load, **parameters):
        super().__init__()
        for name, value in parameters.items():
            self.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))
        self._load = load

    def load_weights(self, weights):
        self._load(self, weights)


def plain(model, weights):
    for name, tensor in weights:
        model.get_parameter(name).data.copy_(tensor)


def loader_of(model):
    return ModelLoader(
        model.load_weights,
        lambda: dict(model.named_parameters()),
        buffers=lambda: dict(model.named_buffers()),
        unchanged=lambda: SavedLayers(dict(model.named_modules())).restoring(),
    )


def plan_of(loader, tensors, **options):
    return loader.plan(Manifest(ModelSource(tensors).specs(), **options), loader.drop_outdated())


def update(loader, tensors, **options):
    """Load tensors as a session does."""
    plan = plan_of(loader, tensors, **options)

    def arrivals():
        for name, tensor in tensors.items():
            if name in plan.opaque:
                yield name, tensor
            else:
                plan.apply(name, tensor)

    left = arrivals()
    loader.load_with_engine(plan, left)
    for _ in left:
        pass
    return plan


def sent(model, tensors):
    """Load tensors by a session, in several buckets."""
    rank = Rank(model)
    outcome, [thread] = send([rank], tensors)
    assert not isinstance(outcome, Exception) and thread.error is None, (outcome, thread.error)
    assert rank.manager.content is Content.VALID


@pytest.mark.parametrize(
    ("sent", "held"),
    [(torch.float8_e4m3fn, torch.uint8), (torch.bfloat16, torch.int16), (torch.int32, torch.int8)],
)
@pytest.mark.parametrize("rearranges", [False, True])
def test_bits_that_the_loader_reads_as_another_dtype_are_not_cast(sent, held, rearranges):
    def load(model, weights):
        for _, tensor in weights:
            found = tensor.view(held)
            model.weight.data.copy_(found.t().contiguous().t() if rearranges else found)

    values = torch.arange(1, 33).reshape(4, 8)
    tensor = values.to(torch.float32).to(sent) if sent.is_floating_point else values.to(sent)
    model = Odd(load, weight=torch.zeros(tensor.view(held).shape, dtype=held))
    plan = update(loader_of(model), {"weight": tensor})
    assert torch.equal(model.weight.data, tensor.view(held))
    assert not plan.casts


def test_a_loader_that_writes_before_it_reads_runs_in_every_update():
    def load(model, weights):
        model.other.data.normal_()
        plain(model, weights)

    model = Odd(load, weight=torch.zeros(4), other=torch.full((4,), torch.nan))
    update(loader_of(model), {"weight": torch.ones(4)})
    assert torch.equal(model.weight.data, torch.ones(4))
    assert model.other.isfinite().all()


def test_a_fill_before_the_first_name_is_replayed():
    def load(model, weights):
        model.other.data.zero_()
        plain(model, weights)

    model = Odd(load, weight=torch.zeros(4), other=torch.full((4,), torch.nan))
    assert not update(loader_of(model), {"weight": torch.ones(4)}).opaque
    assert torch.equal(model.other.data, torch.zeros(4))


def test_of_several_fills_of_the_same_memory_the_last_counts():
    def load(model, weights):
        model.other.data.fill_(1)
        model.other.data[:2].fill_(2)
        model.other.data.fill_(3)
        model.other.data[:1].fill_(4)
        plain(model, weights)

    model = Odd(load, weight=torch.zeros(4), other=torch.full((4,), torch.nan))
    assert not update(loader_of(model), {"weight": torch.ones(4)}).opaque
    assert model.other.tolist() == [4, 3, 3, 3]


def doubles(tensor):
    return tensor * 2  # only the loader can


def needs_values(tensor):
    return torch.from_numpy(tensor.numpy())


def reads_a_value(tensor):
    return torch.full_like(tensor, tensor.sum().item())


@pytest.mark.parametrize("by", [doubles, needs_values, reads_a_value])
@pytest.mark.parametrize("place", ["first", "last"])
def test_a_fill_before_the_first_name_erases_nothing_that_is_loaded(by, place):
    """Wherever the tensor comes that only the loader can load, and whichever writes the filled memory."""

    def load(model, weights):
        model.filled.data.zero_()
        for name, tensor in weights:
            if name == "filled":
                model.filled.data[:2].copy_(by(tensor) if opaque == "filled" else tensor)
            else:
                model.get_parameter(name).data.copy_(by(tensor) if name == opaque else tensor)

    for opaque in ("filled", "weight"):
        expected, model = (
            Odd(load, filled=torch.full((4,), torch.nan), weight=torch.zeros(2), plain=torch.zeros(2)) for _ in "12"
        )
        tensors = {"filled": torch.full((2,), 3.0), "plain": torch.full((2,), 4.0)}
        weight = {"weight": torch.full((2,), 5.0)}
        tensors = {**weight, **tensors} if place == "first" else {**tensors, **weight}
        expected.load_weights(tensors.items())
        sent(model, tensors)
        for name, parameter in expected.named_parameters():
            assert torch.equal(model.get_parameter(name), parameter), (opaque, name)


@pytest.mark.parametrize("reloads", [False, True])
def test_a_write_that_the_trace_cannot_follow_excuses_only_the_parameter_that_it_may_be_to(reloads):
    def load(model, weights):
        for name, tensor in weights:
            if name == "weight":
                model.weight.data[torch.arange(4)] = tensor
            else:
                plain(model, [(name, tensor)])

    model = Odd(load, weight=torch.zeros(4), other=torch.zeros(4))
    options = {"whole_layers": "it quantises", "is_temporary": lambda tensor: False} if reloads else {}
    with pytest.raises(ManifestError) as error:
        trace(
            model.load_weights,
            Manifest([TensorSpec("weight", "float32", (4,))]),
            expected=dict(model.named_parameters()),
            **options,
        )
    assert [one["name"] for one in error.value.details["mismatches"]] == ["other"]


def replaces(model, weights):
    made = torch.nn.Linear(3, 3, bias=False).requires_grad_(False)
    made.weight.data.copy_(torch.full((3, 3), 0.5))
    model.child = made
    for name, tensor in weights:
        if name == "scale":
            model.scale = tensor.item()
        else:
            plain(model, [(name, tensor)])
    model.weight.kind = "loaded"
    model.weight.shards.append("loaded")
    model.names["loaded"] = 1


def replaced():
    model = Odd(replaces, weight=torch.zeros(4))
    model.weight.shards, model.names = [], {}
    return model


@pytest.mark.parametrize("fits", [True, False])
def test_a_trace_leaves_the_model_as_it_was(fits):
    model = replaced()
    model.load_weights([("weight", torch.ones(4)), ("scale", torch.tensor(3.0))])
    model.weight.kind, model.weight.shards[:], model.names = "first", [], {}
    child, loader = model.child, loader_of(model)
    tensors = {"weight": torch.ones(4), "scale": torch.tensor(5.0), **({} if fits else {"bogus": torch.ones(2)})}
    if fits:
        plan_of(loader, tensors, partial=True)
    else:
        with pytest.raises(ManifestError):
            plan_of(loader, tensors)
    assert (model.child, model.scale, model.weight.kind) == (child, 3.0, "first")
    assert (model.weight.shards, model.names) == ([], {})
    assert (child.weight == 0.5).all()


def test_a_module_that_the_loader_makes_is_made_in_every_update():
    model = replaced()
    update(loader_of(model), {"weight": torch.ones(4), "scale": torch.tensor(5.0)})
    assert model.scale == 5.0
    assert (model.child.weight == 0.5).all()
    assert torch.equal(model.weight.data, torch.ones(4))


def test_a_loader_that_insists_on_all_names_gets_all():
    def load(model, weights):
        loaded = set()
        for name, tensor in weights:
            loaded.add(name)
            if name == "scale":
                model.scale.data.fill_(tensor.item())
            elif name != "skipped":
                plain(model, [(name, tensor)])
        if loaded != {"weight", "scale", "skipped"}:
            raise ValueError(f"weights are missing: {loaded}")

    model = Odd(load, weight=torch.zeros(4), scale=torch.zeros(()))
    tensors = {"weight": torch.ones(4), "scale": torch.tensor(2.0), "skipped": torch.ones(2)}
    for _ in range(2):
        update(loader_of(model), tensors)
    assert (model.scale.item(), model.weight[0].item()) == (2.0, 1.0)


def test_what_a_loader_computes_of_a_buffer_that_it_loads_follows_it():
    def load(model, weights):
        for name, tensor in weights:
            (model.table if name == "table" else model.weight.data).copy_(tensor)
        model.doubled = model.table * 2

    model = Odd(load, weight=torch.zeros(4))
    model.register_buffer("table", torch.ones(4))
    model.register_buffer("unloaded", torch.ones(4))
    for value in (5.0, 6.0):
        update(loader_of(model), {"weight": torch.ones(4), "table": torch.full((4,), value)})
        assert torch.equal(model.doubled, torch.full((4,), 2 * value))


def test_what_a_loader_computes_of_a_buffer_that_it_does_not_load_hinders_no_plan():
    def load(model, weights):
        plain(model, weights)
        model.doubled = model.unloaded * 2

    model = Odd(load, weight=torch.zeros(4))
    model.register_buffer("unloaded", torch.ones(4))
    assert not update(loader_of(model), {"weight": torch.ones(4)}).opaque


def put(model, weights):
    """Writes some elements, by an operator that a plan cannot follow."""
    for name, tensor in weights:
        if name == "weight":
            model.weight.data[torch.arange(len(tensor))] = tensor
        else:
            plain(model, [(name, tensor)])


def derives(model, weights):
    put(model, weights)
    model.doubled = model.other * 2


@pytest.mark.parametrize("load", [put, derives])
@pytest.mark.parametrize("length", [2, 4])
def test_a_parameter_that_is_loaded_in_part_is_no_complete_update(load, length):
    model = Odd(load, weight=torch.full((4,), torch.nan), other=torch.zeros(2))
    tensors = {"weight": torch.ones(length), "other": torch.ones(2)}
    if length == 4:
        update(loader_of(model), tensors)
        assert torch.equal(model.weight.data, torch.ones(4))
    else:
        with pytest.raises(WeightUpdateError, match="did not cover"):
            update(loader_of(model), tensors)


def test_a_write_that_no_update_would_repeat_covers_nothing():
    def load(model, weights):
        model.weight.data[torch.arange(4)] = 1.0
        assert not list(weights)

    with pytest.raises(ManifestError, match="weight"):
        plan_of(loader_of(Odd(load, weight=torch.zeros(4))), {})


class BreaksOff(ModelSource):
    def tensors(self):
        raise OSError("broken")
        yield


def test_what_a_loader_writes_before_it_reads_is_not_written_to_valid_weights():
    def load(model, weights):
        model.weight.data.zero_()
        for name, tensor in weights:
            model.get_parameter(name).data.fill_(tensor.sum().item())  # needs values

    model = Odd(load, weight=torch.full((4,), 7.0))
    rank = Rank(model)
    rank.manager.content = Content.VALID
    send([rank], BreaksOff({"weight": torch.ones(4)}))
    assert rank.manager.content is Content.VALID
    assert torch.equal(model.weight.data, torch.full((4,), 7.0))
