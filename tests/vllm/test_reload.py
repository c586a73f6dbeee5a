"""Reloads of models that vLLM loads, but does not run here: latent attention with experts, packed weights, FP8."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from integration.models import FP8_CACHE, SHAPES, fp8_checkpoint_names, fp8_config, write_model
from rl_memory_plugins.trainer import QuantisedSource
from tests.vllm.conftest import OTHER_SEED, SEED
from tests.weight_kinds import Write, with_config, write_awq, write_gptq, write_int4


def write_latent_attention(folder: Path, seed: int) -> Path:
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    write_model(folder, SHAPES["tiny"], seed=None)
    config = DeepseekV2Config(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        first_k_dense_replace=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_shared_experts=1,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        kv_lora_rank=64,
        q_lora_rank=None,
        qk_rope_head_dim=32,
        qk_nope_head_dim=64,
        v_head_dim=64,
        max_position_embeddings=512,
    )
    torch.manual_seed(seed)
    DeepseekV2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


PRELUDE = """
    import contextlib, json, sys
    import torch
    from safetensors.torch import load_file
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model
    from vllm.model_executor.model_loader.reload import layerwise
    from rl_memory_plugins.engines import layer_templates, layer_tensors, post_load
    from rl_memory_plugins.engines.layer_reload import LayerReload
    from rl_memory_plugins.engines.vllm import first_load, reload, worker
    from rl_memory_plugins.errors import UnsupportedError
    from rl_memory_plugins.hooking import Hooks
    from rl_memory_plugins.weights.checksums import tensor_checksum
    from rl_memory_plugins.weights.manifest import Manifest
    from rl_memory_plugins.weights.model_loader import ModelLoader
    from rl_memory_plugins.weights.plan import trace
    from rl_memory_plugins.weights.source import spec_of

    torch.accelerator.empty_cache = lambda: None  # the platform's own plugin does that in an engine
    Hooks("vllm-cpu").install(first_load.install, worker.install)

    def load(folder):
        arguments = EngineArgs(model=folder, dtype="bfloat16", max_model_len=256, enforce_eager=True)
        config = arguments.create_engine_config()
        with set_current_vllm_config(config), first_load.enabled_load():
            if not torch.distributed.is_initialized():
                init_distributed_environment(1, 0, f"file://{sys.argv[3]}", 0, backend="gloo")
                ensure_model_parallel_initialized(1, 1)
            return config, get_model(vllm_config=config)

    def tensors(model):
        return {
            f"{layer}.{name}": (tensor_checksum(tensor), tensor.data_ptr())
            for layer, module in model.named_modules()
            for name, tensor in layer_tensors.tensors_of(module).items()
        }

    def checksums(found):
        return {name: checksum for name, (checksum, _) in found.items()}

    def loader_of(model, made):
        return ModelLoader(
            model.load_weights,
            lambda: dict(model.named_parameters()),
            buffers=lambda: dict(model.named_buffers()),
            reload=lambda: made,
        )

    def update(config, loader, weights, kept=frozenset()):
        with set_current_vllm_config(config):
            manifest = Manifest([spec_of(name, tensor) for name, tensor in weights.items()])
            plan = loader.plan(manifest, loader.drop_outdated(), kept)
            for name in weights.keys() - plan.opaque.keys():
                plan.apply(name, weights[name])
            loader.load_with_engine(plan, [(name, weights[name]) for name in weights if name in plan.opaque])
        return plan
"""

SCRIPT = (
    PRELUDE
    + """
    _, fresh = load(sys.argv[2])
    config, model = load(sys.argv[1])
    before = tensors(model)
    watch = post_load.of(model)
    layers = reload.transformed_layers(watch)
    arguments = (watch, layers, config, model.load_weights, contextlib.nullcontext)
    try:
        reload.LayerwiseReload(*arguments, graphs=True)
        refused = False
    except UnsupportedError as error:  # what is packed is a constant of compiled code
        refused = "enforce_eager" in str(error)
    wrap = layerwise._wrap_parameters_weight_loader
    del layerwise._wrap_parameters_weight_loader  # as in vLLM 0.23 and 0.24
    try:
        reload.LayerwiseReload(*arguments, graphs=False)
        old_is_refused = False
    except UnsupportedError as error:
        old_is_refused = "use 0.25" in str(error)
    layerwise._wrap_parameters_weight_loader = wrap
    loader = reload.LayerwiseReload(*arguments, graphs=False)
    checkpoint = load_file(sys.argv[2] + "/model.safetensors")
    with set_current_vllm_config(config), loader.checkpoint_layout() as layout:
        plan = trace(
            model.load_weights,
            Manifest([spec_of(name, tensor) for name, tensor in checkpoint.items()]),
            expected=layout,
            whole_layers=loader.why,
        )
    traced = tensors(model)
    loader.load(checkpoint.items(), plan)
    after = tensors(model)
    print(json.dumps({
        "compiled code is refused": refused,
        "a reload that loses steps is refused": old_is_refused,
        "layers": layers,
        "expected": len(layout),
        "absorbed": sorted(name for name in after if "W_U" in name),
        "tracing changes nothing": traced == before,
        "different before": checksums(before) != checksums(tensors(fresh)),
        "equal after": checksums(after) == checksums(tensors(fresh)),
        "same addresses": {n: at for n, (_, at) in after.items()} == {n: at for n, (_, at) in before.items()},
    }))
"""
)


TAKEN = (
    PRELUDE
    + """
    config, model = load(sys.argv[1])
    try:
        reload.reload_of(model, config, model.load_weights, contextlib.nullcontext)
        print(json.dumps({}))
    except UnsupportedError as error:
        print(json.dumps(error.details["layers"]))
"""
)


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="this CPU has no AMX")
def test_latent_attention_that_is_packed_for_amx_is_refused(forked_python: Callable[..., str], tmp_path: Path) -> None:
    """vLLM's own reload raises after it has written: the layer has no memory for the weights."""
    folder = write_latent_attention(tmp_path / "first", SEED)
    with_amx = "    import torch; torch.cpu._is_amx_tile_supported = lambda: True\n" + TAKEN
    found = json.loads(forked_python(with_amx, str(folder), "", str(tmp_path / "store")).splitlines()[-1])
    assert set(found) == {f"model.layers.{layer}.self_attn.kv_b_proj" for layer in range(2)}


def test_absorbed_matrices_and_packed_experts(forked_python: Callable[..., str], tmp_path: Path) -> None:
    first = write_latent_attention(tmp_path / "first", SEED)
    other = write_latent_attention(tmp_path / "other", OTHER_SEED)
    found = json.loads(forked_python(SCRIPT, str(first), str(other), str(tmp_path / "store")).splitlines()[-1])
    assert set(found.pop("layers").values()) == {"MLAAttention", "UnquantizedFusedMoEMethod"}
    assert len(found.pop("absorbed")) == 4  # two layers
    assert found.pop("expected") > 20
    assert found == dict.fromkeys(found, True)


PADDED = (
    PRELUDE
    + """
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    # As vLLM makes experts for a kernel of MXFP4: with rows and columns that no checkpoint has, all zero at first.
    original = UnquantizedFusedMoEMethod.create_weights

    def create_weights(self, layer, num_experts, hidden_size, intermediate_size_per_partition, *rest, **options):
        original(self, layer, num_experts, hidden_size, intermediate_size_per_partition + 32, *rest, **options)
        for parameter in layer.parameters(recurse=False):
            parameter.data.zero_()

    UnquantizedFusedMoEMethod.create_weights = create_weights
    layer_templates._SMALL = 1  # these experts count as large
    _, fresh = load(sys.argv[2])
    config, model = load(sys.argv[1])
    before = tensors(model)
    watch = post_load.of(model)
    layers = reload.transformed_layers(watch)
    checkpoint = load_file(sys.argv[2] + "/model.safetensors")
    specs = {name: spec_of(name, tensor) for name, tensor in checkpoint.items()}
    found = {"layers": layers, "different before": checksums(before) != checksums(tensors(fresh))}
    # New memory holds NaNs from here on.
    torch.use_deterministic_algorithms(True, warn_only=True)
    for kind, made in (
        ("vLLM's", reload.LayerwiseReload(watch, layers, config, model.load_weights, contextlib.nullcontext, False)),
        ("ours", LayerReload(watch, layers, model.load_weights, engine="vLLM", graphs=False)),
    ):
        for other in (sys.argv[1], sys.argv[2]):
            loader = ModelLoader(
                model.load_weights,
                lambda: dict(model.named_parameters()),
                reload=lambda: made,
                checkpoint=lambda: specs,
            )
            plan = update(config, loader, load_file(other + "/model.safetensors"))
        found[f"padded in {kind}"] = len(plan.padding)
        found[f"equal after {kind}"] = checksums(tensors(model)) == checksums(tensors(fresh))
    print(json.dumps(found))
"""
)


def write_experts(folder: Path, seed: int) -> Path:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    write_model(folder, SHAPES["tiny"], seed=None)
    config = Qwen3MoeConfig(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=512,
    )
    torch.manual_seed(seed)
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def test_the_padding_of_experts_is_that_of_a_first_load(forked_python: Callable[..., str], tmp_path: Path) -> None:
    first, other = write_experts(tmp_path / "first", SEED), write_experts(tmp_path / "other", OTHER_SEED)
    found = json.loads(forked_python(PADDED, str(first), str(other), str(tmp_path / "store")).splitlines()[-1])
    assert set(found.pop("layers").values()) == {"UnquantizedFusedMoEMethod"}
    assert (found.pop("padded in vLLM's"), found.pop("padded in ours")) == (4, 4)  # of two layers, w13 and w2
    assert found == dict.fromkeys(found, True)


SCALES = (
    PRELUDE
    + """

    _, fresh = load(sys.argv[2])
    config, model = load(sys.argv[1])
    before = tensors(model)
    made = reload.reload_of(model, config, model.load_weights, contextlib.nullcontext)
    loader = loader_of(model, made)

    def opaque_of(names, kept=frozenset()):
        weights = {name: one for name, one in load_file(sys.argv[2] + "/model.safetensors").items() if names(name)}
        return sorted(update(config, loader, weights, kept).opaque)

    def differ():
        now = checksums(tensors(model))
        return sorted(name for name, one in checksums(tensors(fresh)).items() if now[name] != one)

    def weights_alone(name):
        return not name.endswith("_scale")

    layers = reload.transformed_layers(post_load.of(model))
    print(json.dumps({
        "layers": layers,
        "ours": isinstance(made, LayerReload),
        "by the engine, of weights alone": opaque_of(weights_alone),
        "differ after weights alone": differ(),
        "by the engine, of all": opaque_of(lambda name: True),
        "differ after all": differ(),
        "by the engine, of all but attention": opaque_of(
            lambda name: ".self_attn." not in name,
            frozenset(name for name, _ in model.named_parameters() if ".self_attn." in name),
        ),
        "differ after all but attention": differ(),
        "by the engine, of weights alone again": opaque_of(weights_alone),
        "differ after weights alone again": differ(),
        "scales of the first load": all(
            tensors(model)[name] == one for name, one in before.items() if name.rpartition(".")[0] in layers
        ),
        "same addresses": {n: at for n, (_, at) in before.items()} == {n: at for n, (_, at) in tensors(model).items()},
    }))
"""
)


def write_scales(folder: Path, seed: int, *, scales: bool) -> Path:
    """A model whose keys and values are kept in 8 bits, and whose weights are not quantised."""
    write_model(folder, SHAPES["tiny"], seed=seed, dtype="bfloat16")
    with_config(folder, FP8_CACHE)
    if scales:
        file = folder / "model.safetensors"
        names = (
            f"{layer}.self_attn.{part}_proj.{part}_scale" for layer in range(SHAPES["tiny"].layers) for part in "kv"
        )
        made = {f"model.layers.{name}": torch.tensor([0.125 + 0.25 * number]) for number, name in enumerate(names)}
        save_file(load_file(file) | made, file, {"format": "pt"})
    return folder


def test_where_only_scales_of_the_kv_cache_are_transformed_all_else_is_replayed(
    forked_python: Callable[..., str], tmp_path: Path
) -> None:
    """As with FP8 in blocks on a GPU, whose layers keep what the checkpoint has. vLLM's own reload loads them all."""
    first = write_scales(tmp_path / "first", SEED, scales=False)
    other = write_scales(tmp_path / "other", OTHER_SEED, scales=True)
    found = json.loads(forked_python(SCALES, str(first), str(other), str(tmp_path / "store")).splitlines()[-1])
    layers = {f"model.layers.{layer}.self_attn.attn" for layer in range(SHAPES["tiny"].layers)}
    assert set(found["layers"]) == layers and found["ours"] and found["same addresses"]
    assert len(found["by the engine, of all"]) == 2 * len(layers) and found["differ after all"] == []
    # Kept attention keeps its scales.
    assert found["by the engine, of all but attention"] == found["differ after all but attention"] == []
    for times in ("", " again"):  # the second time the engine's own scales are there again
        assert found[f"by the engine, of weights alone{times}"] == []
        assert {name.rpartition(".")[0] for name in found[f"differ after weights alone{times}"]} == layers
    assert found["scales of the first load"]


PACKED = (
    PRELUDE
    + """
    from pathlib import Path
    from tests.weight_kinds import checkpoint

    config, model = load(sys.argv[1])
    _, fresh = load(sys.argv[2])
    first, other = tensors(model), tensors(fresh)
    found = {"by": [], "wrong": [], "moved": [], "differ": checksums(first) != checksums(other)}
    for template in post_load.of(model).templates.values():
        assert not template.is_deferred
        template.is_deferred = sys.argv[4] == "deferred"
    for folder, expected in ((sys.argv[2], other), (sys.argv[1], first)) * 2:
        made = reload.reload_of(model, config, model.load_weights, contextlib.nullcontext)
        update(config, loader_of(model, made), checkpoint(Path(folder)))
        now = tensors(model)
        found["by"].append(type(made).__name__)
        found["wrong"] += [name for name in expected if checksums(now).get(name) != expected[name][0]]
        found["moved"] += [name for name in first if now[name][1] != first[name][1]]
    print(json.dumps(found))
"""
)


@pytest.mark.parametrize(
    ("write", "when", "by"),
    [
        (write_int4, "at once", "LayerReload"),
        (write_gptq, "at once", "LayerReload"),
        (write_awq, "at once", "LayerReload"),
        (write_int4, "deferred", "LayerwiseReload"),  # as if vLLM had made the layers while weights arrived
    ],
)
def test_packed_weights_are_those_of_a_first_load(
    forked_python: Callable[..., str], tmp_path: Path, write: Write, when: str, by: str
) -> None:
    """Also where this CPU lacks vLLM's kernel, which only a forward pass needs."""
    folders = [write(tmp_path / name, seed, "bfloat16") for name, seed in (("first", SEED), ("other", OTHER_SEED))]
    found = json.loads(forked_python(PACKED, *map(str, folders), str(tmp_path / "store"), when).splitlines()[-1])
    assert found == {"by": [by] * 4, "wrong": [], "moved": [], "differ": True}


FAILING = (
    PRELUDE
    + """
    from rl_memory_plugins.engines import saved_layers
    from rl_memory_plugins.errors import WeightUpdateError

    config, model = load(sys.argv[1])
    made = reload.reload_of(model, config, model.load_weights, contextlib.nullcontext)
    before = post_load.cache_scales(model)
    weights = load_file(sys.argv[2] + "/model.safetensors")
    keep = saved_layers.SavedLayers.keep_addresses

    def fail(*_):
        seen.append(post_load.cache_scales(model) != before)
        raise WeightUpdateError("late")

    seen = []
    saved_layers.SavedLayers.keep_addresses = fail
    errors = []
    try:
        update(config, loader_of(model, made), weights)
    except WeightUpdateError as error:
        errors.append(str(error))
    saved_layers.SavedLayers.keep_addresses = keep
    print(json.dumps({
        "by": type(made).__name__,
        "errors": errors,
        "changed meanwhile": seen,
        "scales": len(before),
        "as before": post_load.cache_scales(model) == before,
    }))
"""
)


def test_an_update_that_fails_late_leaves_the_scales_of_the_kv_cache(
    forked_python: Callable[..., str], tmp_path: Path
) -> None:
    """vLLM's step writes them in place. As tensors they would not fit the numbers any more, nor the blocks."""
    first = write_scales(tmp_path / "first", SEED, scales=True)
    other = write_scales(tmp_path / "other", OTHER_SEED, scales=True)
    names = [name for name in load_file(other / "model.safetensors") if name.endswith("_scale")]
    changed = {name: one * 2 if name in names else one for name, one in load_file(other / "model.safetensors").items()}
    save_file(changed, other / "model.safetensors", {"format": "pt"})
    found = json.loads(forked_python(FAILING, str(first), str(other), str(tmp_path / "store")).splitlines()[-1])
    assert found.pop("scales") >= 2 * len(names)  # tensors and numbers
    assert found == {
        "by": "LayerReload",
        "errors": ["late"],
        "changed meanwhile": [True],
        "as before": True,
    }


#: vLLM's kernel for FP8 in blocks, as far as it touches the weights.
FP8_KERNEL = """
    from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
    from vllm.model_executor.layers.quantization import fp8

    class Kernel:  # what the kernels of GPUs do with the weights, and nothing that needs a GPU
        def __init__(self, **options):
            pass

        _get_layer_params = Fp8BlockScaledMMLinearKernel._get_layer_params
        process_weights_after_loading = Fp8BlockScaledMMLinearKernel.process_weights_after_loading

    fp8.init_fp8_linear_kernel = Kernel
    """

BLOCKS = (
    PRELUDE
    + FP8_KERNEL
    + """

    def keep_parameters(layer, name, new):  # as in vLLM 0.33: the parameter stays, and with it its class and loader
        old = getattr(layer, name)
        if (old.shape, old.stride(), old.dtype) == (new.shape, new.stride(), new.dtype):
            old.data.copy_(new)
        else:
            old.data = new

    if sys.argv[4] == "parameters stay":
        step = Fp8BlockScaledMMLinearKernel.process_weights_after_loading
        step.__globals__["replace_parameter"] = keep_parameters

    _, fresh = load(sys.argv[2])
    config, model = load(sys.argv[1])
    before = tensors(model)
    made = reload.reload_of(model, config, model.load_weights, contextlib.nullcontext)
    loader = loader_of(model, made)
    weights = load_file(sys.argv[2] + "/model.safetensors")
    plan = update(config, loader, weights)
    after = tensors(model)
    print(json.dumps({
        "ours": isinstance(made, LayerReload),
        "by the engine": len(plan.opaque),
        "of": len(weights),
        "different before": checksums(before) != checksums(tensors(fresh)),
        "equal after": checksums(after) == checksums(tensors(fresh)),
        "same addresses": {n: at for n, (_, at) in after.items()} == {n: at for n, (_, at) in before.items()},
    }))
"""
)


def write_blocks(folder: Path, seed: int) -> Path:
    """A model in FP8 with a scale for each block."""
    shape = SHAPES["tiny"]
    write_model(folder, shape, seed=seed, dtype="bfloat16")
    with_config(folder, fp8_config(shape))
    file = folder / "model.safetensors"
    source = QuantisedSource(load_file(file), fp8_config(shape), fp8_checkpoint_names(shape))
    source.specs()
    save_file({name: one.contiguous() for name, one in source.tensors()}, file, {"format": "pt"})
    return folder


@pytest.mark.parametrize("parameters", ["parameters stay", "parameters of this release"])
def test_fp8_in_blocks_is_replayed_only_where_the_parameters_have_their_loaders(
    forked_python: Callable[..., str], tmp_path: Path, parameters: str
) -> None:
    """Up to 0.32 vLLM puts plain parameters in the place of those that its loaders take."""
    first, other = write_blocks(tmp_path / "first", SEED), write_blocks(tmp_path / "other", OTHER_SEED)
    out = forked_python(BLOCKS, str(first), str(other), str(tmp_path / "store"), parameters)
    found = json.loads(out.splitlines()[-1])
    loaded, total = found.pop("by the engine"), found.pop("of")
    if parameters == "parameters stay":
        assert found["ours"] and loaded == 0
    assert loaded == (0 if found.pop("ours") else total) and total > 50
    assert found == dict.fromkeys(found, True)
