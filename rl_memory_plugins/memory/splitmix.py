"""The finaliser of splitmix64 on int64 tensors. Their arithmetic wraps like that of uint64."""

from __future__ import annotations

from typing import Any

GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB


def finalise(values: Any) -> Any:
    """A bijection of int64 values: flipping one input bit flips about half of the output bits."""
    values = (values ^ shifted(values, 30)) * signed(MIX_1)
    values = (values ^ shifted(values, 27)) * signed(MIX_2)
    return values ^ shifted(values, 31)


def shifted(values: Any, bits: int) -> Any:
    """A logical shift to the right. `>>` would copy the sign bit."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def signed(constant: int) -> int:
    """The int64 with the same bits as a uint64."""
    return constant - (1 << 64) if constant >> 63 else constant
