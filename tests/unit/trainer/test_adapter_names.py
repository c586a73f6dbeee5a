"""The names and the configuration of a PEFT model's adapter, without PEFT."""

import enum

import pytest
import torch

from rl_memory_plugins.errors import InvalidRequestError
from rl_memory_plugins.trainer import Adapter, ModelSource


class Layer(torch.nn.Module):
    """As PEFT wraps a linear layer."""

    def __init__(self, *adapters):
        super().__init__()
        self.base_layer = torch.nn.Linear(4, 6)
        self.lora_A = torch.nn.ModuleDict({name: torch.nn.Linear(4, 2, bias=False) for name in adapters})
        self.lora_B = torch.nn.ModuleDict({name: torch.nn.Linear(2, 6, bias=False) for name in adapters})


class Embedding(torch.nn.Module):
    def __init__(self, *adapters):
        super().__init__()
        self.base_layer = torch.nn.Embedding(8, 4)
        self.lora_embedding_A = torch.nn.ParameterDict({name: torch.zeros(2, 8) for name in adapters})
        self.lora_embedding_B = torch.nn.ParameterDict({name: torch.zeros(4, 2) for name in adapters})


class Saved(torch.nn.Module):
    def __init__(self, *adapters):
        super().__init__()
        self.original_module = torch.nn.Linear(4, 1)
        self.modules_to_save = torch.nn.ModuleDict({name: torch.nn.Linear(4, 1) for name in adapters})


class Kind(str, enum.Enum):
    LORA = "LORA"


class Config:
    """As PEFT's."""

    def to_dict(self):
        return {"peft_type": Kind.LORA, "r": 2, "target_modules": {"q", "a"}, "runtime_config": object()}


@pytest.fixture
def model():
    adapters = ("default", "default.x", "other")[::2]
    root = torch.nn.Module()
    root.base_model = torch.nn.Module()
    root.base_model.model = torch.nn.ModuleDict(
        {"q": Layer(*adapters), "embed": Embedding(*adapters), "score": Saved(*adapters), "norm": torch.nn.LayerNorm(4)}
    )
    root.peft_config = {"default": Config()}
    return root


def test_the_adapter_alone_is_sent_under_the_names_of_its_file(model):
    specs = Adapter("policy").source(model).specs()
    assert sorted(spec.name for spec in specs) == [
        "base_model.model.embed.lora_embedding_A",
        "base_model.model.embed.lora_embedding_B",
        "base_model.model.q.lora_A.weight",
        "base_model.model.q.lora_B.weight",
        "base_model.model.score.bias",
        "base_model.model.score.weight",
    ]


def test_another_adapter_of_the_model_has_other_tensors(model):
    model.base_model.model["q"].lora_A["other"].weight.data.fill_(3)
    sent = dict(Adapter("policy", peft_name="other").source(model).tensors())
    assert torch.equal(sent["base_model.model.q.lora_A.weight"], torch.full((2, 4), 3.0))
    assert len(sent) == 6


def test_the_parts_of_wrappers_are_left_out():
    name = "_fsdp_wrapped_module.base_model.model._orig_mod.q.lora_A.default.weight"
    assert Adapter("policy").saved_name(name) == "base_model.model.q.lora_A.weight"


def test_a_mapping_or_a_source_is_sent_as_it_is():
    tensors = {"base_model.model.q.lora_A.weight": torch.ones(2, 4)}
    assert [spec.name for spec in Adapter("policy").source(tensors).specs()] == [*tensors]
    source = ModelSource(tensors)
    assert Adapter("policy").source(source) is source


def test_the_configuration_is_json(model):
    assert Adapter("policy").sent_config(model) == {
        "peft_type": "LORA",
        "r": 2,
        "target_modules": ["a", "q"],
        "runtime_config": None,
    }
    given = {"r": 4, "lora_alpha": 8, "target_modules": ["q"]}
    assert Adapter("policy", given).sent_config(model) == given
    assert Adapter("policy", Config()).sent_config({})["r"] == 2


@pytest.mark.parametrize("name", ["default", "absent"])
def test_without_a_configuration_nothing_is_sent(name, model):
    tensors = {} if name == "default" else model
    with pytest.raises(InvalidRequestError, match="no configuration"):
        Adapter("policy", peft_name=name).sent_config(tensors)
