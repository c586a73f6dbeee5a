"""A source for safetensors files on disk."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from rl_memory_plugins.errors import InvalidRequestError
from rl_memory_plugins.extras import needs
from rl_memory_plugins.trainer.sources.outgoing import Outgoing, Rename
from rl_memory_plugins.weights.manifest import TensorSpec

INDEX = "model.safetensors.index.json"

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": getattr(torch, "float8_e8m0fnu", None),  # since torch 2.7
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


class CheckpointSource:
    """The tensors of safetensors files. Each tensor is read just before it is sent.

    Args:
        path: A file, or a folder. From a folder, the files of its index are read, or else all `*.safetensors`.
        dtype, rename: See `Outgoing`.

    Raises:
        InvalidRequestError: a file is missing, or (from `specs`) a dtype cannot be sent.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        dtype: torch.dtype | None = None,
        rename: Rename | None = None,
    ) -> None:
        self._outgoing = Outgoing(dtype, rename)
        self._files = _files(Path(path))

    def specs(self) -> list[TensorSpec]:
        with needs("checkpoints"):
            from safetensors import safe_open

        specs = []
        for path in self._files:
            with safe_open(path, framework="pt") as file:
                for name, sent in self._names(file.keys()):
                    part = file.get_slice(name)
                    dtype = _DTYPES.get(part.get_dtype())
                    if dtype is None:
                        raise InvalidRequestError(f"{name} in {path}: dtype {part.get_dtype()} cannot be sent")
                    specs.append(self._outgoing.spec(sent, dtype, part.get_shape()))
        return specs

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        with needs("checkpoints"):
            from safetensors import safe_open

        for path in self._files:
            with safe_open(path, framework="pt") as file:
                for name, sent in self._names(file.keys()):
                    yield sent, self._outgoing.cast(file.get_tensor(name))

    def _names(self, names: list[str]) -> Iterator[tuple[str, str]]:
        for name in names:
            sent = self._outgoing.name(name)
            if sent is not None:
                yield name, sent


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    index = path / INDEX
    if index.is_file():
        files = [path / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    else:
        files = sorted(path.glob("*.safetensors"))
    missing = [str(file) for file in files if not file.is_file()]
    if missing or not files:
        raise InvalidRequestError(f"safetensors files are missing at {path}", missing=missing)
    return files
