"""The settings of torch's caching allocator, and a check of undocumented symbols."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import reduce
from typing import Any

import torch


def torch_options() -> dict[str, Any]:
    """The current settings of torch's caching allocator, from the environment and from calls."""
    return dict(torch.cuda.memory._snapshot().get("allocator_settings", {}))


def has_torch_option(name: str) -> bool:
    """Whether the latest settings string switches an option on. One of other code may have omitted it."""
    return any(field.replace(" ", "") == f"{name}:True" for field in _fields())


def set_torch_option(name: str, value: bool) -> None:
    """Change one setting of torch's caching allocator, for the process.

    torch resets every setting that a new settings string omits, so the function amends the current string.
    """
    fields = [field for field in _fields() if field.partition(":")[0].strip() != name]
    set_settings = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if set_settings is None:
        set_settings = torch.cuda.memory._set_allocator_settings
    set_settings(",".join([*fields, f"{name}:{value}"]))


def _fields() -> list[str]:
    """The settings that the current string names."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    texts = [str(source[key]) for source in (torch_options(), os.environ) for key in names if source.get(key)]
    return [field for field in (texts[0] if texts else "").split(",") if field]


def missing_symbols(owner: object, paths: Iterable[str]) -> list[str]:
    """The dotted `paths` below `owner` that do not exist or are None."""

    def find(path: str) -> Any:
        return reduce(lambda found, name: getattr(found, name, None), path.split("."), owner)

    return [path for path in paths if find(path) is None]
