"""Adapters beside the common suite: SGLang's names and shapes, and its engine in Python."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.lora.layers import FusedMoEWithLoRA
from sglang.srt.lora.lora import LoRAAdapter
from sglang.srt.lora.lora_config import LoRAConfig
from sglang.srt.lora.mem_pool import LoRAMemoryPool

from integration.engines.base import Launch
from integration.engines.sglang import Sglang
from rl_memory_plugins.engines.sglang.adapters import SglangAdapters
from rl_memory_plugins.weights.manifest import Mismatch, TensorSpec

HIDDEN, INTERMEDIATE, EXPERTS, VOCABULARY, RANK = 4, 6, 2, 16, 2
HEAD = "base_model.model.model.layers.0"
OUTER = {"experts_shared_outer_loras": True}

Shapes = dict[str, tuple[int, ...]]


def bare(kind: type, **attributes: Any) -> Any:
    """A module of this class without its memory and kernels."""
    module = kind.__new__(kind)
    torch.nn.Module.__init__(module)
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


class Model(torch.nn.Module):
    """One block with an attention and experts, both under the name of a text model beside a vision tower."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(
            num_hidden_layers=1,
            hidden_size=HIDDEN,
            intermediate_size=INTERMEDIATE,
            moe_intermediate_size=INTERMEDIATE,
            num_experts=EXPERTS,
            num_attention_heads=2,
            num_key_value_heads=1,
            vocab_size=VOCABULARY,
        )
        self.weight = torch.nn.Parameter(torch.zeros(1))
        gated = SimpleNamespace(is_gated=True)
        experts = bare(FusedMoE, moe_runner_config=gated, is_shared_fused_moe=False, moe_tp_rank=0)
        self.experts = bare(FusedMoEWithLoRA, base_layer=experts, tp_size=1, _uses_interleaved_gate_up=False)


def loras(**options: Any) -> Any:
    """SGLang's manager of adapters, with its own memory pool for one adapter."""
    model = Model()
    output = SimpleNamespace(base_layer=SimpleNamespace(input_size=HIDDEN, output_size=HIDDEN))
    pool = object.__new__(LoRAMemoryPool)
    sizes = dict.fromkeys(("tp_size", "attn_tp_size", "moe_tp_size", "moe_ep_size", "max_loras_per_batch"), 1)
    vars(pool).update(
        base_hf_config=model.config,
        num_layer=1,
        max_lora_rank=4,
        dtype=torch.float32,
        target_modules={"gate_up_proj", "down_proj"},
        lora_added_tokens_size=0,
        moe_ep_rank=0,
        tp_rank=0,
        moe_use_local_expert_ids=False,
        strict_loading=False,
        enable_lora_overlap_loading=False,
        pin_memory_available=False,
        A_buffer={},
        B_buffer={},
        embedding_A_buffer={},
        embedding_B_buffer={},
        lm_head_A_buffer={},
        lm_head_B_buffer={},
        new_embeddings_buffer={},
        **{"experts_shared_outer_loras": False, **sizes, **options},
    )
    pool.init_buffers(model)
    return SimpleNamespace(
        base_model=model,
        base_hf_config=model.config,
        memory_pool=pool,
        lora_modules=[{"model.layers.0.mlp.experts": model.experts, "model.layers.0.self_attn.o_proj": output}],
        embed_tokens_module=None,
        lm_head_module=object(),
    )


def slots(manager: Any) -> SglangAdapters:
    return SglangAdapters(SimpleNamespace(lora_manager=manager))


def config() -> dict[str, Any]:
    return {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["gate_proj", "up_proj", "down_proj"]}


def fit(shapes: Shapes, **options: Any) -> tuple[list[Mismatch], list[str]]:
    specs = [TensorSpec(name, "float32", shape) for name, shape in shapes.items()]
    return slots(loras(**options)).fit(config(), specs)


def of_experts(projections: dict[str, tuple[int, int]], prefix: str = "mlp.experts") -> Shapes:
    """The shapes of an adapter of each expert; of each projection the features that come in and go out."""
    return {
        f"{HEAD}.{prefix}.{number}.{projection}.lora_{half}.weight": shape
        for number in range(EXPERTS)
        for projection, (incoming, outgoing) in projections.items()
        for half, shape in (("A", (RANK, incoming)), ("B", (outgoing, RANK)))
    }


def together(gate_a: int, down_b: int) -> Shapes:
    """Those of an adapter of all experts, with so many of gate's A and of down's B."""
    shapes: Shapes = {}
    for projection in ("w1", "w3"):
        shapes[f"{HEAD}.mlp.experts.{projection}.lora_A.weight"] = (gate_a, RANK, HIDDEN)
        shapes[f"{HEAD}.mlp.experts.{projection}.lora_B.weight"] = (EXPERTS, INTERMEDIATE, RANK)
    shapes[f"{HEAD}.mlp.experts.w2.lora_A.weight"] = (EXPERTS, RANK, INTERMEDIATE)
    shapes[f"{HEAD}.mlp.experts.w2.lora_B.weight"] = (down_b, HIDDEN, RANK)
    return shapes


IN, OUT = (HIDDEN, INTERMEDIATE), (INTERMEDIATE, HIDDEN)
FITTING: dict[str, tuple[Shapes, dict[str, Any]]] = {
    "each expert": (of_experts({"gate_proj": IN, "up_proj": IN, "down_proj": OUT}), {}),
    "other names": (of_experts({"w1": IN, "w3": IN, "w2": OUT}), {}),
    "gate alone": (of_experts({"gate_proj": IN}), {}),
    "up alone": (of_experts({"up_proj": IN}), {}),
    "packed": (of_experts({"gate_up_proj": (HIDDEN, 2 * INTERMEDIATE)}), {}),
    "all in one tensor": (together(EXPERTS, EXPERTS), {}),
    "with shared factors": (together(1, 1), OUTER),
}


@pytest.mark.parametrize(("shapes", "options"), FITTING.values(), ids=FITTING)
def test_an_adapter_of_experts_that_fits_comes_into_the_memory_pool(shapes: Shapes, options: dict[str, Any]) -> None:
    """SGLang alone ends the scheduler at the first request of an adapter with up projections and no gates."""
    assert fit(shapes, **options) == ([], [])
    manager = loras(**options)
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}

    def load(ref: Any, own: dict[str, torch.Tensor], described: dict[str, Any]) -> Any:
        adapter = LoRAAdapter("a", LoRAConfig.from_dict(described), manager.base_hf_config, None, None, None)
        adapter.initialize_weights_from_tensors(own)
        manager.memory_pool.load_lora_weight_to_buffer("a", 0, adapter, manager.lora_modules, None, None)
        return SimpleNamespace(success=True)

    manager.load_lora_adapter_from_tensors = load
    del manager.lora_modules[0]["model.layers.0.self_attn.o_proj"]
    slots(manager).add(1 << 30, "policy", config(), tensors)
    gate_up, down = (manager.memory_pool.B_buffer[f"{part}_proj_moe"][0][0] for part in ("gate_up", "down"))
    for number in range(EXPERTS):
        parts = [of_one(tensors, number, names) for names in (("gate_proj", "w1"), ("up_proj", "w3"))]
        packed = of_one(tensors, number, ("gate_up_proj",), 2 * INTERMEDIATE) + torch.cat(parts)
        assert torch.equal(gate_up[number, :, :RANK], packed)
        assert torch.equal(down[number % len(down), :, :RANK], of_one(tensors, number, ("down_proj", "w2"), HIDDEN))


def of_one(
    tensors: dict[str, torch.Tensor], number: int, projections: tuple[str, ...], size: int = INTERMEDIATE
) -> torch.Tensor:
    """B of a projection of one expert, under one of the names; zeros if the adapter has none."""
    for projection in projections:
        alone = tensors.get(f"{HEAD}.mlp.experts.{number}.{projection}.lora_B.weight")
        if alone is not None:
            return alone
        of_all = tensors.get(f"{HEAD}.mlp.experts.{projection}.lora_B.weight")
        if of_all is not None:
            return of_all[number % len(of_all)]
    return torch.zeros(size, RANK)


@pytest.mark.parametrize(
    ("name", "shape", "options", "kind"),
    [
        ("mlp.experts.0.gate_proj.lora_A.weight", (RANK, INTERMEDIATE), {}, "shape"),
        ("mlp.experts.0.down_proj.lora_B.weight", (INTERMEDIATE, RANK), {}, "shape"),
        ("mlp.experts.0.w3.lora_A.weight", (RANK + 1, HIDDEN), {}, "shape"),
        ("mlp.experts.w1.lora_A.weight", (RANK, HIDDEN), {}, "shape"),
        ("mlp.experts.w1.lora_A.weight", (1, RANK, HIDDEN), {}, "shape"),
        ("mlp.experts.w1.lora_A.weight", (EXPERTS, RANK, HIDDEN), OUTER, "shape"),
        ("mlp.experts.0.w1.lora_A.weight", (RANK, HIDDEN), OUTER, "unknown"),
        ("mlp.experts.lora_A.weight", (EXPERTS * RANK, INTERMEDIATE), {}, "unknown"),
        ("mlp.experts.base_layer.lora_A.weight", (EXPERTS * RANK, HIDDEN), {}, "unknown"),
        ("mlp.experts.0.router.lora_A.weight", (RANK, HIDDEN), {}, "unknown"),
    ],
)
def test_adapters_of_experts_at_which_sglang_would_end_are_refused(
    name: str, shape: tuple[int, ...], options: dict[str, Any], kind: str
) -> None:
    mismatches, _ = fit({f"{HEAD}.{name}": shape}, **options)
    assert kind in {mismatch.kind for mismatch in mismatches if mismatch.name == f"{HEAD}.{name}"}


@pytest.mark.parametrize(
    "name",
    [
        "base_model.model.vision_tower.vision_model.encoder.layers.0.self_attn.o_proj.lora_A.weight",
        "base_model.model.model.visual.blocks.0.attn.qkv.lora_A.weight",
        "base_model.model.mtp.layers.0.self_attn.o_proj.lora_A.weight",
        f"{HEAD}.mlp.experts.{EXPERTS}.gate_proj.lora_A.weight",
        f"{HEAD}.mlp.shared_experts.gate_proj.lora_A.weight",
        "base_model.model.model.embed_tokens.lora_embedding_A",
    ],
)
def test_layers_that_take_no_adapters_are_not_mistaken_for_others(name: str) -> None:
    """SGLang alone puts the adapter of a tower's block into the block of the language model with this number."""
    assert fit({name: (RANK, HIDDEN)}) == ([], [name])


@pytest.mark.parametrize("head", ["model", "model.language_model", "language_model.model", "model.text_model"])
def test_the_names_of_language_models(head: str) -> None:
    layer = f"base_model.model.{head}.layers.0.self_attn.o_proj"
    shapes: Shapes = {f"{layer}.lora_A.weight": (RANK, HIDDEN), f"{layer}.lora_B.weight": (HIDDEN, RANK)}
    assert fit(shapes) == ([], [])


def test_embeddings_have_the_shapes_of_the_memory_pool() -> None:
    for layer in ("lm_head", "unembed_tokens"):
        a, b = (f"base_model.model.{layer}.lora_{half}.weight" for half in "AB")
        assert fit({a: (RANK, HIDDEN), b: (VOCABULARY, RANK)}) == ([], [])
        (shape,), _ = fit({a: (RANK, VOCABULARY), b: (VOCABULARY, RANK)})
        assert (shape.kind, shape.name) == ("shape", a)
        (missing,), _ = fit({a: (RANK, HIDDEN)})
        assert (missing.kind, missing.name) == ("missing", a)


PYTHON = """
import torch
torch.multiprocessing.set_sharing_strategy("file_system")
from integration.models import new_model
from rl_memory_plugins.errors import InvalidRequestError
from rl_memory_plugins.sglang import Engine
from rl_memory_plugins.trainer import Adapter, RolloutHandoff, push_adapter
from tests import lora
from tests.vllm.conftest import greedy

engine = Engine(
    model_path=FOLDER, dtype="float32", device="cpu", attention_backend="torch_native",
    sampling_backend="pytorch", grammar_backend="none", disable_overlap_schedule=True,
    skip_tokenizer_init=True, max_total_tokens=4096, log_level="warning", rl_memory=True,
    enable_lora=True, lora_backend="torch_native", max_lora_rank=8, lora_target_modules=list(lora.TARGETS),
)
model = new_model(FOLDER, 1)

def ask(name):
    sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    return engine.generate(input_ids=[5, 6, 7, 8], sampling_params=sampling, lora_path=name)["output_ids"]

def push(name, adapter, config):
    push_adapter(lambda body: engine.update_adapter_from_ipc(**body), name, adapter, config, timeout_s=20)

def expected(adapter):
    return greedy(lora.merged(new_model(FOLDER, 1), adapter), [5, 6, 7, 8])

first, second = lora.tensors(model, 1), lora.tensors(model, 2)
push("policy", first, lora.config())
assert ask("policy") == expected(first)
with RolloutHandoff(engine, second, adapter=Adapter("policy", lora.config())).training("two"):
    assert engine.is_sleeping()
assert ask("policy") == expected(second) != expected(first)
assert [adapter.version for adapter in engine.memory_status()[0].adapters] == ["two"]
engine.remove_adapter("policy")
for refused in (
    lambda: engine.remove_adapter("policy"),
    lambda: push("policy", first, {**lora.config(), "use_rslora": True}),
    lambda: push("policy", first, lora.config(targets=("lm_head",))),
):
    try:
        refused()
    except InvalidRequestError as error:
        print(error.message)
    else:
        raise AssertionError("it was not refused")
assert ask(None) == greedy(model, [5, 6, 7, 8])
engine.shutdown()
print("done")
"""


@pytest.mark.long
def test_adapters_of_an_engine_in_python(forked_python: Callable[..., str]) -> None:
    path = Sglang().environment(Launch(Path(), adapter_rank=8, forked=True))["PYTHONPATH"]
    *_, twice, rslora, layer, done = forked_python(PYTHON, PYTHONPATH=path).splitlines()
    assert "no adapter" in twice and "use_rslora" in rslora and "lm_head" in layer
    assert done == "done"
