"""The tensors of models, against `transformers` and against files."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from plan_models import KINDS, SMALL, configured, write_safetensors, written

from integration.models import FP8_BLOCKS, SHAPES, checkpoint_shapes, config, fp8_checkpoint_names
from rl_memory_plugins.errors import InvalidRequestError, UnsupportedError
from rl_memory_plugins.plan import meta_model
from rl_memory_plugins.plan.architectures import KNOWN
from rl_memory_plugins.plan.model import read_model
from rl_memory_plugins.plan.quantisation import METHODS
from rl_memory_plugins.plan.tensors import Tensor


@pytest.mark.parametrize("kind", KNOWN)
def test_a_rule_counts_what_transformers_makes(kind, tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    made = transformers.CONFIG_MAPPING[kind](**{**SMALL, **KINDS[kind]})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(made)
    found = read_model(written(tmp_path, json.loads(made.to_json_string(use_diff=False))))
    assert found.counted_by == "configuration"
    assert found.parameters == sum(parameter.numel() for parameter in model.parameters())


def test_every_known_kind_is_tested():
    assert sorted(KNOWN) == sorted(KINDS)


@pytest.mark.parametrize("name", SHAPES)
def test_a_rule_counts_the_shapes_of_the_benchmarks(name, tmp_path):
    found = read_model(written(tmp_path, config(SHAPES[name], "bfloat16")))
    assert found.weight_bytes(1, 2) == 2 * sum(math.prod(one) for one in checkpoint_shapes(SHAPES[name]).values())


def test_a_configuration_file_is_enough_and_names_the_model(tmp_path):
    file = written(tmp_path, configured("llama")) / "config.json"
    assert read_model(file).parameters == read_model(tmp_path).parameters


def test_ranks_share_matrices_and_keep_norms_routers_and_one_head_of_keys(tmp_path):
    found = read_model(written(tmp_path, configured("qwen3_moe")))
    whole = [tensor for tensor in found.trained if tensor.parts(4, found.sizes.kv_heads) == 1]
    assert {tensor.name.split(".")[-2] for tensor in whole} == {"q_norm", "gate", "input_layernorm", "norm"}
    keys = [tensor for tensor in found.trained if tensor.parts(4, 2) == 2]
    assert {tensor.name.split(".")[-2] for tensor in keys} == {"k_proj", "v_proj"}
    once = sum(tensor.elements for tensor in whole)
    assert found.weight_bytes(2, 2) == 2 * once + (found.weight_bytes(1, 2) - 2 * once) // 2


def test_latent_attention_stores_one_small_vector_for_each_token_on_all_ranks(tmp_path):
    found = read_model(written(tmp_path, configured("deepseek_v3")))
    assert found.kv_bytes_per_token(1, 2) == found.kv_bytes_per_token(4, 2) == 3 * (16 + 8) * 2


def test_keys_and_values_are_shared_until_each_rank_has_one_head(tmp_path):
    found = read_model(written(tmp_path, configured("llama")))
    assert [found.kv_bytes_per_token(ranks, 2) for ranks in (1, 2, 4)] == [2 * 3 * n * 32 * 2 for n in (2, 1, 1)]


def test_layers_of_linear_attention_have_no_keys(tmp_path):
    kinds = ["linear_attention", "linear_attention", "full_attention"]
    found = read_model(written(tmp_path, configured("qwen3", layer_types=kinds)))
    assert found.kv_bytes_per_token(1, 2) == 2 * 1 * 2 * 32 * 2


#: Sizes of published models, and their parameters in billions as their authors give them.
PUBLISHED = {
    "Llama-3.1-8B": (
        8.03,
        {
            "model_type": "llama",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
        },
    ),
    "Qwen2.5-0.5B": (
        0.494,
        {
            "model_type": "qwen2",
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
        },
    ),
    "Qwen3-8B": (
        8.19,
        {
            "model_type": "qwen3",
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 151936,
            "head_dim": 128,
        },
    ),
    "Mixtral-8x7B": (
        46.7,
        {
            "model_type": "mixtral",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 32000,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
    "gemma-2-9b": (
        9.24,
        {
            "model_type": "gemma2",
            "hidden_size": 3584,
            "intermediate_size": 14336,
            "num_hidden_layers": 42,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "vocab_size": 256000,
            "head_dim": 256,
        },
    ),
    "DeepSeek-V3": (
        671.0,
        {
            "model_type": "deepseek_v3",
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "vocab_size": 129280,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 3,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
        },
    ),
    "gpt-oss-120b": (
        116.8,
        {
            "model_type": "gpt_oss",
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 36,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "vocab_size": 201088,
            "head_dim": 64,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "attention_bias": True,
        },
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_has_as_many_parameters_as_its_authors_say(name, tmp_path):
    billions, config = PUBLISHED[name]
    assert read_model(written(tmp_path, config)).parameters / 1e9 == pytest.approx(billions, rel=0.002)


# -- safetensors ------------------------------------------------------------------------------------


def test_headers_of_files_win_over_the_rule(tmp_path):
    folder = written(tmp_path, configured("llama"))
    write_safetensors(folder / "model-1.safetensors", {"model.embed_tokens.weight": ("BF16", (320, 64))})
    write_safetensors(folder / "model-2.safetensors", {"model.norm.weight": ("F32", (64,))})
    write_safetensors(folder / "consolidated.safetensors", {"tok_embeddings.weight": ("BF16", (320, 64))})
    found = read_model(folder)
    assert found.counted_by == "safetensors"
    assert found.weight_bytes(1, 2) == 2 * (320 * 64 + 64)  # float32 becomes the engine's dtype
    assert found.parameters > 320 * 64 + 64  # the trainer's are those of the rule


def test_layers_of_a_draft_do_not_count(tmp_path):
    folder = written(tmp_path, configured("llama"))
    names = {f"model.layers.{layer}.mlp.up_proj.weight": ("BF16", (96, 64)) for layer in range(4)}
    write_safetensors(folder / "model.safetensors", names)
    assert read_model(folder).weight_bytes(1, 2) == 3 * 96 * 64 * 2


def test_an_unknown_kind_with_files_needs_no_transformers(tmp_path, monkeypatch):
    monkeypatch.setattr(meta_model.importlib, "import_module", missing)
    folder = written(tmp_path, {**configured("llama"), "model_type": "nobody"})
    write_safetensors(folder / "model.safetensors", {"model.embed_tokens.weight": ("BF16", (320, 64))})
    assert read_model(folder).parameters == 320 * 64


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x01",
        (1 << 40).to_bytes(8, "little"),
        (2).to_bytes(8, "little") + b"[]",
        b"\x0e" + bytes(7) + b'{"a":{"b":1}} ',
    ],
)
def test_a_broken_file_is_a_typed_error(content, tmp_path):
    folder = written(tmp_path, configured("llama"))
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(InvalidRequestError, match=r"model\.safetensors is no safetensors file"):
        read_model(folder)


# -- quantised --------------------------------------------------------------------------------------


def test_the_rule_for_fp8_is_what_the_files_say(tmp_path):
    shape = SHAPES["small"]
    quantised = {**config(shape, "bfloat16"), "quantization_config": FP8_BLOCKS}
    by_rule = read_model(written(tmp_path / "rule", quantised))
    folder = written(tmp_path / "files", quantised)
    shapes = checkpoint_shapes(shape)
    tensors = {}
    for name in fp8_checkpoint_names(shape):
        if name.endswith("_scale_inv"):
            rows, columns = shapes[name.removesuffix("_scale_inv")]
            tensors[name] = ("F32", (math.ceil(rows / 128), math.ceil(columns / 128)))
        else:
            tensors[name] = ("F8_E4M3" if name.endswith("_proj.weight") else "BF16", shapes[name])
    write_safetensors(folder / "model.safetensors", tensors)
    by_files = read_model(folder)
    assert (by_rule.counted_by, by_files.counted_by) == ("configuration", "safetensors")
    assert by_rule.weight_bytes(1, 2) == by_files.weight_bytes(1, 2)
    assert by_rule.parameters == by_files.parameters


@pytest.mark.parametrize(
    ("given", "share"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 32}, (4 + 20 / 32) / 16),
        ({"quant_method": "awq", "bits": 4, "group_size": 32}, (4 + 20 / 32) / 16),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, (4 + 8 / 64) / 16),
        ({"quant_method": "fp8"}, (8 + 32 / 64) / 16),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32}}},
            },
            (4 + 16 / 32) / 16,
        ),
    ],
    ids=lambda given: str(given["quant_method"]) if isinstance(given, dict) else "",
)
def test_the_bits_of_a_method(given, share, tmp_path):
    """A square matrix, so that all its rows and columns are whole groups."""
    found = read_model(written(tmp_path, configured("llama", quantization_config=given)))
    [queries] = [tensor for tensor in found.stored if tensor.name.endswith("q_proj.weight")]
    plain = Tensor(queries.name, queries.shape, queries.copies)
    assert queries.nbytes(2) == pytest.approx(share * plain.nbytes(2), rel=0.001)
    [embeddings] = [tensor for tensor in found.stored if tensor.is_embedding]
    assert embeddings.bits == 0
    assert not [tensor for tensor in found.stored if "lm_head" in tensor.name and tensor.bits]


def test_modules_that_are_left_out_stay_as_they_are(tmp_path):
    given = {**FP8_BLOCKS, "modules_to_not_convert": ["down_proj"]}
    found = read_model(written(tmp_path, configured("llama", quantization_config=given)))
    assert {tensor.bits for tensor in found.stored if "down_proj" in tensor.name} == {0}
    assert {tensor.bits for tensor in found.stored if "up_proj" in tensor.name} == {8}


def test_mxfp4_has_its_experts_in_four_bits(tmp_path):
    found = read_model(written(tmp_path, configured("gpt_oss", quantization_config={"quant_method": "mxfp4"})))
    assert {"experts" in tensor.name for tensor in found.stored if tensor.bits} == {True}
    assert {tensor.bits for tensor in found.stored if tensor.bits} == {4}


def test_an_unknown_method_lists_the_known_ones(tmp_path):
    with pytest.raises(UnsupportedError, match="'hqq'") as caught:
        read_model(written(tmp_path, configured("llama", quantization_config={"quant_method": "hqq"})))
    assert caught.value.details["allowed"] == list(METHODS)


def test_files_of_an_unknown_method_are_counted(tmp_path):
    folder = written(tmp_path, configured("llama", quantization_config={"quant_method": "hqq"}))
    write_safetensors(folder / "model.safetensors", {"model.layers.0.mlp.up_proj.qweight": ("I32", (96, 8))})
    assert read_model(folder).weight_bytes(1, 2) == 4 * 96 * 8


@pytest.mark.parametrize(
    "given",
    [
        {"quant_method": "fp8", "weight_block_size": "no"},
        {"quant_method": "fp8", "weight_block_size": [0]},
        {"quant_method": "gptq", "bits": "four"},
        {"quant_method": "awq", "bits": -4},
        {"quant_method": "compressed-tensors", "config_groups": [1]},
        {"quant_method": "fp8", "modules_to_not_convert": 3},
    ],
    ids=str,
)
def test_a_broken_quantisation_is_a_typed_error(given, tmp_path):
    with pytest.raises(InvalidRequestError, match="quantization_config"):
        read_model(written(tmp_path, configured("llama", quantization_config=given)))


# -- bad input --------------------------------------------------------------------------------------


def missing(name):
    raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_an_unknown_kind_without_transformers_lists_the_known_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(meta_model.importlib, "import_module", missing)
    with pytest.raises(UnsupportedError, match="'nobody', and torch is not installed") as caught:
        read_model(written(tmp_path, {**configured("llama"), "model_type": "nobody"}))
    assert caught.value.details["allowed"] == list(KNOWN)


def test_a_kind_without_a_rule_is_counted_by_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    made = transformers.CONFIG_MAPPING["olmo2"](**SMALL)
    found = read_model(written(tmp_path, json.loads(made.to_json_string(use_diff=False))))
    assert found.counted_by == "transformers"
    assert found.parameters > 2 * 320 * 64


def test_a_kind_that_transformers_does_not_know_is_a_typed_error(tmp_path):
    pytest.importorskip("transformers")
    with pytest.raises(UnsupportedError, match="transformers does not make one"):
        read_model(written(tmp_path, {**configured("llama"), "model_type": "nobody"}))


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"model_type": "llama"}', '"llama"', "\udcff"])
def test_a_broken_configuration_is_a_typed_error(content, tmp_path):
    (tmp_path / "config.json").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(InvalidRequestError) as caught:
        read_model(tmp_path)
    assert caught.value.details["field"] == "model"


@pytest.mark.parametrize(
    "change", [{"hidden_size": 0}, {"num_hidden_layers": -1}, {"vocab_size": "many"}, {"hidden_size": None}]
)
def test_a_size_that_is_none_is_a_typed_error(change, tmp_path):
    with pytest.raises(InvalidRequestError):
        read_model(written(tmp_path, configured("llama", **change)))


def test_a_latent_attention_without_its_sizes_is_a_typed_error(tmp_path):
    config = configured("deepseek_v3")
    del config["v_head_dim"]
    with pytest.raises(InvalidRequestError, match="v_head_dim"):
        read_model(written(tmp_path, config))


@pytest.mark.parametrize("name", ["nowhere", "Qwen/Qwen2.5-7B"])
def test_a_model_that_is_not_there_is_a_typed_error(name):
    with pytest.raises(InvalidRequestError, match="names of hubs are not looked up"):
        read_model(Path(name))
