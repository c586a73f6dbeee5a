"""A loader that computes tensors of weights, and what reads them by their addresses."""

from __future__ import annotations

import pytest
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
