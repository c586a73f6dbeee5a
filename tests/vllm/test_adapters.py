"""Adapters that a trainer sends, beside the common suite: vLLM's names and shapes, and its engine in Python."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.model_executor.models.utils import WeightsMapper

from integration.models import new_model
from rl_memory_plugins.engines.vllm.adapters import _Layers
from rl_memory_plugins.errors import InvalidRequestError
from rl_memory_plugins.trainer import push_adapter
from rl_memory_plugins.weights.manifest import TensorSpec
from tests import lora
from tests.vllm.child import Child
from tests.vllm.conftest import PROMPT, SEED, engine_options, environment, greedy


def layers(**changes: Any) -> _Layers:
    """Of a model that has experts, an embedding with an adapter, and a classification head."""
    dense = SimpleNamespace(base_layer=SimpleNamespace(input_size=4, output_size=6))
    packed = SimpleNamespace(base_layer=SimpleNamespace(input_size=4, output_size=12, output_sizes=[5, 7]))
    attention = SimpleNamespace(
        base_layer=SimpleNamespace(
            input_size=4, output_size=16, output_sizes=[8, 4, 4], total_num_heads=4, total_num_kv_heads=1, head_size=2
        )
    )
    experts = SimpleNamespace(base_layer=object())
    block = "language_model.model.layers.0"
    manager = SimpleNamespace(
        modules={
            f"{block}.mlp.down_proj": dense,
            f"{block}.mlp.gate_up_proj": packed,
            f"{block}.self_attn.qkv_proj": attention,
            f"{block}.mlp.experts": experts,
            "language_model.model.embed_tokens": SimpleNamespace(base_layer=SimpleNamespace(org_vocab_size=9)),
        },
        packed_modules={
            f"{block}.mlp.gate_up_proj": [f"{block}.mlp.gate_proj", f"{block}.mlp.up_proj"],
            f"{block}.self_attn.qkv_proj": [f"{block}.self_attn.{part}_proj" for part in "qkv"],
            f"{block}.mlp.experts": [f"{block}.mlp.experts.0.{part}_proj" for part in ("gate", "down", "up")],
        },
        model=SimpleNamespace(
            hf_to_vllm_mapper=WeightsMapper(orig_to_new_prefix={"model.language_model.": "language_model.model."}),
            lora_skip_prefixes=["mtp."],
        ),
        is_pooling_model=False,
    )
    loras = SimpleNamespace(_adapter_manager=manager, lora_config=SimpleNamespace(max_lora_rank=4))
    return _Layers(loras, {"r": 2, "modules_to_save": ["score"], **changes})


def spec(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(f"base_model.model.{name}", "float32", shape)


BLOCK = "model.language_model.layers.0"


@pytest.mark.parametrize(
    "given",
    [
        spec(f"{BLOCK}.mlp.down_proj.lora_A.weight", 2, 4),
        spec(f"{BLOCK}.mlp.down_proj.lora_B.weight", 6, 2),
        spec(f"{BLOCK}.mlp.up_proj.lora_B.weight", 7, 2),
        spec(f"{BLOCK}.self_attn.q_proj.lora_B.weight", 8, 2),
        spec(f"{BLOCK}.self_attn.v_proj.lora_B.weight", 2, 2),  # the ranks hold copies of the one head
        spec(f"{BLOCK}.mlp.experts.0.down_proj.lora_A.weight", 2, 3),
        spec(f"{BLOCK}.mlp.experts.lora_A.weight", 16, 3),  # all experts in one matrix
        spec(f"{BLOCK}.mlp.experts.base_layer.lora_B.weight", 3, 16),
        spec("model.language_model.embed_tokens.lora_embedding_A", 2, 9),
        spec("model.embed_tokens.base_layer.weight", 9, 4),
        spec("mtp.layers.0.mlp.down_proj.lora_A.weight", 2, 4),
        spec("score.weight", 1, 4),
    ],
    ids=lambda given: given.name,
)
def test_the_names_and_shapes_that_vllm_takes(given: TensorSpec) -> None:
    assert layers().take(given)


@pytest.mark.parametrize(
    ("given", "changes", "problem"),
    [
        (spec(f"{BLOCK}.mlp.down_proj.lora_A.weight", 2, 5), {}, "4 features"),
        (spec(f"{BLOCK}.self_attn.k_proj.lora_B.weight", 4, 2), {}, "2 features"),
        (spec(f"{BLOCK}.mlp.down_proj.lora_A.weight", 3, 4), {}, "rank 3"),
        (spec(f"{BLOCK}.mlp.down_proj.lora_A.weight", 5, 4), {"rank_pattern": {"down": 5}}, "rank 5"),
        (spec(f"{BLOCK}.mlp.down_proj.lora_A.weight", 4), {}, "not that of a matrix"),
        (spec(f"{BLOCK}.mlp.down_proj.lora_magnitude_vector", 6), {}, "unsupported"),
    ],
)
def test_shapes_that_vllm_would_cut_are_refused(given: TensorSpec, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        layers(**changes).take(given)


def test_other_layers_are_not_taken() -> None:
    assert not layers().take(spec("model.language_model.layers.1.mlp.down_proj.lora_A.weight", 2, 4))
    assert not layers().take(spec(f"{BLOCK}.mlp.experts.9.down_proj.lora_A.weight", 2, 3))


def make(folder: Path) -> Any:
    from rl_memory_plugins.vllm import LLM

    return LLM(**engine_options(folder), enable_lora=True, max_lora_rank=8, max_loras=1)


def adapt(llm: Any, folder: Path) -> None:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    model = new_model(folder, SEED)

    def push(name: str, seed: int, **options: Any) -> list[int]:
        adapter = lora.tensors(model, seed)
        push_adapter(lambda body: llm.update_adapter_from_ipc(**body), name, adapter, lora.config(), **options)
        return greedy(lora.merged(new_model(folder, SEED), adapter))

    def ask(request: LoRARequest | None) -> list[int]:
        params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
        (output,) = llm.generate([{"prompt_token_ids": PROMPT}], params, lora_request=request, use_tqdm=False)
        return list(output.outputs[0].token_ids)

    first = push("policy", 1)
    request = llm.lora_request("policy")
    assert isinstance(request, LoRARequest) and ask(request) == first
    second = push("policy", 2, adapter_version="two")
    assert second != first
    assert ask(llm.lora_request("policy")) == second
    assert ask(request) == second, "a request of a former version means the present one"
    assert [adapter.version for adapter in llm.memory_status()[0].adapters] == ["two"]
    assert ask(None) == greedy(model)
    llm.remove_adapter("policy")
    for call in (lambda: ask(request), lambda: llm.lora_request("policy"), lambda: llm.remove_adapter("policy")):
        with pytest.raises(InvalidRequestError, match="policy"):
            call()
    assert ask(None) == greedy(model)


@pytest.mark.parametrize("processes", ["0", "1"])
def test_adapters_of_an_engine_in_python(model_folder: Path, processes: str) -> None:
    variables = environment(model_folder, VLLM_ENABLE_V1_MULTIPROCESSING=processes)
    with Child(make, model_folder, environment=variables) as child:
        child(adapt, model_folder)
