"""A stand-in for slime's `UpdateWeightFromTensor`, as far as the adapter and slime's trainer know it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

SENDERS = "backends.megatron_utils.update_weight.update_weight_from_tensor"
CHUNK = 3  # tensors


class Chunks:
    """slime's iterator: yields lists of tensors. All ranks of a trainer must read all lists.

    Args:
        collective: Called before each list, where slime gathers Megatron's shards.

    Attributes:
        conversions: How often the weights were converted.
    """

    def __init__(self, collective: Callable[[], None]) -> None:
        self._collective = collective
        self.conversions = 0

    def get_hf_weight_chunks(self, tensors: Any) -> Iterator[list[tuple[str, torch.Tensor]]]:
        self.conversions += 1
        items = list(tensors.items())
        for start in range(0, len(items), CHUNK):
            self._collective()
            yield items[start : start + CHUNK]


class Updater:
    """slime's object on one rank, and miles' with `is_lora` and `_mm_tower_named_tensors`.

    Args:
        engine: The handle of this rank's engine, or `None`.
        rank: Of the trainer.
        collective: See `Chunks`.
        others: Other attributes, and arguments of the trainer by their names.

    Attributes:
        tensors: The trainer's weights.
        own: The versions that slime's own sync has sent.
    """

    def __init__(
        self, engine: Any, rank: int = 0, collective: Callable[[], None] = lambda: None, **others: Any
    ) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.own: list[int] = []
        self.weight_version = 0
        self.use_distribute = False
        self.quantization_config: Any = None
        self.chunks = self._hf_weight_iterator = Chunks(collective)
        self._ipc_engine = engine
        self._ipc_gather_src = rank
        given = {"offload_rollout": True, "sglang_pp_size": 1, "rollout_num_gpus_per_engine": 1, "num_gpus_per_node": 8}
        own = {"use_distribute", "quantization_config", "is_lora", "_mm_tower_named_tensors"}
        vars(self).update({name: value for name, value in others.items() if name in own})
        self.args = SimpleNamespace(**given | {name: value for name, value in others.items() if name not in own})

    def weights_getter(self) -> dict[str, torch.Tensor]:
        return self.tensors

    def update_weights(self) -> None:
        """slime's own sync."""
        self.weight_version += 1
        self.own.append(self.weight_version)


def modules(trainer: str = "slime") -> dict[str, Any]:
    """The modules of a trainer with the stand-in, and of Ray, whose handles here answer at once."""
    names = [trainer]
    for part in SENDERS.split("."):
        names.append(f"{names[-1]}.{part}")
    made: dict[str, Any] = {name: ModuleType(name) for name in names}
    made[names[-1]].UpdateWeightFromTensor = type("UpdateWeightFromTensor", (Updater,), dict(vars(Updater)))
    return {**made, "ray": SimpleNamespace(get=lambda answer: answer)}


def enabled(trainer: str = "slime") -> type[Updater]:
    """The trainer's class with the adapter. The modules that `modules` makes must be in `sys.modules`."""
    from rl_memory_plugins.integrations import slime as adapter

    adapter.enable(SimpleNamespace())
    made: type[Updater] = sys.modules[f"{trainer}.{SENDERS}"].UpdateWeightFromTensor
    return made


def handle(url: str, trainer: str = "slime") -> Any:
    """The Ray handle of an engine's actor."""
    method, answer = ("get_url", url) if trainer == "slime" else ("get_topology_info", {"url": url, "gpu_ids": [0]})
    return SimpleNamespace(**{method: SimpleNamespace(remote=lambda: answer)})
