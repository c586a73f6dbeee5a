"""What attention layers derive from weights of other layers, after updates that write only the weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from integration.kinds.checkpoints import COMMON, of
from tests.vllm.calls import generate, push
from tests.vllm.child import Child
from tests.vllm.conftest import OTHER_SEED, SEED, engine_options, environment
from tests.weight_kinds import checkpoint


def write_sinks(folder: Path, seed: int, dtype: str) -> Path:
    """Granite with attention sinks, the only dense model of vLLM's with them. vLLM transforms none of its weights."""
    of("GraniteConfig", intermediate_size=512)(folder, seed, dtype)
    file = folder / "model.safetensors"
    generator = torch.Generator().manual_seed(seed)
    sinks = {
        f"model.layers.{layer}.self_attn.sinks": (4 * torch.randn(COMMON["num_attention_heads"], generator=generator))
        for layer in range(COMMON["num_hidden_layers"])
    }
    weights = load_file(file) | {name: one.to(getattr(torch, dtype)) for name, one in sinks.items()}
    save_file(weights, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "attention_sinks": True}))
    return folder


def make(folder: Path, dtype: str) -> Any:
    from vllm.v1.attention.backends.b12x import B12xPagedAttentionImpl
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    from rl_memory_plugins.vllm import LLM

    if dtype == "bfloat16":  # a backend as b12x and FlashInfer, with vLLM's own step, and the CPU's kernel
        original = CPUAttentionBackendImpl.__init__

        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            self._sinks_source = self.sinks

        CPUAttentionBackendImpl.__init__ = __init__
        CPUAttentionBackendImpl.process_weights_after_loading = B12xPagedAttentionImpl.process_weights_after_loading
    return LLM(rl_memory={"poison": True}, **engine_options(folder, dtype=dtype))


def start(folder: Path, dtype: str) -> Child:
    return Child(make, folder, dtype, environment=environment(folder, VLLM_ENABLE_V1_MULTIPROCESSING="0"))


def copies_of(worker: Any) -> list[tuple[list[float], int, str]]:
    """Of the sinks that each layer's kernel reads, the values, the address and the dtype."""
    sinks = [layer.impl.sinks for layer in worker.rl_memory.model.modules() if hasattr(layer, "impl")]
    return [(one.tolist(), one.data_ptr(), str(one.dtype)) for one in sinks]


def state(llm: Any) -> tuple[list[int], list[list[float]]]:
    tokens = generate(llm, 24)
    found = llm.collective_rpc(copies_of)[0]
    assert {dtype for _, _, dtype in found} == {"torch.float32"}
    return tokens, [values for values, _, _ in found]


def addresses(llm: Any) -> list[int]:
    return [address for _, address, _ in llm.collective_rpc(copies_of)[0]]


def update(llm: Any, folder: Path) -> Any:
    """Of all weights. vLLM transforms none, so the plan replays all of them."""
    assert push(llm, checkpoint(folder))["engine"].details["ranks"][0]["opaque"] == 0
    return state(llm)


def renew(llm: Any, folder: Path) -> Any:
    llm.sleep(2)
    llm.wake_up(["weights"])
    update_report = push(llm, checkpoint(folder))
    assert update_report
    llm.wake_up()
    return state(llm)


def update_partly(llm: Any, folder: Path, part: str) -> Any:
    push(llm, {name: tensor for name, tensor in checkpoint(folder).items() if part in name}, partial=True)
    return state(llm)


@pytest.fixture(scope="module", params=["float16", "bfloat16"], ids=["at the first forward pass", "in the step"])
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An engine, two checkpoints, and what fresh engines of them are."""
    folder = tmp_path_factory.mktemp("sinks")
    folders = [write_sinks(folder / str(seed), seed, request.param) for seed in (SEED, OTHER_SEED)]
    with start(folders[1], request.param) as other:
        fresh = other(state)
    with start(folders[0], request.param) as engine:
        yield engine, folders, [engine(state), fresh]


def test_a_copy_of_the_sinks_follows_an_update(engines: Any) -> None:
    engine, folders, fresh = engines
    assert fresh[0] != fresh[1]
    at = engine(addresses)
    for number in (1, 0):
        assert engine(update, folders[number]) == fresh[number]
    for number in (1, 0):
        assert engine(renew, folders[number]) == fresh[number]
    assert engine(addresses) == at  # where CUDA graphs would read them


def test_a_copy_of_the_sinks_follows_a_partial_update(engines: Any) -> None:
    engine, folders, fresh = engines
    _, sinks = engine(update_partly, folders[1], "mlp")
    assert sinks == fresh[0][1]
    tokens, sinks = engine(update_partly, folders[1], "0.self_attn.sinks")
    assert sinks == [fresh[1][1][0], fresh[0][1][1]]
    assert engine(update, folders[0]) == fresh[0]
