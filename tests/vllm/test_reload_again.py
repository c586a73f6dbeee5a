"""What a second reload by vLLM needs from the first one: its configuration, and what each parameter knows of ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from integration.models import FP8_BLOCKS, SHAPES, write_model
from rl_memory_plugins.trainer import QuantisedSource
from tests.vllm.conftest import OTHER_SEED, SEED
from tests.vllm.test_reload import FP8_KERNEL, PRELUDE, write_experts
from tests.weight_kinds import with_config

RANKS = 2

CONFIGURATION = (
    PRELUDE
    + """
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    original = UnquantizedFusedMoEMethod.process_weights_after_loading
    seen = []

    def step(self, layer):  # as the experts of FlashInfer and of DeepEP read it, for the kernel that they make anew
        seen.append(get_current_vllm_config())
        original(self, layer)

    UnquantizedFusedMoEMethod.process_weights_after_loading = step
    config, model = load(sys.argv[1])
    layers = reload.transformed_layers(post_load.of(model))
    weights = load_file(sys.argv[2] + "/model.safetensors")
    manifest = Manifest([spec_of(name, tensor) for name, tensor in weights.items()])

    def with_configuration(load_weights):
        def load(weights):
            with set_current_vllm_config(config):
                load_weights(weights)

        return load

    load_weights = with_configuration(model.load_weights)  # as `VllmWorker` does for the plan
    found = {"layers": len(layers), "of the first load": len(seen)}
    for kind, made in (
        (
            "vLLM's",
            reload.LayerwiseReload(
                post_load.of(model), layers, config, load_weights, contextlib.nullcontext, graphs=False
            ),
        ),
        (
            "ours",
            LayerReload(
                post_load.of(model),
                layers,
                load_weights,
                engine="vLLM",
                graphs=False,
                context=lambda: set_current_vllm_config(config),
            ),
        ),
    ):
        del seen[:]
        loader = ModelLoader(load_weights, lambda: dict(model.named_parameters()), reload=lambda: made)
        plan = loader.plan(manifest, loader.drop_outdated())
        for name in weights.keys() - plan.opaque.keys():
            plan.apply(name, weights[name])
        loader.load_with_engine(plan, [(name, weights[name]) for name in weights if name in plan.opaque])
        found[kind] = [type(made).__name__, len(seen), all(one is config for one in seen)]
    print(json.dumps(found))
"""
)


def test_experts_find_the_engine_s_configuration_at_each_update(
    forked_python: Callable[..., str], tmp_path: Path
) -> None:
    """vLLM#44613, vLLM#45989. Without it they raise, or make a kernel for another configuration."""
    first, other = write_experts(tmp_path / "first", SEED), write_experts(tmp_path / "other", OTHER_SEED)
    found = json.loads(forked_python(CONFIGURATION, str(first), str(other), str(tmp_path / "store")).splitlines()[-1])
    layers = found["layers"]
    assert found["of the first load"] == layers == 2
    assert found["vLLM's"] == ["LayerwiseReload", layers, True]
    assert found["ours"] == ["LayerReload", layers, True]


WHOLE = (
    PRELUDE
    + FP8_KERNEL
    + """
    rank, ranks = int(sys.argv[4]), int(sys.argv[5])
    of_engine, start, ensure = EngineArgs, init_distributed_environment, ensure_model_parallel_initialized
    EngineArgs = lambda **options: of_engine(**options, tensor_parallel_size=ranks)
    init_distributed_environment = lambda world, own, store, local, backend: start(ranks, rank, store, rank, backend)
    ensure_model_parallel_initialized = lambda *sizes: ensure(ranks, 1)

    _, fresh = load(sys.argv[2])
    config, model = load(sys.argv[1])
    first, other = checksums(tensors(model)), checksums(tensors(fresh))
    at = {name: address for name, (_, address) in tensors(model).items()}
    loader = loader_of(model, reload.reload_of(model, config, model.load_weights, contextlib.nullcontext))
    right = []
    for folder, wanted in ((sys.argv[2], other), (sys.argv[1], first), (sys.argv[2], other)):
        plan = update(config, loader, load_file(folder + "/model.safetensors"))
        right.append(checksums(tensors(model)) == wanted)
    unsplit = {name: list(one.shape) for name, one in model.named_parameters() if "fused_qkv_a_proj" in name}
    print(json.dumps({
        "by the engine": sum("_a_proj" in name for name in plan.opaque),
        "different before": first != other,
        "right": right,
        "same addresses": {name: address for name, (_, address) in tensors(model).items()} == at,
        "unsplit": unsplit,
        "of them": {name: other[name] for name in unsplit},
    }))
"""
)

LATENT, ROTARY, QUERIES = 128, 128, 256


def write_fp8_latent_attention(folder: Path, seed: int) -> Path:
    """DeepSeek's latent attention in FP8 with a scale for each block, without experts.

    The projections into the latent space are one layer that every rank has whole.
    """
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    write_model(folder, SHAPES["tiny"], seed=None)
    config = DeepseekV2Config(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_hidden_layers=2,
        first_k_dense_replace=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=8,
        n_group=1,
        topk_group=1,
        kv_lora_rank=LATENT,
        q_lora_rank=QUERIES,
        qk_rope_head_dim=ROTARY,
        qk_nope_head_dim=128,
        v_head_dim=128,
        max_position_embeddings=512,
    )
    torch.manual_seed(seed)
    DeepseekV2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    absorbed = [f"model.layers.{layer}.self_attn.kv_b_proj" for layer in range(2)]  # attention multiplies by it
    quantised = {**FP8_BLOCKS, "modules_to_not_convert": ["lm_head", *absorbed]}
    with_config(folder, quantised)
    file = folder / "model.safetensors"
    plain = load_file(file)
    scales = [f"{name}_scale_inv" for name in plain if "_proj" in name and "kv_b_proj" not in name]
    source = QuantisedSource(plain, quantised, [*plain, *scales])
    source.specs()
    save_file({name: one.contiguous() for name, one in source.tensors()}, file, {"format": "pt"})
    return folder


def test_what_every_rank_has_whole_stays_whole_over_updates(forked_python: Callable[..., str], tmp_path: Path) -> None:
    """vLLM#48025: what the first load had put in the place of these parameters took their ranks for those of a split
    layer at the next load."""
    folders = [write_fp8_latent_attention(tmp_path / str(seed), seed) for seed in (SEED, OTHER_SEED)]
    with ThreadPoolExecutor(RANKS) as pool:
        arguments = [*map(str, folders), str(tmp_path / "store")]
        runs = [  # with names of their own: not by vLLM's shared memory, which would need one name for all
            pool.submit(forked_python, WHOLE, *arguments, str(rank), str(RANKS), VLLM_DIST_IDENT=str(rank))
            for rank in range(RANKS)
        ]
        found = [json.loads(run.result().splitlines()[-1]) for run in runs]
    for rank in found:
        assert rank["different before"] and rank["same addresses"] and rank["by the engine"] > 0
        assert rank["right"] == [True] * 3
        assert [QUERIES + LATENT + ROTARY, 256] in rank["unsplit"].values()
    assert found[0]["of them"] == found[1]["of them"] and found[0]["of them"]
