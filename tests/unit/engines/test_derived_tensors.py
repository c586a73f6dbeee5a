"""A loader that computes tensors of weights, and what reads them by their addresses."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import pytest
import ranks
import torch

from rl_memory_plugins.engines import derived_tensors
from rl_memory_plugins.engines.saved_layers import SavedLayers
from rl_memory_plugins.weights.manifest import Manifest
from rl_memory_plugins.weights.model_loader import ModelLoader
from rl_memory_plugins.weights.source import spec_of


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2, 3), requires_grad=False)
        self.absorbed = self.view = None


class Derives(torch.nn.Module):
    """Like MLA of some models: its loader assigns to a layer what it has computed of the weight."""

    def __init__(self):
        super().__init__()
        self.layer = Attention()
        self.breaks = False

    def load_weights(self, weights):
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor)
        self.layer.absorbed = (self.layer.weight * 2).t().contiguous().t()
        self.layer.view = self.layer.weight.data.t()
        if self.breaks:
            raise OSError("broken")


def tensors_of(value):
    return {"layer.weight": torch.full((2, 3), float(value))}


@pytest.fixture
def model():
    made = Derives()
    made.load_weights(tensors_of(1).items())
    return made


def loader_of(model):
    return ModelLoader(
        model.load_weights,
        lambda: dict(model.named_parameters()),
        unchanged=lambda: SavedLayers(dict(model.named_modules())).restoring(),
        in_place=lambda: derived_tensors.in_place(model),
    )


def update(model, value, *, breaks=False):
    loader, tensors = loader_of(model), tensors_of(value)
    plan = loader.plan(Manifest([spec_of(*one) for one in tensors.items()]), loader.drop_outdated())
    model.breaks = breaks
    loader.load_with_engine(plan, iter(tensors.items()))
    return plan


def test_what_a_loader_computes_is_where_graphs_read_it(model):
    read, weight = model.layer.absorbed, model.layer.weight
    for value in (2, 3):
        assert update(model, value).opaque
        assert model.layer.absorbed is read and torch.equal(read, torch.full((2, 3), 2.0 * value))
        assert model.layer.weight is weight and torch.equal(model.layer.view, weight.t())


def test_after_a_load_that_breaks_off_the_next_one_writes_where_graphs_read(model):
    read = model.layer.absorbed
    with pytest.raises(OSError, match="broken"):
        update(model, 2, breaks=True)
    assert model.layer.absorbed is read
    model.breaks = False
    update(model, 3)
    assert model.layer.absorbed is read and torch.equal(read, torch.full((2, 3), 6.0))


@pytest.mark.parametrize("new", [torch.ones(3), torch.ones(2, 3, dtype=torch.float64), None, 5])
def test_what_cannot_lie_there_stays_as_the_loader_has_assigned_it(model, new):
    with derived_tensors.in_place(model):
        model.layer.absorbed = new
    assert model.layer.absorbed is new


def test_a_parameter_is_not_overwritten_by_what_takes_the_place_of_its_view(model):
    weight = model.layer.weight.clone()
    with derived_tensors.in_place(model):
        model.layer.view = torch.full((3, 2), 9.0)
    assert torch.equal(model.layer.weight, weight) and torch.equal(model.layer.view, torch.full((3, 2), 9.0))


def test_tensors_that_were_one_and_are_two_do_not_overwrite_each_other(model):
    model.layer.other = read = model.layer.absorbed
    with derived_tensors.in_place(model):
        model.layer.absorbed, model.layer.other = torch.full((2, 3), 3.0), torch.full((2, 3), 4.0)
    assert torch.equal(model.layer.absorbed, torch.full((2, 3), 3.0)) and model.layer.absorbed is read
    assert torch.equal(model.layer.other, torch.full((2, 3), 4.0))
    with derived_tensors.in_place(model):
        model.layer.absorbed = model.layer.other = torch.full((2, 3), 5.0)
    assert torch.equal(read, torch.full((2, 3), 5.0)) and torch.equal(model.layer.other, read)


class Arguments(NamedTuple):
    scale: float
    tensors: tuple


CONTAINERS = {
    "tuple": lambda *tensors: (1, *tensors),
    "list": lambda *tensors: [*tensors, None],
    "dict": lambda *tensors: dict(zip("ab", tensors, strict=True)),
    "named tuple in a list": lambda *tensors: [Arguments(0.5, tensors)],
}


def leaves(value):
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS)
def test_tensors_in_containers_are_where_graphs_read_them(model, make):
    """As the arguments of a kernel that a loader puts together (SGLang's Kimi-K3)."""
    model.layer.arguments = former = make(torch.zeros(2), torch.zeros(3))
    read = leaves(former)
    for value in (2.0, 3.0):
        with derived_tensors.in_place(model):
            model.layer.arguments = make(torch.full((2,), value), torch.full((3,), value + 1))
        assert type(model.layer.arguments) is type(former)
        assert all(one is other for one, other in zip(leaves(model.layer.arguments), read, strict=True))
        assert [one.tolist() for one in read] == [[value] * 2, [value + 1] * 3]


def test_a_container_that_the_loader_changes_in_place_is_followed_too(model):
    model.layer.arguments = arguments = [torch.zeros(2), {"b": torch.zeros(2)}]
    read = leaves(arguments)
    with derived_tensors.in_place(model):
        arguments[0], arguments[1]["b"] = torch.ones(2), torch.ones(2)
    assert model.layer.arguments is arguments
    assert all(one is other for one, other in zip(leaves(arguments), read, strict=True))
    assert all(bool(one.all()) for one in read)
    inner = arguments[1]
    with pytest.raises(OSError), derived_tensors.in_place(model):
        arguments[0], arguments[1] = torch.full((2,), 5.0), (1,)
        arguments.append(torch.zeros(1))
        inner.clear()
        raise OSError
    assert model.layer.arguments is arguments and len(arguments) == 2 and arguments[1] is inner
    assert all(one is other for one, other in zip(leaves(arguments), read, strict=True))


@pytest.mark.parametrize("new", [(), (torch.ones(2),), None, [torch.ones(3), torch.ones(1)]])
def test_containers_of_another_form_stay_as_the_loader_has_assigned_them(model, new):
    model.layer.arguments = (torch.zeros(2), torch.zeros(2))
    with derived_tensors.in_place(model):
        model.layer.arguments = new
    assert model.layer.arguments is new


def test_a_container_within_itself_is_no_endless_search(model):
    model.layer.arguments = arguments = [torch.zeros(2)]
    arguments.append(arguments)
    read = arguments[0]
    with derived_tensors.in_place(model):
        arguments[0] = torch.ones(2)
    assert arguments[0] is read and bool(read.all()) and arguments[1] is arguments


class Merges(torch.nn.Module):
    """Like Kimi-K3: each load puts the parameters of a layer together in new memory, and keeps that too."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (torch.nn.Parameter(torch.zeros(2), requires_grad=False) for _ in range(2))

    def load_weights(self, weights):
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor)
        self.merged = torch.cat([self.a.data, self.b.data])
        self.a.data, self.b.data = self.merged[:2], self.merged[2:]


def test_parameters_that_a_loader_puts_elsewhere_are_where_graphs_read_them():
    model = Merges()
    model.load_weights({"a": torch.ones(2), "b": torch.ones(2)}.items())
    read, address = model.merged, model.a.data_ptr()
    for value in (2.0, 3.0):
        with derived_tensors.in_place(model):
            model.load_weights({"a": torch.full((2,), value), "b": torch.full((2,), value + 1)}.items())
        assert read.tolist() == [value, value, value + 1, value + 1]
        assert model.merged is read and model.a.data_ptr() == address
        assert model.a.tolist() == [value] * 2 and model.b.tolist() == [value + 1] * 2


def test_views_of_one_memory_are_each_written(model):
    model.layer.absorbed, model.layer.other = whole = torch.zeros(2, 2, 3).unbind()
    with derived_tensors.in_place(model):
        model.layer.absorbed, model.layer.other = torch.full((2, 3), 3.0), torch.full((2, 3), 4.0)
    assert (model.layer.absorbed, model.layer.other) == whole
    assert float(whole[0].sum()) == 18 and float(whole[1].sum()) == 24


def test_a_copy_that_fails_leaves_the_former_tensors(model):
    expanded = model.layer.other = torch.zeros(1, 3).expand(2, 3)  # no copy can write it
    read = model.layer.absorbed
    with pytest.raises(RuntimeError), derived_tensors.in_place(model):
        model.layer.other, model.layer.absorbed = torch.ones(2, 3), torch.ones(2, 3)
    assert model.layer.other is expanded and model.layer.absorbed is read


def test_a_reload_runs_in_place_too_where_the_loader_computes(model):
    class Reloads:
        why, is_temporary, optional = "", None, {}

        def checkpoint_layout(self):
            return contextlib.nullcontext(dict(model.named_parameters()))

        def suits(self, plan):
            return True

        def load(self, weights, plan):
            model.load_weights(weights)

    read, loader = model.layer.absorbed, loader_of(model)
    loader.reload = Reloads
    tensors = tensors_of(4)
    plan = loader.plan(Manifest([spec_of(*one) for one in tensors.items()]), loader.drop_outdated())
    loader.load_with_engine(plan, iter(tensors.items()))
    assert model.layer.absorbed is read and torch.equal(read, torch.full((2, 3), 8.0))


def test_updates_of_a_rank_run_in_place(tmp_path):
    rank = ranks.Rank(Derives, lambda model: model.load_weights(tensors_of(1).items()), tmp_path)
    read = rank.model.layer.absorbed
    with rank.agent.receiver._model.in_place():
        rank.model.layer.absorbed = torch.full((2, 3), 4.0)
    assert rank.model.layer.absorbed is read and torch.equal(read, torch.full((2, 3), 4.0))
