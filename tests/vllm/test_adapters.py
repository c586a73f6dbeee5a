"""Adapters that a trainer sends, beside the common suite: vLLM's names and shapes, and its engine in Python."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.lora.layers import FusedMoE3DWithLoRA, FusedMoEWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import LoRAModelManager
from vllm.lora.peft_helper import PEFTHelper
from vllm.model_executor.models.utils import WeightsMapper

from integration.models import new_model
from rl_memory_plugins.engines.vllm import adapters, served_adapters
from rl_memory_plugins.engines.vllm.adapter_layers import AdapterLayers
from rl_memory_plugins.engines.vllm.adapters import number_in, path_of
from rl_memory_plugins.errors import InvalidRequestError
from rl_memory_plugins.trainer import push_adapter
from rl_memory_plugins.weights.manifest import Mismatch, TensorSpec
from tests import lora
from tests.vllm.child import Child
from tests.vllm.conftest import PROMPT, SEED, engine_options, environment, greedy

HIDDEN, INTERMEDIATE, EXPERTS, RANK = 4, 6, 2, 2


def experts_of(kind: type, count: int = EXPERTS) -> Any:
    """vLLM's layer of experts with LoRA, with its buffers; its kernels need a GPU, so the experts themselves are none.

    Args:
        kind: `FusedMoEWithLoRA` takes adapters of single experts, `FusedMoE3DWithLoRA` one of all experts.
        count: The number of experts.
    """
    layer = kind.__new__(kind)
    torch.nn.Module.__init__(layer)
    layer.base_layer = torch.nn.Identity()
    layer.moe_config = SimpleNamespace(
        hidden_dim=HIDDEN,
        intermediate_size_per_partition=INTERMEDIATE,
        num_local_experts=count,
        num_experts=count,
        moe_parallel_config=SimpleNamespace(use_ep=False, ep_rank=0),
    )
    layer._w13_slices = 1 if kind is FusedMoE3DWithLoRA else 2
    layer.tp_size, layer.tp_rank, layer.device, layer.enable_moe_shared_loras = 1, 0, "cpu", False
    config = SimpleNamespace(
        max_lora_rank=4, fully_sharded_loras=False, enable_moe_shared_loras=False, max_loras=1, lora_dtype=torch.float32
    )
    layer.create_lora_weights(1, config, SimpleNamespace(architectures=["Any"]))
    return layer


def layers(kind: type = FusedMoEWithLoRA, **changes: Any) -> AdapterLayers:
    """Of a model that has experts, an embedding with an adapter, and a classification head."""
    return AdapterLayers(loras(kind), {"r": RANK, "modules_to_save": ["score"], **changes})


def loras(kind: type) -> Any:
    dense = SimpleNamespace(base_layer=SimpleNamespace(input_size=4, output_size=6))
    packed = SimpleNamespace(base_layer=SimpleNamespace(input_size=4, output_size=12, output_sizes=[5, 7]))
    attention = SimpleNamespace(
        base_layer=SimpleNamespace(
            input_size=4, output_size=16, output_sizes=[8, 4, 4], total_num_heads=4, total_num_kv_heads=1, head_size=2
        )
    )
    block = "language_model.model.layers.0"
    parts = [f"{block}.mlp.experts.{n}.{part}_proj" for n in range(EXPERTS) for part in ("gate", "down", "up")]
    manager = SimpleNamespace(
        modules={
            f"{block}.mlp.down_proj": dense,
            f"{block}.mlp.gate_up_proj": packed,
            f"{block}.self_attn.qkv_proj": attention,
            f"{block}.mlp.experts": experts_of(kind),
            "language_model.model.embed_tokens": SimpleNamespace(base_layer=SimpleNamespace(org_vocab_size=9)),
        },
        packed_modules={
            f"{block}.mlp.gate_up_proj": [f"{block}.mlp.gate_proj", f"{block}.mlp.up_proj"],
            f"{block}.self_attn.qkv_proj": [f"{block}.self_attn.{part}_proj" for part in "qkv"],
            **({f"{block}.mlp.experts": parts} if kind is FusedMoEWithLoRA else {}),
        },
        model=SimpleNamespace(
            hf_to_vllm_mapper=WeightsMapper(orig_to_new_prefix={"model.language_model.": "language_model.model."}),
            lora_skip_prefixes=["mtp."],
        ),
        is_pooling_model=False,
    )
    return SimpleNamespace(_adapter_manager=manager, lora_config=SimpleNamespace(max_lora_rank=4))


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
        spec(f"{BLOCK}.mlp.experts.1.down_proj.lora_A.weight", 2, 6),
        spec(f"{BLOCK}.mlp.experts.1.up_proj.lora_B.weight", 6, 2),
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
        (spec(f"{BLOCK}.mlp.experts.1.down_proj.lora_A.weight", 2, 4), {}, "6 features"),
        (spec(f"{BLOCK}.mlp.experts.0.gate_proj.lora_B.weight", 7, 2), {}, "6 features"),
        (spec(f"{BLOCK}.mlp.experts.0.gate_proj.lora_B.weight", 6, 3), {}, "rank 3"),
        (spec(f"{BLOCK}.mlp.experts.lora_A.weight", 4, 6), {}, r"one by one, as .*experts\.0\.gate_proj"),
    ],
)
def test_shapes_that_vllm_would_cut_are_refused(given: TensorSpec, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        layers(**changes).take(given)


def test_other_layers_are_not_taken() -> None:
    assert not layers().take(spec("model.language_model.layers.1.mlp.down_proj.lora_A.weight", 2, 4))
    assert not layers().take(spec(f"{BLOCK}.mlp.experts.9.down_proj.lora_A.weight", 2, 6))
    assert not layers().take(spec("model.visual.blocks.0.attn.qkv.lora_A.weight", 2, 4))


STACKED = f"{BLOCK}.mlp.experts"
#: The shapes of an adapter of all experts in one, as PEFT saves it: the `base_layer` stands for gate and up.
IN_ONE = {
    f"{STACKED}.base_layer.lora_A.weight": (EXPERTS * RANK, HIDDEN),
    f"{STACKED}.base_layer.lora_B.weight": (2 * INTERMEDIATE, EXPERTS * RANK),
    f"{STACKED}.lora_A.weight": (EXPERTS * RANK, INTERMEDIATE),
    f"{STACKED}.lora_B.weight": (HIDDEN, EXPERTS * RANK),
}
#: Those of an adapter of each expert.
ONE_BY_ONE = {
    f"{STACKED}.{number}.{part}_proj.lora_{half}.weight": shape
    for number in range(EXPERTS)
    for part, incoming, outgoing in (
        ("gate", HIDDEN, INTERMEDIATE),
        ("up", HIDDEN, INTERMEDIATE),
        ("down", INTERMEDIATE, HIDDEN),
    )
    for half, shape in (("A", (RANK, incoming)), ("B", (outgoing, RANK)))
}
FORMS = pytest.mark.parametrize(
    ("kind", "shapes"), [(FusedMoEWithLoRA, ONE_BY_ONE), (FusedMoE3DWithLoRA, IN_ONE)], ids=["one by one", "in one"]
)


def fit(kind: type, shapes: dict[str, tuple[int, ...]]) -> list[Mismatch]:
    found = layers(kind)
    assert all([found.take(spec(name, *shape)) for name, shape in shapes.items()])
    return found.incomplete()


@FORMS
def test_an_adapter_of_experts_that_fits_comes_into_the_engine(kind: type, shapes: dict[str, tuple[int, ...]]) -> None:
    assert fit(kind, shapes) == []
    tensors = {f"base_model.model.{name}": torch.randn(shape) for name, shape in shapes.items()}
    config = PEFTHelper(r=RANK, lora_alpha=RANK, target_modules=["experts"])
    holder = loras(kind)._adapter_manager
    adapter = LoRAModel.from_lora_tensors(
        1, tensors, config, device="cpu", dtype=torch.float32, weights_mapper=holder.model.hf_to_vllm_mapper
    )
    manager = object.__new__(LoRAModelManager)
    switches = ("_enable_moe_shared_loras", "_enable_mixed_moe_lora_format", "_is_non_gated_moe", "_use_ep")
    vars(manager).update(vars(holder), **dict.fromkeys(switches, False), _is_3d_moe_model=kind is FusedMoE3DWithLoRA)
    manager.supports_mm = False
    name = "language_model.model.layers.0.mlp.experts"
    layer = manager.modules[name]
    manager.modules = {name: layer}
    manager._create_merged_loras_inplace(adapter)
    packed = adapter.loras[name]
    layer.set_lora(0, packed.lora_a, packed.lora_b)
    ours = tensors[f"base_model.model.{STACKED}.{'1.down_proj.' if kind is FusedMoEWithLoRA else ''}lora_A.weight"]
    assert torch.equal(layer.w2_lora_a_stacked[0][0, 1, :RANK], ours[-RANK:])


@FORMS
def test_an_adapter_of_some_experts_is_refused(kind: type, shapes: dict[str, tuple[int, ...]]) -> None:
    """vLLM itself fails on it, when the tensors have come."""
    *_, last = shapes
    layer = last.rpartition(".lora_")[0]
    (mismatch,) = fit(kind, {name: shape for name, shape in shapes.items() if not name.startswith(f"{layer}.lora_")})
    assert mismatch.kind == "missing" and "all experts" in str(mismatch)


@pytest.mark.parametrize(
    ("name", "shape", "problem"),
    [
        (f"{STACKED}.lora_A.weight", (EXPERTS * RANK, HIDDEN), "6 features"),
        (f"{STACKED}.base_layer.lora_B.weight", (INTERMEDIATE, EXPERTS * RANK), "12 features"),
        (f"{STACKED}.lora_B.weight", (HIDDEN, RANK), "rank 2 for 2 experts"),
    ],
)
def test_all_experts_in_one_matrix_of_a_wrong_shape(name: str, shape: tuple[int, ...], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        layers(FusedMoE3DWithLoRA).take(spec(name, *shape))


def test_sizes_that_a_kernel_pads_are_not_compared() -> None:
    found = layers()
    found._modules["language_model.model.layers.0.mlp.experts"].moe_config.intermediate_pad = 2
    assert found.take(spec(f"{BLOCK}.mlp.experts.1.down_proj.lora_A.weight", 2, 4))


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


@pytest.mark.long
@pytest.mark.parametrize("processes", ["0", "1"])
def test_adapters_of_an_engine_in_python(model_folder: Path, processes: str) -> None:
    variables = environment(model_folder, VLLM_ENABLE_V1_MULTIPROCESSING=processes)
    with Child(make, model_folder, environment=variables) as child:
        child(adapt, model_folder)


def test_what_a_tower_computes_of_an_image_is_keyed_by_version() -> None:
    """With `--enable-tower-connector-lora` it depends on the adapter. vLLM keys it by the adapter's name."""
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.input_processor import InputProcessor

    keyed = adapters._with_version(InputProcessor._get_mm_identifier)
    own, sent = LoRARequest("a", 1, "/somewhere"), [LoRARequest("a", number, path_of(number)) for number in (5, 6)]
    with_tower, without = (
        SimpleNamespace(lora_config=SimpleNamespace(enable_tower_connector_lora=enabled)) for enabled in (True, False)
    )
    found = [keyed(with_tower, "image", request) for request in (None, own, *sent)]
    assert len(set(found)) == 4 and found[:2] == ["image", "a:image"]
    assert {keyed(without, "image", request) for request in (None, own, *sent)} == {"image"}


def test_a_complete_request_of_a_former_version_finds_no_image_of_it() -> None:
    from vllm.lora.request import LoRARequest

    status = SimpleNamespace(adapters=[SimpleNamespace(name="a", number=6, version="v6")])
    images = [SimpleNamespace(identifier=identifier) for identifier in ("a:image@5", "image", "a:image@15")]
    request = SimpleNamespace(lora_request=LoRARequest("a", 5, path_of(5)), mm_features=images)
    served_adapters.with_present_versions([status], (request,), {})
    assert number_in(request.lora_request) == 6
    assert [image.identifier for image in images] == ["a:image@6", "image", "a:image@15"]
