"""The base model's names in a model that PEFT has wrapped. Needs no PEFT: its layers are known by their attributes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch

logger = logging.getLogger(__name__)

_OUTER = "base_model.model."
_INNER = "base_layer"


def base_names(module: torch.nn.Module) -> Callable[[str], str | None] | None:
    """Maps the module's names to those of the base model, and those of adapters to `None`; `None` without adapters.

    A module that PEFT trains as a whole (`modules_to_save`) counts in the version of the active adapter.
    """
    own, moved = set[str](), dict[str, str]()
    for path, layer in module.named_modules():
        attributes = getattr(layer, "adapter_layer_names", None)
        if attributes is None:
            continue
        if isinstance(getattr(layer, "modules_to_save", None), torch.nn.ModuleDict):
            chosen = next((name for name in layer.active_adapters if name in layer.modules_to_save), None)
            kept = "original_module" if chosen is None else f"modules_to_save.{chosen}"
            moved[f"{path}.{kept}."] = f"{path}."
            own.update((f"{path}.modules_to_save.", f"{path}.original_module."))
            continue
        own.update(f"{path}.{name}" for name in (*attributes, *getattr(layer, "other_param_names", ())))
    if not own:
        return None

    def base_name(name: str) -> str | None:
        for prefix in _prefixes(name):
            if prefix in moved:
                name = moved[prefix] + name.removeprefix(prefix)
                break
            if prefix in own and not any(name.startswith(kept) for kept in moved):
                return None
        return ".".join(part for part in name.removeprefix(_OUTER).split(".") if part != _INNER)

    return base_name


def warn_of_adapters(module: torch.nn.Module) -> None:
    """Warn if adapters that are not merged change what the module computes."""
    active = {
        name
        for layer in module.modules()
        if not getattr(layer, "merged", True) and not getattr(layer, "disable_adapters", False)
        for name in getattr(layer, "active_adapters", ())
    }
    if active:
        logger.warning(
            "the weights of the base model are sent without the adapters %s, which are not merged: call "
            "merge_adapter() before an update to send what the model computes",
            ", ".join(sorted(active)),
        )


def _prefixes(name: str) -> Iterator[Any]:
    """Every part of a name up to a point, without and with that point, the shortest first."""
    end = name.find(".")
    while end >= 0:
        yield name[:end]
        yield name[: end + 1]
        end = name.find(".", end + 1)
    yield name
