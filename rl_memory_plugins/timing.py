"""Measures the steps of reports: their seconds, and their places on the wall clock."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

LONGEST_S = 7 * 24 * 3600.0
"""The longest wait that a caller may set: some system calls count milliseconds in 31 bits."""


class Moment(NamedTuple):
    """The present, on two clocks."""

    wall_ns: int  # since 1970
    steady_s: float  # measures durations: nobody sets this clock

    @classmethod
    def now(cls) -> Moment:
        return cls(time.time_ns(), time.perf_counter())


class Steps(dict[str, float]):
    """The seconds of each step, which remember when the step ran on the wall clock of this host.

    Args:
        names: Steps that have 0.0 seconds until they run.

    Attributes:
        places: Of each step that ran, its first start and its last end, in nanoseconds since 1970.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        super().__init__(dict.fromkeys(names, 0.0))
        self.places: dict[str, tuple[int, int]] = {}

    def add(self, step: str, start: Moment) -> None:
        """A part of the step began at `start`, and has ended now."""
        now = Moment.now()
        self[step] = self.get(step, 0.0) + now.steady_s - start.steady_s
        first, last = self.places.get(step, (start.wall_ns, 0))
        self.places[step] = (first, max(first, last, now.wall_ns))

    def copy(self) -> Steps:
        copied = Steps()
        copied.update(self)
        copied.places = dict(self.places)
        return copied


@contextmanager
def timed(seconds: dict[str, float], step: str) -> Iterator[None]:
    """Add the duration of the body to its step, also if the body raises."""
    start = Moment.now()
    try:
        yield
    finally:
        if isinstance(seconds, Steps):
            seconds.add(step, start)
        else:
            seconds[step] = seconds.get(step, 0.0) + time.perf_counter() - start.steady_s
