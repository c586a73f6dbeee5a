"""The tensors of a folder's safetensors files, from the files' headers alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rl_memory_plugins.errors import InvalidRequestError
from rl_memory_plugins.plan.tensors import Tensor

#: Bits of safetensors' dtypes; 0 for those that an engine converts to its own.
BITS = {"BF16": 0, "F16": 0, "F32": 32, "F64": 0, "BOOL": 8, "I8": 8, "U8": 8, "F8_E4M3": 8, "F8_E5M2": 8}
BITS |= {"F8_E8M0": 8, "I16": 16, "U16": 16, "I32": 32, "U32": 32, "I64": 64, "U64": 64, "F4": 4}
_MOST_HEADER_BYTES = 1 << 30


def tensors_in(folder: Path, layers: int, *, quantised: bool) -> list[Tensor]:
    """The tensors of all safetensors files of a folder; empty if it has none.

    Args:
        layers: The model's layers. Tensors of later ones belong to a draft, which engines leave out by default.
        quantised: Whether tensors in float32 are scales, and stay so. Otherwise engines convert them.

    Raises:
        InvalidRequestError: a file is no safetensors file.
    """
    found = []
    for file in sorted(folder.glob("*.safetensors")):
        if file.name.startswith("consolidated"):  # the same weights once more, under other names
            continue
        for name, entry in _header(file).items():
            if name == "__metadata__" or _layer(name) >= layers:
                continue
            bits = BITS.get(str(entry["dtype"]), 8)
            bits = 0 if entry["dtype"] == "F32" and not quantised else bits
            found.append(Tensor(name, tuple(int(size) for size in entry["shape"]), bits=bits))
    return found


def _header(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if not 0 < length <= _MOST_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(opened.read(length))
        if not all("shape" in entry and "dtype" in entry for name, entry in header.items() if name != "__metadata__"):
            raise ValueError("a tensor without shape and dtype")
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise InvalidRequestError(f"{file} is no safetensors file: {error}", field="model", got=str(file)) from None
    return dict(header)


def _layer(name: str) -> int:
    parts: Iterator[str] = iter(name.split("."))
    for part in parts:
        if part == "layers":
            number = next(parts, "")
            return int(number) if number.isdigit() else -1
    return -1
