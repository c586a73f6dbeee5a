"""Updates of real engines, by kind of weights, against fresh engines of the same weights.

`--kinds all` also runs other formats of checkpoints for a kernel that `--kinds chosen` runs with one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file

from integration.models import SHAPES, write_model
from rl_memory_plugins import ManifestError, UnsupportedError, WeightUpdateError
from rl_memory_plugins.weights.checksums import tensor_checksum
from tests.vllm.calls import generate, push
from tests.vllm.child import Child
from tests.vllm.conftest import OTHER_SEED, PROMPT, SEED, engine_options, environment
from tests.weight_kinds import (
    Write,
    checkpoint,
    write_awq,
    write_dense,
    write_gptq,
    write_int4,
    write_int8,
    write_moe,
    write_tied,
)

RANK = 8


class Layer(NamedTuple):
    """A layer of the engine that several tensors of the checkpoint make, by patterns of their names."""

    name: str
    tensors: str
    some: str  # of these tensors


PROJECTIONS = Layer("layers.0.self_attn.qkv_proj", r"layers\.0\.self_attn\.[qkv]_proj", "q_proj")
EXPERTS = Layer("layers.0.mlp.experts", r"layers\.0\.mlp\.experts\.", r"experts\.0\.")


class Kind(NamedTuple):
    write: Write
    transformed: bool = False  # by vLLM, after loading
    dtype: str = "float32"
    options: dict[str, Any] = {}
    kernel: str = ""  # of vLLM's, that not every CPU has
    chosen: bool = True  # else only `--kinds all` runs it
    layer: Layer = PROJECTIONS  # one that is transformed if any is


KINDS = {
    "tied": Kind(write_tied, chosen=False),  # of those of tests/kinds
    "lora": Kind(write_dense, options={"enable_lora": True, "max_lora_rank": RANK}, chosen=False),
    "moe": Kind(write_moe, transformed=True, layer=EXPERTS),
    "int4": Kind(write_int4, transformed=True, dtype="bfloat16", kernel="cpu_gemm_wna16"),  # which takes no other
    "gptq": Kind(write_gptq, transformed=True, dtype="bfloat16", kernel="cpu_gemm_wna16", chosen=False),
    "awq": Kind(write_awq, transformed=True, dtype="bfloat16", kernel="cpu_gemm_wna16", chosen=False),
}


def make(folder: Path, options: dict[str, Any]) -> Any:
    from rl_memory_plugins.vllm import LLM

    return LLM(rl_memory={"poison": True}, **{**engine_options(folder), **options})


def start(kind: Kind, folder: Path) -> Child:
    # In one process, so that functions of this module can be run on the worker.
    return Child(
        make,
        folder,
        {"dtype": kind.dtype, **kind.options},
        environment=environment(folder, VLLM_ENABLE_V1_MULTIPROCESSING="0"),
    )


def tensors_of(worker: Any) -> dict[str, tuple[str, int]]:
    """Of each parameter the checksum and the address, whatever its layout is."""
    return {
        name: (tensor_checksum(tensor), tensor.data_ptr()) for name, tensor in worker.rl_memory.model.named_parameters()
    }


def write_adapter(folder: Path) -> Path:
    """A LoRA adapter of `write_dense`'s models, strong enough to be seen in every answer."""
    folder.mkdir(exist_ok=True)
    torch.manual_seed(5)
    hidden = SHAPES["small"].hidden
    prefix = "base_model.model.model.layers.0.mlp.down_proj"
    tensors = {
        f"{prefix}.lora_A.weight": torch.randn(RANK, SHAPES["small"].intermediate),
        f"{prefix}.lora_B.weight": torch.randn(hidden, RANK),
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["down_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def adapted(llm: Any) -> list[int]:
    """The answer with the adapter, of an engine that takes one."""
    if not llm.llm_engine.vllm_config.lora_config:
        return []
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    folder = write_adapter(Path(llm.llm_engine.vllm_config.model_config.model).parent / "adapter")
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    request = LoRARequest("adapter", 1, str(folder))
    prompt = {"prompt_token_ids": PROMPT}
    return list(llm.generate([prompt], params, use_tqdm=False, lora_request=request)[0].outputs[0].token_ids)


def state(llm: Any) -> tuple[list[int], dict[str, str], dict[str, int]]:
    """Tokens, and the checksums and addresses of all parameters."""
    found = llm.collective_rpc(tensors_of)[0]
    plain, with_adapter = generate(llm, 24), adapted(llm)
    assert plain != with_adapter
    return (
        plain + with_adapter,
        {name: checksum for name, (checksum, _) in found.items()},
        {name: address for name, (_, address) in found.items()},
    )


def update(llm: Any, folder: Path) -> dict[str, Any]:
    """The report of the rank."""
    return dict(push(llm, checkpoint(folder))["engine"].details["ranks"][0])


def renew(llm: Any, folder: Path) -> Any:
    """The handoff of a training step: nothing of the old weights is left when the new ones come."""
    llm.sleep(2)
    llm.wake_up(["weights"])
    update(llm, folder)
    llm.wake_up()
    return state(llm)


def sleep_and_wake(llm: Any) -> Any:
    llm.sleep(1)
    llm.wake_up()
    return state(llm)


def has_kernel(name: str) -> bool:
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    return hasattr(torch.ops._C, name)


class Engines(NamedTuple):
    """An engine, two checkpoints, and what fresh engines of them are."""

    kind: Kind
    engine: Child
    folders: list[Path]
    fresh: list[Any]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "engines" in metafunc.fixturenames:
        every = metafunc.config.getoption("--kinds") == "all"
        kinds = [name for name, kind in KINDS.items() if every or kind.chosen]
        metafunc.parametrize("engines", kinds, indirect=True, scope="module")


@pytest.fixture(scope="module")
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    kind = KINDS[request.param]
    if kind.kernel and not has_kernel(kind.kernel):
        pytest.skip(f"vLLM's build for this CPU has no {kind.kernel}: it needs AVX-512")
    folder = tmp_path_factory.mktemp("kind")
    folders = [kind.write(folder / name, seed, kind.dtype) for name, seed in (("first", SEED), ("other", OTHER_SEED))]
    other = start(kind, folders[1])
    try:
        fresh = other(state)
    finally:
        other.stop()
    engine = start(kind, folders[0])
    try:
        yield Engines(kind, engine, folders, [engine(state), fresh])
    finally:
        engine.stop()


def test_after_an_update_an_engine_is_a_fresh_one_of_these_weights(engines: Engines) -> None:
    first, other = engines.fresh
    assert first[0] != other[0]
    report = engines.engine(update, engines.folders[1])
    assert (report["opaque"] > 0) == engines.kind.transformed
    assert report["replayed"] > 0  # what is not transformed
    for number in (1, 0, 1, 0):
        tokens, checksums, addresses = engines.engine(renew, engines.folders[number])
        assert tokens == engines.fresh[number][0]
        assert checksums == engines.fresh[number][1]
        assert addresses == first[2]  # what CUDA graphs would refer to
    assert engines.engine(sleep_and_wake) == first


def break_off(llm: Any, folder: Path) -> Any:
    tensors = checkpoint(folder)

    class Breaking:
        def specs(self) -> Any:
            from rl_memory_plugins.weights.source import spec_of

            return [spec_of(name, tensor) for name, tensor in tensors.items()]

        def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
            for number, item in enumerate(tensors.items()):
                if number == len(tensors) // 2:
                    raise RuntimeError("the trainer broke")
                yield item

    with pytest.raises((WeightUpdateError, RuntimeError)):
        push(llm, Breaking())
    assert llm.memory_status()[0].content == "failed"


def test_an_update_that_breaks_off_leaves_the_engine_able_to_take_the_next(engines: Engines) -> None:
    engines.engine(break_off, engines.folders[1])
    assert engines.engine(renew, engines.folders[0]) == engines.fresh[0]


def refused(llm: Any, folder: Path) -> list[tuple[str, str]]:
    """What is wrong with a manifest with a wrong, an unknown and a missing tensor."""
    tensors = checkpoint(folder)
    read = [name for name in tensors if not name.endswith("g_idx")]  # which vLLM reads of some checkpoints only
    name, missing = (next(name for name in read if part in name) for part in ("1.self_attn.o_proj", "0.mlp"))
    tensors[name] = torch.zeros(3, 5, dtype=tensors[name].dtype)
    tensors["model.layers.0.unheard_of.weight"] = torch.zeros(4, 4)
    del tensors[missing]
    with pytest.raises(ManifestError) as error:
        push(llm, tensors)
    assert llm.memory_status()[0].content == "valid"
    return [(mismatch["kind"], mismatch["name"]) for mismatch in error.value.details["mismatches"]]


def test_a_manifest_that_does_not_fit_changes_nothing(engines: Engines) -> None:
    before = engines.engine(state)
    found = engines.engine(refused, engines.folders[1])
    assert {"shape", "unknown", "missing"} <= {kind for kind, _ in found}
    assert ("unknown", "model.layers.0.unheard_of.weight") in found
    assert engines.engine(state) == before


def partly(llm: Any, folder: Path, layer: Layer, whole: bool) -> Any:
    tensors = {name: tensor for name, tensor in checkpoint(folder).items() if re.search(layer.tensors, name)}
    push(llm, {n: one for n, one in tensors.items() if whole or re.search(layer.some, n)}, partial=True)
    return state(llm)


def test_a_partial_update(engines: Engines) -> None:
    """Of several tensors that the engine keeps as one layer."""
    before, layer = engines.engine(state), engines.kind.layer
    if engines.kind.transformed:  # the rest of the layer could not be packed with it
        with pytest.raises(AssertionError, match="reloads whole layers"):
            engines.engine(partly, engines.folders[1], layer, False)
        assert engines.engine(state) == before
    after = engines.engine(partly, engines.folders[1], layer, True)
    changed = {name for name in after[1] if after[1][name] != before[1][name]}
    assert changed and all(layer.name in name for name in changed)
    assert {name: after[1][name] for name in changed} == {name: engines.fresh[1][1][name] for name in changed}
    assert engines.engine(renew, engines.folders[0]) == engines.fresh[0]


def refused_as_a_whole(llm: Any, folder: Path) -> dict[str, str]:
    with pytest.raises(UnsupportedError) as error:
        push(llm, checkpoint(folder))
    assert llm.memory_status()[0].content == "valid"
    return dict(error.value.details["layers"])


def keep_moe_kernels(worker: Any) -> None:
    """A reload leaves vLLM's kernels of experts as they are, by which vLLM knows that it has packed the experts."""
    from rl_memory_plugins.engines.layer_templates import LayerTemplate

    LayerTemplate.rewind = LayerTemplate.give


def skipped(llm: Any, folder: Path) -> str:
    llm.collective_rpc(keep_moe_kernels)
    with pytest.raises(WeightUpdateError) as error:
        push(llm, checkpoint(folder))
    assert llm.memory_status()[0].content == "failed"
    return str(error.value)


def test_a_reload_that_leaves_out_a_step_does_not_answer(tmp_path: Path) -> None:
    """vLLM 0.32 itself packs experts at the first load only: its reload leaves them unpacked, for a kernel that
    takes them as packed."""
    kind = KINDS["moe"]
    engine = start(kind, kind.write(tmp_path / "first", SEED, kind.dtype))
    try:
        message = engine(skipped, kind.write(tmp_path / "other", OTHER_SEED, kind.dtype))
    finally:
        engine.stop()
    assert "experts" in message and "without its post-load processing" in message


def never_updatable(llm: Any) -> dict[str, str]:
    """What the engine says of itself. Level 2 of the weights would lose them for good."""
    with pytest.raises(UnsupportedError, match="cannot be updated"):
        llm.sleep(2)
    capabilities = llm.memory_status()[0].capabilities
    assert "packed copies" in capabilities.fixed_weights
    llm.sleep(1)
    llm.wake_up()
    return dict(capabilities.fixed_layers)


def test_weights_that_a_kernel_keeps_for_itself_are_refused(tmp_path: Path) -> None:
    """oneDNN packs eight-bit weights into memory of its own and keeps pointers to the scales: vLLM's reload would
    leave them dangling."""
    kind = Kind(write_int8)
    engine = start(kind, kind.write(tmp_path / "first", SEED, kind.dtype))
    try:
        before = engine(state)
        layers = engine(refused_as_a_whole, kind.write(tmp_path / "other", OTHER_SEED, kind.dtype))
        assert engine(never_updatable) == layers
        assert engine(state) == before
    finally:
        engine.stop()
    assert layers["model.layers.0.self_attn.qkv_proj"] == "CompressedTensorsW8A8Int8"


def write_gpt_oss(folder: Path, seed: int, dtype: str) -> Path:
    """In bfloat16, as it is fine-tuned; its loader copies the experts into their parameters by itself."""
    from transformers import GptOssConfig, GptOssForCausalLM

    write_model(folder, SHAPES["tiny"])
    config = GptOssConfig(
        num_hidden_layers=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=128,
        head_dim=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=64,
        max_position_embeddings=1024,
        initial_context_length=256,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    torch.manual_seed(seed)
    GptOssForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


def test_a_model_of_which_vllm_s_reload_would_lose_weights(tmp_path: Path) -> None:
    """vLLM's own reload of it gets none of the experts, keeps the former ones, and says that all went well."""
    kind = Kind(write_gpt_oss, dtype="bfloat16")
    folders = [kind.write(tmp_path / name, seed, kind.dtype) for name, seed in (("first", SEED), ("other", OTHER_SEED))]
    other = start(kind, folders[1])
    try:
        fresh = other(state)
    finally:
        other.stop()
    engine = start(kind, folders[0])
    try:
        first = engine(state)
        report = engine(update, folders[1])
        assert report["opaque"] and report["replayed"]  # the experts, and all others
        assert engine(state)[:2] == fresh[:2]
        engine(break_off, folders[0])
        for number in (0, 1, 0):
            tokens, checksums, addresses = engine(renew, folders[number])
            assert (tokens, checksums) == (first, fresh)[number][:2]
            assert addresses == first[2]  # what CUDA graphs would refer to
        assert engine(sleep_and_wake) == first
    finally:
        engine.stop()
