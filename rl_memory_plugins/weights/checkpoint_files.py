"""The tensors of a checkpoint on disk by name, from the headers of its safetensors files."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

from rl_memory_plugins.extras import needs
from rl_memory_plugins.weights.manifest import TensorSpec

logger = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"

#: torch's names of the dtypes of safetensors.
DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "U16": "uint16",
    "I16": "int16",
    "F16": "float16",
    "BF16": "bfloat16",
    "U32": "uint32",
    "I32": "int32",
    "F32": "float32",
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
}


def safetensors_files(folder: Path) -> list[Path]:
    """The files that the index of a folder names, or else all its `*.safetensors`. They may not exist."""
    index = folder / INDEX
    if index.is_file():
        return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    return sorted(folder.glob("*.safetensors"))


def specs_in(folder: Path) -> dict[str, TensorSpec]:
    """The tensors in a folder's safetensors files, by name."""
    with needs("checkpoints"):
        from safetensors import safe_open

    found: dict[str, TensorSpec] = {}
    for path in safetensors_files(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_slice(name)
                dtype = tensor.get_dtype()
                found[name] = TensorSpec(name, DTYPES.get(dtype, dtype), tuple(tensor.get_shape()))
    return found


def dtypes_in(folder: Path) -> dict[str, str]:
    """The dtype of each tensor in a folder's safetensors files, by name."""
    return {name: spec.dtype for name, spec in specs_in(folder).items()}


class EngineCheckpoint:
    """The checkpoint that an engine was started from. Its files are read when they are first needed.

    Args:
        model: Gives the model's folder, or its name on the Hugging Face Hub; and the revision there.
    """

    def __init__(self, model: Callable[[], tuple[str, str | None]]) -> None:
        self._model = model
        self._specs: dict[str, TensorSpec] | None = None

    def specs(self) -> dict[str, TensorSpec]:
        """The tensors by name. Empty if this host has no safetensors files of the checkpoint."""
        if self._specs is None:
            try:
                folder = _folder(*self._model())
                self._specs = {} if folder is None else specs_in(folder)
            except Exception as error:  # a load from elsewhere is no reason to fail an update
                logger.warning("cannot read which tensors the engine's checkpoint has: %s", error)
                self._specs = {}
        return self._specs


def _folder(model: str, revision: str | None) -> Path | None:
    """The folder with a model's files on this host: the model's own, or in the cache of the Hub; `None` if neither."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import try_to_load_from_cache

    for name in (INDEX, "model.safetensors"):
        found = try_to_load_from_cache(model, name, revision=revision)
        if isinstance(found, str):
            return Path(found).parent
    return None
