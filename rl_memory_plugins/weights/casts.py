"""Which casts a rank makes while it loads an update, and the report of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rl_memory_plugins.weights.manifest import TensorSpec

#: By floating dtype: the dtypes that hold each of its values exactly. Eight-bit dtypes are left out: their values mean
#: nothing without a scale.
_EXACT_IN = {
    "bfloat16": frozenset({"float32", "float64"}),
    "float16": frozenset({"float32", "float64"}),
    "float32": frozenset({"float64"}),
    "float64": frozenset[str](),
}
#: The most names that the report of one kind of cast lists.
LISTED = 20


def is_floating(dtype: str) -> bool:
    """Whether a dtype holds plain floating-point values, of 16 bits or more."""
    return dtype in _EXACT_IN


def direction(sent: str, held: str) -> str:
    """`widening` if the cast keeps every value, else `narrowing`."""
    return "widening" if held in _EXACT_IN.get(sent, ()) else "narrowing"


@dataclass(frozen=True)
class CastRule:
    """Which casts an update may need.

    Attributes:
        strict: No cast at all.
        any: Every cast that the engine's loader makes.
        checkpoint: Gives the tensors of the engine's own checkpoint. The engine has made their casts itself.
    """

    strict: bool = False
    any: bool = False
    checkpoint: Callable[[], Mapping[str, TensorSpec]] = dict

    def allows(self, spec: TensorSpec, held: str) -> bool:
        """Whether a tensor may be cast to the dtype `held` of the engine's memory."""
        if self.strict:
            return False
        if self.any or direction(spec.dtype, held) == "widening":
            return True
        if spec.chosen and is_floating(spec.dtype) and is_floating(held):
            return True
        own = self.checkpoint().get(spec.name)
        return own is not None and own.dtype == spec.dtype


def summary(casts: Mapping[str, tuple[str, str]]) -> list[dict[str, Any]]:
    """The casts of an update, one record for each pair of dtypes.

    Args:
        casts: By name, the dtype that the trainer sends and the dtype of the engine's memory.
    """
    names: dict[tuple[str, str], list[str]] = {}
    for name, pair in casts.items():
        names.setdefault(pair, []).append(name)
    return [
        {
            "from": sent,
            "to": held,
            "direction": direction(sent, held),
            "tensors": len(found),
            "names": found[:LISTED],
        }
        for (sent, held), found in sorted(names.items())
    ]
