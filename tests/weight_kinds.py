"""Ways to store weights, each as a checkpoint of a small model, and engines started on them to be compared."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from integration.engines import ENGINES
from integration.engines.base import Launch, Server
from integration.models import SHAPES, write_model
from rl_memory_plugins.trainer import QuantisedSource
from tests.conformance.trainers import push

PROMPT = [5, 6, 7, 8]
TOKENS = 24
BLOCK = 128
FP8 = torch.float8_e4m3fn

Write = Callable[[Path, int, str], Path]
"""Writes a checkpoint: folder, seed, dtype of what is not quantised."""


def write_dense(folder: Path, seed: int, dtype: str) -> Path:
    return write_model(folder, SHAPES["small"]._replace(layers=2), dtype=dtype, seed=seed)


def write_tied(folder: Path, seed: int, dtype: str) -> Path:
    return write_model(folder, SHAPES["small"]._replace(layers=2, tied=True), dtype=dtype, seed=seed)


def write_moe(folder: Path, seed: int, dtype: str) -> Path:
    return write_model(folder, SHAPES["tiny-moe"]._replace(experts=32), dtype=dtype, seed=seed)


def write_int8(folder: Path, seed: int, dtype: str) -> Path:
    """Eight-bit weights with a scale for each row, and activations quantised token by token."""
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
    activations = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}

    def quantise(name: str, weight: torch.Tensor) -> Mapping[str, torch.Tensor]:
        scale = weight.float().abs().amax(dim=1, keepdim=True) / 127
        return {name: (weight / scale).round().to(torch.int8), f"{name}_scale": scale}

    config = compressed_tensors("int-quantized", {"weights": weights, "input_activations": activations})
    return _quantised(write_dense(folder, seed, dtype), config, quantise)


def write_int4(folder: Path, seed: int, dtype: str) -> Path:
    """Four-bit weights, eight to an integer, with a scale for every 128 of a row."""
    return _int4(write_dense(folder, seed, dtype), BLOCK)


def write_int4_experts(folder: Path, seed: int, dtype: str) -> Path:
    return _int4(write_moe(folder, seed, dtype), 32)


def _int4(folder: Path, group: int) -> Path:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group}

    def quantise(name: str, weight: torch.Tensor) -> Mapping[str, torch.Tensor]:
        groups = weight.float().view(weight.shape[0], -1, group)
        scale = groups.abs().amax(dim=2, keepdim=True) / 7
        nibbles = ((groups / scale).round() + 8).to(torch.int64).view(weight.shape[0], -1, 8)
        packed = (nibbles << torch.arange(0, 32, 4)).sum(dim=2)
        return {
            f"{name}_packed": torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32),
            f"{name}_scale": scale.squeeze(2).to(weight.dtype),
            f"{name}_shape": torch.tensor(weight.shape),
        }

    config = compressed_tensors("pack-quantized", {"weights": {**weights, "dynamic": False}})
    return _quantised(folder, config, quantise)


def compressed_tensors(layout: str, group: dict[str, Any]) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*mlp.gate$"],  # routers, as published recipes have them
        "config_groups": {"group_0": {"targets": ["Linear"], **group}},
    }


def write_tensor_fp8(folder: Path, seed: int, dtype: str) -> Path:
    """FP8 weights with one scale for each tensor, and scales of an FP8 KV cache.

    Engines that fuse tensors give them one scale.
    """
    return _tensor_fp8(write_dense(folder, seed, dtype))


def write_fp8_experts(folder: Path, seed: int, dtype: str) -> Path:
    return _tensor_fp8(write_moe(folder, seed, dtype))


def _tensor_fp8(folder: Path) -> Path:
    def quantise(name: str, weight: torch.Tensor) -> Mapping[str, torch.Tensor]:
        scale = weight.float().abs().max() / torch.finfo(FP8).max
        tensors = {name: (weight.float() / scale).to(FP8), f"{name}_scale": scale}
        layer, _, projection = name.removesuffix("_proj.weight").rpartition(".")
        if projection in ("k", "v"):
            tensors[f"{layer}.attn.{projection}_scale"] = scale * 100
        return tensors

    return _quantised(folder, {"quant_method": "fp8", "activation_scheme": "dynamic"}, quantise)


def write_gptq(folder: Path, seed: int, dtype: str) -> Path:
    """Four-bit weights as GPTQ stores them."""
    config = {"quant_method": "gptq", "bits": 4, "group_size": BLOCK, "sym": True, "desc_act": False}
    return _as_sent(write_dense(folder, seed, dtype), config, "qweight")


def write_awq(folder: Path, seed: int, dtype: str) -> Path:
    """Four-bit weights with zero points, as AWQ stores them."""
    config = {"quant_method": "awq", "bits": 4, "group_size": BLOCK, "zero_point": True, "version": "gemm"}
    return _as_sent(write_dense(folder, seed, dtype), config, "qweight")


def _as_sent(folder: Path, config: dict[str, Any], marker: str) -> Path:
    """The checkpoint that a trainer sends by `QuantisedSource`."""
    file = folder / "model.safetensors"
    plain = load_file(file)
    names = [name.replace("_proj.weight", f"_proj.{marker}") for name in plain]
    save_file(dict(QuantisedSource(plain, config, names).tensors()), file)
    return with_config(folder, config)


def _quantised(
    folder: Path, config: dict[str, Any], quantise: Callable[[str, torch.Tensor], Mapping[str, torch.Tensor]]
) -> Path:
    file = folder / "model.safetensors"
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(file).items():
        tensors |= quantise(name, tensor) if name.endswith("_proj.weight") else {name: tensor}
    save_file(tensors, file)
    return with_config(folder, config)


def with_config(folder: Path, config: dict[str, Any]) -> Path:
    plain = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**plain, "quantization_config": config}))
    return folder


def checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, as a trainer would send them."""
    return load_file(folder / "model.safetensors")


def renew(server: Server, folder: Path, **options: Any) -> None:
    """The handoff of a training step: nothing of the old weights is left when the new ones come."""
    server.control.sleep(2)
    server.control.wake_up(["weights"])
    push(server, checkpoint(folder), **options)
    server.control.wake_up()


class State(NamedTuple):
    """What can be compared of two engines."""

    tokens: list[int]
    checksums: dict[str, str]  # of each parameter, by the engine's own names or by the checkpoint's
    layout: str


def state(server: Server) -> State:
    checksums = server.control.checksums()
    return State(server.generate(PROMPT, TOKENS), checksums["tensors"], checksums["layout"])


@contextmanager
def started(
    engine: str, launch: Launch, log: Path, *arguments: str, sites: Sequence[Path] = (), **environment: str
) -> Iterator[Server]:
    """An engine's server with more arguments than `Launch` knows, which imports from the folders `sites`, too."""

    class Extended(ENGINES[engine]):  # type: ignore[misc]
        def command(self, launch: Launch, port: int) -> list[str]:
            return [*super().command(launch, port), *arguments]

        def environment(self, launch: Launch) -> dict[str, str]:
            own = super().environment(launch)
            path = [own.get("PYTHONPATH", os.environ.get("PYTHONPATH", "")), *map(str, sites)]
            return {**own, "PYTHONPATH": os.pathsep.join(filter(None, path)), **environment}

    with Server(Extended(), launch, log) as server:
        yield server


def install_plugin(folder: Path, group: str, plugin: str) -> Path:
    """A distribution whose entry point of `group` is the `register` of `plugin`, a module's text, as engines find it.

    Gives the folder, which is to stand on the engine's PYTHONPATH.
    """
    about = folder / "test_plugin-1.dist-info"
    about.mkdir(parents=True)
    (folder / "test_plugin.py").write_text(textwrap.dedent(plugin))
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: test_plugin\nVersion: 1\n")
    (about / "entry_points.txt").write_text(f"[{group}]\ntest_plugin = test_plugin:register\n")
    return folder
