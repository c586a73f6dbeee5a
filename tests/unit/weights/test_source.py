"""What `ModelSource` sends of a module that changes between updates, and what it refuses."""

import gc
import weakref
from collections import UserDict

import pytest
import torch
from toys import Rank, ToyModel, checkpoint, loaded, update

from rl_memory_plugins.errors import InvalidRequestError
from rl_memory_plugins.trainer import ModelSource


class Trainer(torch.nn.Module):
    """A checkpoint's tensors: parameters that are trained, parameters that are not, and a buffer."""

    def __init__(self, seed):
        super().__init__()
        for number, (name, tensor) in enumerate(checkpoint(seed, opaque=False).items()):
            module = self
            *path, last = name.split(".")
            for part in path:
                module = module._modules.setdefault(part, torch.nn.Module())
            if name == "norm.weight":
                module.register_buffer(last, tensor)
            else:
                module.register_parameter(last, torch.nn.Parameter(tensor, requires_grad=number % 2 == 0))

    def become(self, seed):
        """As an EMA's swap or `.to()` does: new memory, in the same parameters and in new buffers."""
        tensors = checkpoint(seed, opaque=False)
        for name, parameter in self.named_parameters():
            parameter.data = tensors[name]
        self.norm.weight = tensors["norm.weight"]


def test_a_source_that_is_kept_sends_what_the_module_holds_at_each_update():
    rank, trainer = Rank(ToyModel(opaque=False)), Trainer(1)
    source = ModelSource(trainer)
    for seed in (1, 2, 3):
        trainer.become(seed)
        update([rank], source)
        rank.model.assert_unchanged(loaded(checkpoint(seed, opaque=False), opaque=False))
    tensors = checkpoint(4, opaque=False)
    for name in [name for name, _ in trainer.named_parameters()]:  # as `.to()` may
        trainer.get_submodule(name.removesuffix(".weight")).weight = torch.nn.Parameter(tensors[name])
    trainer.norm.weight = tensors["norm.weight"]
    update([rank], source)
    rank.model.assert_unchanged(loaded(tensors, opaque=False))


def test_what_wrappers_put_into_names_is_taken_out_of_them():
    compiled = torch.compile(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    assert [spec.name for spec in ModelSource(compiled).specs()] == ["0.weight", "0.bias"]


def test_a_mapping_is_looked_at_anew_for_each_update():
    tensors = {"a": torch.zeros(2)}
    source = ModelSource(tensors)
    assert [spec.shape for spec in source.specs()] == [(2,)]
    assert torch.equal(dict(source.tensors())["a"], torch.zeros(2))
    tensors |= {"a": torch.ones(3), "b": torch.ones(1)}
    assert [spec.name for spec in source.specs()] == ["a", "b"]
    assert [tensor.shape for tensor in source.resident()] == [(3,), (1,)]
    assert torch.equal(dict(source.tensors())["a"], torch.ones(3))


def test_within_one_update_a_module_is_collected_once_and_gives_what_its_specs_say():
    trainer = Trainer(1)
    source, collected = ModelSource(trainer), []
    trainer.register_state_dict_pre_hook(lambda *args: collected.append(1))
    specs = source.specs()
    trainer.norm.weight = torch.zeros(99)
    resident, sent = source.resident(), list(source.tensors())
    assert [name for name, _ in sent] == [spec.name for spec in specs]
    assert all(tensor.shape == spec.shape for (_, tensor), spec in zip(sent, specs, strict=True))
    assert [one.data_ptr() for one in resident] == [tensor.data_ptr() for _, tensor in sent]
    assert not any(tensor.requires_grad for tensor in resident) and not any(t.requires_grad for _, t in sent)
    assert len(collected) == 1


def test_a_source_that_is_kept_holds_no_memory_that_the_module_has_given_up():
    gc.disable()
    try:
        trainer = Trainer(1)
        source = ModelSource(trainer)
        update([Rank(ToyModel(opaque=False))], source)
        old = [weakref.ref(tensor.untyped_storage()) for tensor in trainer.state_dict(keep_vars=True).values()]
        trainer.become(2)
        assert not any(storage() for storage in old)
    finally:
        gc.enable()


def test_a_mapping_that_makes_its_tensors_is_read_one_by_one_and_none_of_them_is_resident():
    alive = []

    class Lazy(UserDict):
        def __getitem__(self, name):
            tensor = torch.full((2,), float(self.data[name]))
            alive.append(weakref.ref(tensor))
            return tensor

    source = ModelSource(Lazy({name: number for number, name in enumerate("abcd")}))
    assert [spec.name for spec in source.specs()] == list("abcd")
    assert source.resident() is None
    for number, (_name, tensor) in enumerate(source.tensors()):
        assert torch.equal(tensor, torch.full((2,), float(number)))
        del tensor
        assert sum(one() is not None for one in alive) <= 1


def test_what_was_listed_for_an_update_that_began_elsewhere_is_not_sent_by_a_later_one():
    tensors = {"a": torch.zeros(2)}
    source = ModelSource(tensors)
    source.specs()
    tensors["a"] = torch.empty(2, device="meta")
    with pytest.raises(InvalidRequestError, match="meta device"):
        source.specs()
    tensors["a"] = torch.ones(2)
    assert torch.equal(dict(source.tensors())["a"], torch.ones(2))


class Stateful(torch.nn.Linear):
    """As Transformer Engine's modules are."""

    def __init__(self, state):
        super().__init__(2, 2)
        self.state = state

    def get_extra_state(self):
        return self.state

    def set_extra_state(self, state):
        self.state = state


def test_extra_state_is_sent_only_where_it_is_a_tensor():
    for state in (None, b"scales", {"scale": torch.ones(1)}):
        module = Stateful(state)
        for one in (module, module.state_dict()):
            assert [spec.name for spec in ModelSource(one).specs()] == ["weight", "bias"]
            assert [name for name, _ in ModelSource(one).tensors()] == ["weight", "bias"]
    assert [spec.name for spec in ModelSource(Stateful(torch.ones(1))).specs()] == ["weight", "bias", "_extra_state"]


@pytest.mark.parametrize("value", [None, 3, torch.empty(2, device="meta")], ids=["none", "number", "meta"])
def test_what_has_no_content_to_send_is_refused_by_its_name(value):
    with pytest.raises(InvalidRequestError, match="step .*cannot be sent") as caught:
        ModelSource({"a": torch.ones(2), "step": value}).specs()
    assert caught.value.details["name"] == "step"


def test_what_a_rename_leaves_out_need_be_no_tensor():
    source = ModelSource({"a": torch.ones(2), "step": 3}, rename=lambda name: None if name == "step" else name)
    assert [spec.name for spec in source.specs()] == ["a"]
