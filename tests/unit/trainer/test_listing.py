"""Specs that an earlier update has listed: the same as if they were made, whatever has changed in between."""

from __future__ import annotations

import collections

import pytest
import torch

from rl_memory_plugins.errors import InvalidRequestError
from rl_memory_plugins.trainer import ModelSource
from rl_memory_plugins.trainer.sources import listing
from rl_memory_plugins.weights.recent import Recent
from rl_memory_plugins.weights.source import spec_of


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch):
    monkeypatch.setattr(listing, "_recent", Recent())


def made(**more):
    return {"a": torch.ones(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), **more}


def all_of(source):
    """The specs and the tensors of a source, which agree."""
    specs = source.specs()
    given = list(source.tensors())
    assert [spec_of(name, tensor) for name, tensor in given] == specs
    return specs, [tensor for _, tensor in given]


CHANGES = {
    "other values": lambda d: {"a": d["a"] + 1, "b": d["b"]},
    "another shape": lambda d: {"a": torch.ones(3, 2), "b": d["b"]},
    "another dtype": lambda d: {"a": d["a"].half(), "b": d["b"]},
    "another name": lambda d: {"c": d["a"], "b": d["b"]},
    "another order": lambda d: {"b": d["b"], "a": d["a"]},
    "one less": lambda d: {"a": d["a"]},
    "one more": lambda d: {**d, "c": torch.zeros(1)},
    "other strides": lambda d: {"a": torch.ones(3, 2).t(), "b": d["b"]},
    "a negation": lambda d: {"a": torch._neg_view(d["a"]), "b": d["b"]},
    "nothing": lambda d: {},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_next_update_lists_what_is_there_then(change):
    first = made()
    assert [spec.name for spec in all_of(ModelSource(first))[0]] == ["a", "b"]
    changed = change(first)
    _, tensors = all_of(ModelSource(changed))
    assert all(given is held for given, held in zip(tensors, changed.values(), strict=True))
    assert [spec.name for spec in all_of(ModelSource(first))[0]] == ["a", "b"]


def test_a_parameter_whose_data_was_replaced_is_sent_from_its_new_memory():
    module = torch.nn.Linear(2, 2)
    source = ModelSource(module)
    all_of(source)
    module.weight.data = torch.full((2, 2), 7.0)
    listed = source.specs()
    module.bias.data = torch.full((2,), 8.0)  # also between the list and the update
    assert source.resident()[0].data_ptr() == module.weight.data_ptr()
    sent = dict(source.tensors())
    assert torch.equal(sent["weight"], torch.full((2, 2), 7.0)) and torch.equal(sent["bias"], torch.full((2,), 8.0))
    assert not sent["weight"].requires_grad and [spec.name for spec in listed] == ["weight", "bias"]


def test_a_list_that_a_caller_has_changed_changes_no_later_one():
    source = ModelSource(made())
    source.specs().clear()
    source.specs().append("x")
    assert [spec.name for spec in source.specs()] == ["a", "b"]


@pytest.mark.parametrize("kind", [dict, collections.OrderedDict])
def test_a_tensor_with_several_names_is_sent_under_the_first(kind):
    tensors = kind(made(c=None, _orig_mod=None))
    tensors["c"], tensors["_orig_mod.d"] = tensors["a"], tensors["b"]
    del tensors["_orig_mod"]
    for _ in range(2):
        assert [spec.name for spec in all_of(ModelSource(tensors))[0]] == ["a", "b"]
    tensors["e"] = tensors.pop("a")
    assert [spec.name for spec in all_of(ModelSource(tensors))[0]] == ["b", "c"]


def test_names_lose_the_parts_of_wrappers():
    wrapped = torch.compile(torch.nn.Linear(2, 2))
    for _ in range(2):
        assert [spec.name for spec in all_of(ModelSource(wrapped))[0]] == ["weight", "bias"]


def test_memory_that_has_gone_since_the_last_update_is_missed():
    tensors = made()
    ModelSource(tensors).specs()
    tensors["b"].untyped_storage().resize_(0)
    with pytest.raises(InvalidRequestError, match="b has no memory"):
        ModelSource(tensors).specs()
    tensors["b"] = torch.ones(4, dtype=torch.bfloat16, device="meta")
    with pytest.raises(InvalidRequestError, match="b cannot be sent: it is on the meta device"):
        ModelSource(tensors).specs()


def test_empty_tensors_and_those_of_other_types_are_listed_too():
    class Other(torch.Tensor):
        pass

    odd = {**made(c=torch.empty(0)), "d": torch.ones(2).as_subclass(Other)}
    for _ in range(2):
        specs, _ = all_of(ModelSource(odd))
        assert [spec.name for spec in specs] == ["a", "b", "c", "d"]
    with pytest.raises(InvalidRequestError, match="e cannot be sent: it is a int"):
        ModelSource({**odd, "e": 5}).specs()


def test_a_mapping_that_makes_its_tensors_is_asked_for_each_once():
    class Making(dict):
        def __getitem__(self, name):
            raise AssertionError("not by name")

        def items(self):
            return ((name, tensor.clone()) for name, tensor in super().items())

    assert [spec.name for spec in all_of(ModelSource(Making(made())))[0]] == ["a", "b"]


def test_only_the_last_lists_are_kept():
    first = ModelSource(made()).specs()
    for number in range(20):
        ModelSource(made(**{f"c{number}": torch.ones(1)})).specs()
        assert ModelSource(made()).specs()[0] is first[0], "made once"
    assert len(listing._recent) == 4
