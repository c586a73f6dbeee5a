"""The parameters of a model that only `transformers` knows, made without memory for them."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from rl_memory_plugins.errors import UnsupportedError
from rl_memory_plugins.plan.tensors import Tensor


def tensors_by_transformers(config_file: Path, kind: str, known: tuple[str, ...]) -> list[Tensor]:
    """The parameters, tied ones once.

    Raises:
        UnsupportedError: `transformers` and torch are not installed, or do not know the model.
    """
    try:
        torch: Any = importlib.import_module("torch")
        transformers: Any = importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise _unknown(kind, known, f"{error.name} is not installed") from None
    try:
        config = transformers.AutoConfig.from_pretrained(str(config_file))
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
    except Exception as error:  # a configuration's own code may raise anything
        raise _unknown(kind, known, f"transformers does not make one: {error}") from None
    return [Tensor(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]


def _unknown(kind: str, known: tuple[str, ...], why: str) -> UnsupportedError:
    return UnsupportedError(
        f"the plan has no rule for models of the kind {kind!r}, and {why}; it has rules for {', '.join(known)}",
        model_type=kind,
        allowed=list(known),
    )
