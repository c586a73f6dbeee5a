"""Updates of models whose weights are not stored as a checkpoint has them, against fresh engines of the same weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from integration.models import SHAPES, new_model, write_model
from rl_memory_plugins import ManifestError, UnsupportedError
from rl_memory_plugins.weights.checksums import tensor_checksum
from tests.vllm.child import Child
from tests.vllm.conftest import OTHER_SEED, SEED, engine_options, environment
from tests.vllm.test_python import generate, push

INT8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False},
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "strategy": "token",
                "symmetric": True,
                "dynamic": True,
            },
        }
    },
}
"""Eight-bit weights with a scale for each row; vLLM packs them for its kernel after loading."""


def write_dense(folder: Path, seed: int) -> Path:
    return write_model(folder, SHAPES["tiny"]._replace(layers=2), seed=seed)


def write_tied(folder: Path, seed: int) -> Path:
    return write_model(folder, SHAPES["tiny"]._replace(layers=2, tied=True), seed=seed)


def write_moe(folder: Path, seed: int) -> Path:
    return write_model(folder, SHAPES["tiny-moe"]._replace(experts=32), seed=seed)


def write_int8(folder: Path, seed: int) -> Path:
    write_dense(folder, seed)
    file = folder / "model.safetensors"
    quantised: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(file).items():
        if "_proj.weight" not in name:
            quantised[name] = tensor
            continue
        scale = tensor.abs().amax(dim=1, keepdim=True) / 127
        quantised[name] = (tensor / scale).round().to(torch.int8)
        quantised[f"{name}_scale"] = scale
    save_file(quantised, file)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": INT8}))
    return folder


def make(folder: Path, options: dict[str, Any]) -> Any:
    from rl_memory_plugins.vllm import LLM

    return LLM(rl_memory={"poison": True}, **{**engine_options(folder), **options})


def parameters(worker: Any) -> dict[str, tuple[str, int]]:
    """The checksum and the address of each tensor of the model, whatever its layout."""
    return {
        name: (tensor_checksum(tensor.contiguous()), tensor.data_ptr())
        for name, tensor in worker.rl_memory.model.named_parameters()
    }


def state(llm: Any) -> tuple[list[int], dict[str, tuple[str, int]]]:
    return generate(llm, 24), llm.collective_rpc(parameters)[0]


class Kind:
    """A way to store weights: how to write a checkpoint, and how to start an engine on it."""

    def __init__(self, write: Callable[[Path, int], Path], opaque: bool, **options: Any) -> None:
        self.write, self.opaque, self.options = write, opaque, options


KINDS = {
    "dense": Kind(write_dense, False),
    "tied": Kind(write_tied, False),
    "moe": Kind(write_moe, True),
    "int8": Kind(write_int8, True),
    "lora": Kind(write_dense, False, enable_lora=True, max_lora_rank=8),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture
def folders(kind: Kind, tmp_path: Path) -> tuple[Path, Path]:
    return kind.write(tmp_path / "first", SEED), kind.write(tmp_path / "other", OTHER_SEED)


def start(kind: Kind, folder: Path) -> Child:
    # In one process, so that functions of this module can be run on the worker.
    return Child(make, folder, kind.options, environment=environment(folder, VLLM_ENABLE_V1_MULTIPROCESSING="0"))


def checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def update(llm: Any, folder: Path, **options: Any) -> dict[str, Any]:
    answer = push(llm, checkpoint(folder), **options)
    return answer["engine"].details["ranks"][0] if "ranks" in answer["engine"].details else answer


def cycle(llm: Any, folder: Path, opaque: bool) -> Any:
    llm.sleep(2)
    llm.wake_up(["weights"])
    print(update(llm, folder))
    llm.wake_up()
    return state(llm)


def test_after_an_update_the_engine_is_a_fresh_one_of_these_weights(kind: Kind, folders: tuple[Path, Path]) -> None:
    fresh = start(kind, folders[1])
    try:
        expected_tokens, expected = fresh(state)
    finally:
        fresh.stop()
    engine = start(kind, folders[0])
    try:
        before = engine(state)
        assert before[0] != expected_tokens
        for folder in (folders[1], folders[0], folders[1]):
            tokens, found = engine(cycle, folder, kind.opaque)
        assert tokens == expected_tokens
        assert {name: sum for name, (sum, _) in found.items()} == {name: sum for name, (sum, _) in expected.items()}
        assert {name: at for name, (_, at) in found.items()} == {name: at for name, (_, at) in before[1].items()}
    finally:
        engine.stop()
