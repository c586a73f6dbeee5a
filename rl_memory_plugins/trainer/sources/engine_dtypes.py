"""The dtypes of an engine's memory, as its answers to offers tell them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rl_memory_plugins.weights.casts import direction, is_floating
from rl_memory_plugins.weights.manifest import Mismatch


class EngineDtypes:
    """The dtypes that the engine wants where it refuses the trainer's: each tensor is rounded once, by the trainer.

    An engine takes a tensor of the trainer's dtype if its memory holds every value. Sources that share an instance
    learn from each other's updates.
    """

    def __init__(self) -> None:
        self._wanted: dict[str, torch.dtype] = {}

    def of(self, name: str) -> torch.dtype | None:
        """The dtype that the engine wants for a name of the checkpoint; `None` if it has not refused another."""
        return self._wanted.get(name)

    def learn(self, mismatches: Sequence[Mismatch]) -> bool:
        """Note the dtypes of an answer. Returns whether they differ from those known before."""
        wanted: dict[str, str] = {}
        for one in mismatches:
            if one.kind == "dtype" and is_floating(one.expected):
                known = wanted.setdefault(one.name, one.expected)
                if direction(known, one.expected) == "widening":  # ranks, or engines, differ
                    wanted[one.name] = one.expected
        found = {name: getattr(torch, dtype) for name, dtype in wanted.items()}
        changed = any(self._wanted.get(name) != dtype for name, dtype in found.items())
        self._wanted |= found
        return changed
