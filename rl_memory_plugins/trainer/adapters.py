"""LoRA adapters of PEFT models, under the names and with the configuration that `save_pretrained` writes.

Imports no PEFT.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rl_memory_plugins.errors import InvalidRequestError
from rl_memory_plugins.trainer.sources.model import ModelSource, Tensors, as_source
from rl_memory_plugins.weights.source import TensorSource, without_wrappers


@dataclass(frozen=True)
class Adapter:
    """An adapter on the engines.

    Attributes:
        name: The name by which requests use it.
        config: PEFT's configuration: an object of PEFT, or the content of `adapter_config.json`. Default: that of the
            PEFT model that is sent.
        peft_name: The name of the adapter in the PEFT model.
    """

    name: str
    config: Any = None
    peft_name: str = "default"

    def source(self, tensors: Tensors, kind: type[ModelSource] = ModelSource) -> TensorSource:
        """The tensors to send: of a module those of the adapter alone; a mapping or a source as it is."""
        if not isinstance(tensors, torch.nn.Module):
            return as_source(tensors, kind)
        named = {self.saved_name(name): tensor for name, tensor in tensors.state_dict(keep_vars=True).items()}
        named.pop(None, None)
        return kind(named)

    def saved_name(self, name: str) -> str | None:
        """The name in `adapter_model.safetensors` for a name of a PEFT model; `None` if the file does not hold it."""
        name = without_wrappers(name)
        own = re.escape(self.peft_name)
        saved = re.sub(rf"(lora_(?:A|B|embedding_A|embedding_B|magnitude_vector))\.{own}(?=\.|$)", r"\1", name)
        saved = re.sub(rf"\.modules_to_save\.{own}\.", ".", saved)
        return saved if saved != name else None

    def sent_config(self, tensors: Any) -> dict[str, Any]:
        """The configuration, as JSON holds it.

        Raises:
            InvalidRequestError: there is none, neither here nor in the model.
        """
        config = self.config
        if config is None:
            config = getattr(tensors, "peft_config", {}).get(self.peft_name)
        if config is None:
            raise InvalidRequestError(
                f"the adapter {self.name} has no configuration: send a PEFT model with an adapter named "
                f"{self.peft_name!r}, or give `config`",
                field="config",
            )
        fields = config if isinstance(config, Mapping) else config.to_dict()
        written: dict[str, Any] = json.loads(json.dumps({**fields}, default=_as_json))
        return written


def _as_json(value: Any) -> Any:
    """Sets as lists, as PEFT writes them; and nothing for objects of PEFT that only training needs."""
    return sorted(value) if isinstance(value, (set, frozenset)) else None


def as_adapter(given: Adapter | str | None) -> Adapter | None:
    """
    Raises:
        InvalidRequestError: it is something else, or has no name.
    """
    found = Adapter(given) if isinstance(given, str) else given
    if found is not None and not (isinstance(found, Adapter) and found.name):
        raise InvalidRequestError(
            f"adapter is the name of an adapter or an Adapter, and not {given!r}", field="adapter", got=repr(given)
        )
    return found
