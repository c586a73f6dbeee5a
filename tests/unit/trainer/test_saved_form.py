"""Models are sent as `save_pretrained` writes them."""

import logging

import pytest
import torch
from safetensors.torch import load_file
from test_push_from_all import OPTIONS, engine_of
from torch import nn
from toys import Rank, update

from rl_memory_plugins.errors import ManifestError
from rl_memory_plugins.trainer import ModelSource, Offloader, push_from_all
from rl_memory_plugins.trainer.sources.saved import SavedForm

pytest.importorskip("transformers.core_model_loading", reason="transformers 5 converts models")

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}


def qwen3_moe(seed=0, **options):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SMALL, **EXPERTS, **options))


def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=4))


def qwen2_vl():
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    vision = {"depth": 2, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 32, "intermediate_size": 48}
    text = {**SMALL, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    return Qwen2_5_VLForConditionalGeneration(config)


def dense():
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**SMALL, tie_word_embeddings=True))


MODELS = {"experts": qwen3_moe, "renamed experts": mixtral, "vision": qwen2_vl, "tied": dense}


def saved(model, folder):
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def sent(source):
    """What a source sends, as its specs say."""
    specs, tensors = source.specs(), [(name, tensor.clone()) for name, tensor in source.tensors()]
    assert [(one.name, one.shape) for one in specs] == [(name, tuple(tensor.shape)) for name, tensor in tensors]
    assert [one.dtype for one in specs] == [str(tensor.dtype)[6:] for _, tensor in tensors]
    return dict(tensors)


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_is_sent_as_it_is_saved(kind, tmp_path):
    model = MODELS[kind]()
    wanted = saved(model, tmp_path)
    source = ModelSource(model)
    assert_same(sent(source), wanted)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert_same(sent(source), {name: tensor + 1 for name, tensor in wanted.items()})


def test_a_loaded_model_is_sent_as_it_was_saved(tmp_path):
    wanted = saved(qwen2_vl(), tmp_path)
    from transformers import AutoModelForImageTextToText

    assert_same(sent(ModelSource(AutoModelForImageTextToText.from_pretrained(tmp_path))), wanted)


def test_experts_are_views_of_the_models_own_memory():
    model = qwen3_moe()
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    source = ModelSource(model)
    assert len(source.specs()) == len(source.resident())
    tensors = list(source.tensors())
    assert {tensor.untyped_storage().data_ptr() for _, tensor in tensors} == own
    assert [t.data_ptr() for t in source.resident()] == [t.data_ptr() for _, t in tensors]
    assert all(tensor.is_contiguous() for _, tensor in tensors)


@pytest.mark.parametrize("dtype", [torch.bfloat16, {"*.experts.*": torch.float16, "*": torch.bfloat16}])
def test_dtypes_go_by_the_names_of_the_checkpoint(dtype, tmp_path):
    model = qwen3_moe()
    wanted = saved(model, tmp_path)
    experts = torch.float16 if isinstance(dtype, dict) else dtype
    wanted = {name: t.to(experts if ".experts." in name else torch.bfloat16) for name, t in wanted.items()}
    source = ModelSource(model, dtype=dtype)
    assert source.resident() is None
    assert_same(sent(source), wanted)


def test_an_offloaded_model_is_sent_as_it_is_saved(tmp_path):
    model = qwen3_moe()
    wanted = saved(model, tmp_path)
    offloader = Offloader(model, moves=lambda tensor: True)
    offloader.offload()
    source = ModelSource(model)
    assert_same(sent(source), wanted)
    assert_same(dict(zip([spec.name for spec in source.specs()], source.resident(), strict=True)), wanted)
    offloader.load()
    assert_same(sent(source), wanted)


def test_wrappers_do_not_matter(tmp_path):
    model = qwen3_moe()
    wanted = saved(model, tmp_path)
    assert_same(sent(ModelSource(torch.compile(model))), wanted)


def test_rename_gets_the_names_of_the_module(tmp_path):
    class Actor(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.actor = inner
            self.value = nn.Linear(2, 1)

    model = qwen3_moe()
    wanted = saved(model, tmp_path)

    def rename(name):
        return name.removeprefix("actor.") if name.startswith("actor.") else None

    assert_same(sent(ModelSource(Actor(model), rename=rename)), wanted)


def test_tensors_that_are_no_views_are_made_layer_by_layer():
    def revert(tensors):
        made, left = {}, dict(tensors)
        for name in tensors:
            if name.endswith(".q"):
                pair = left.pop(name), left.pop(name[:-1] + "k")
                made[name[:-1] + "qk"] = torch.cat(pair)
                lived.append(len(tensors))
        return {**made, **left}

    lived: list[int] = []
    shapes = {f"layers.{i}.{part}": (2, 3) for i in range(3) for part in ("q", "k", "norm")} | {"head": (4,)}
    held = {name: torch.rand(shape) for name, shape in shapes.items()}
    form = SavedForm(revert, shapes)
    lived.clear()
    made = dict(form.convert((name, held[name]) for group in form.groups for name in group.names))
    assert_same(made, revert(held))
    assert lived[:3] == [3, 3, 3]  # the tensors of one layer at a time
    assert form.resident(held) is None
    assert [(name, shape) for name, shape, _ in form.specs()] == [(name, tuple(t.shape)) for name, t in made.items()]


class Held(nn.Module):
    """An engine that takes a model's own names, as vLLM takes stacked experts, and no others."""

    def __init__(self, model):
        super().__init__()
        self.names = {name: name.replace(".", "_") for name, _ in model.named_parameters()}
        self.loads = 0
        for name, parameter in model.named_parameters():
            self.register_parameter(self.names[name], nn.Parameter(torch.zeros_like(parameter), requires_grad=False))

    def load_weights(self, weights):
        self.loads += 1
        for name, weight in weights:
            getattr(self, self.names[name]).data.copy_(weight)


def test_an_engine_that_takes_the_models_own_form_gets_it():
    model = qwen3_moe(3)
    engine = Rank(Held(model))
    source = ModelSource(model)
    for _ in range(2):
        outcome, _ = update([engine], source)
        assert not isinstance(outcome, Exception), outcome
        assert outcome["tensors"] == len(engine.model.names)
        loads = engine.model.loads
    for name, parameter in model.named_parameters():
        assert torch.equal(getattr(engine.model, engine.model.names[name]), parameter)
    update([engine], source)
    assert engine.model.loads == loads  # the form is known: no question, and no trace


def test_the_error_of_an_engine_that_takes_neither_form_names_the_checkpoint():
    model = qwen3_moe(3)
    engine = Rank(Held(dense()))
    source = ModelSource(model)
    for _ in range(2):
        outcome, _ = update([engine], source)
        assert isinstance(outcome, ManifestError)
        unknown = {m["name"] for m in outcome.details["mismatches"] if m["kind"] == "unknown"}
        assert "model.layers.0.mlp.experts.0.gate_proj.weight" in unknown
    assert not isinstance(update([Rank(Held(model))], source)[0], Exception)


def sharded_experts(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    wanted = {name: tensor.clone() for name, tensor in ModelSource(qwen3_moe(5), dtype=torch.bfloat16).tensors()}
    model = qwen3_moe(5)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert_same(sent(ModelSource(model, dtype=torch.bfloat16)), wanted)
    source, engines = ModelSource(model, dtype=torch.bfloat16), engine_of(rank, tp=1)
    for engine in engines:
        engine.ranks = [Rank(Held(qwen3_moe().bfloat16()))]
    push_from_all(engines, source, **OPTIONS)  # all processes change the form
    for engine in engines:
        stacked = engine.ranks[0].model.model_layers_1_mlp_experts_down_proj
        assert torch.equal(stacked[2], wanted["model.layers.1.mlp.experts.2.down_proj.weight"])
    return True


def test_a_sharded_model_is_sent_as_it_is_saved(pair):
    assert pair.run(sharded_experts) == [True, True]


class LoraLinear(nn.Module):
    """As PEFT wraps a linear layer."""

    adapter_layer_names = ("lora_A", "lora_B")
    other_param_names = ("r",)
    disable_adapters = False
    active_adapters = ("default",)

    def __init__(self, base):
        super().__init__()
        self.base_layer = base  # PEFT wraps a module once for each of its parameters that it adapts
        self.lora_A = nn.ModuleDict({"default": nn.Linear(2, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, 2, bias=False)})
        self.merged = False


class Saving(nn.Module):
    """As PEFT wraps a module that it trains as a whole."""

    adapter_layer_names = ("modules_to_save",)

    def __init__(self, base, active):
        super().__init__()
        self.original_module = base
        self.modules_to_save = nn.ModuleDict({"default": nn.Linear(2, 2), "other": nn.Linear(2, 2)})
        self.active_adapters = [active]


def peft_model(active="default"):
    base = nn.Module()
    base.model = nn.Module()
    base.model.q_proj = LoraLinear(LoraLinear(nn.Linear(2, 2)))
    base.model.head = Saving(nn.Linear(2, 2), active)
    model = nn.Module()
    model.base_model = nn.Module()
    model.base_model.model = base
    return model


@pytest.mark.parametrize(("active", "of"), [("default", "modules_to_save.default"), ("none", "original_module")])
def test_of_a_peft_model_the_base_is_sent(active, of, caplog):
    model = peft_model(active)
    found = sent(ModelSource(model))
    inner = model.base_model.model.model
    assert_same(
        found,
        {
            "model.q_proj.weight": inner.q_proj.base_layer.base_layer.weight,
            "model.q_proj.bias": inner.q_proj.base_layer.base_layer.bias,
            "model.head.weight": inner.head.get_submodule(of).weight,
            "model.head.bias": inner.head.get_submodule(of).bias,
        },
    )
    assert caplog.text.count("default, which are not merged") == 1


def test_merged_adapters_are_part_of_what_is_sent(caplog):
    caplog.set_level(logging.WARNING)
    model = peft_model()
    outer = model.base_model.model.model.q_proj
    outer.merged = outer.base_layer.merged = True
    sent(ModelSource(model))
    assert not caplog.records
