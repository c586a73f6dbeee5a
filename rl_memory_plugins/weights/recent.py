"""The last few values of a kind: what updates of the same tensors need not find out again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

KEPT = 4
"""The number of values that are kept: those of several models, or of parts of a model."""

Value = TypeVar("Value")


class Recent(Generic[Value]):
    """Several threads may use it: the worst is that a value is found out twice."""

    def __init__(self) -> None:
        self._values: list[Value] = []  # the one that was used last is the first

    def __len__(self) -> int:
        return len(self._values)

    def find(self, fits: Callable[[Value], bool]) -> Value | None:
        """The value that fits, if one is kept."""
        found = next((value for value in self._values if fits(value)), None)
        if found is not None:
            self._values = [found, *(value for value in self._values if value is not found)]
        return found

    def add(self, value: Value) -> None:
        """Keep a value. It takes the place of the one that was not used for the longest time."""
        self._values = [value, *self._values[: KEPT - 1]]
