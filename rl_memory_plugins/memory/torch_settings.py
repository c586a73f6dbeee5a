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


def set_torch_option(name: str, value: bool) -> None:
    """Change one setting of torch's caching allocator, for the process.

    torch resets every setting that a new settings string omits, so the function amends the current string.
    """
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    texts = [str(source[key]) for source in (torch_options(), os.environ) for key in names if source.get(key)]
    text = texts[0] if texts else ""
    fields = [field for field in text.split(",") if field and field.partition(":")[0].strip() != name]
    set_settings = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if set_settings is None:
        set_settings = torch.cuda.memory._set_allocator_settings
    set_settings(",".join([*fields, f"{name}:{value}"]))


def missing_symbols(owner: object, paths: Iterable[str]) -> list[str]:
    """The dotted `paths` below `owner` that do not exist or are None."""

    def find(path: str) -> Any:
        return reduce(lambda found, name: getattr(found, name, None), path.split("."), owner)

    return [path for path in paths if find(path) is None]
