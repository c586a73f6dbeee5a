"""Memory over time: samples of what some processes hold, the stages they were taken in, and their curves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import psutil

SAMPLE_EVERY_S = 0.05


class Stage(NamedTuple):
    """A named part of a run; `start` and `end` in the timeline's seconds."""

    name: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass
class Timeline:
    """Samples some processes' memory in the background, and at the start and the end of every stage.

    Args:
        sources: By name, a function that gives the resident bytes now.
    """

    sources: Mapping[str, Callable[[], int]]
    times: list[float] = field(default_factory=list)
    samples: dict[str, list[int]] = field(default_factory=dict)
    stages: list[Stage] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._start = time.monotonic()
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self.samples = {name: [] for name in self.sources}

    def __enter__(self) -> Timeline:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def now(self) -> float:
        """Seconds since this timeline was made."""
        return time.monotonic() - self._start

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self.take()
        start = self.now()
        try:
            yield
        finally:
            self.stages.append(Stage(name, start, self.now()))
            self.take()

    def take(self) -> dict[str, int]:
        """One sample, which is kept: the resident bytes now, by source."""
        with self._lock:
            found = {name: resident_bytes() for name, resident_bytes in self.sources.items()}
            self.times.append(self.now())
            for name, value in found.items():
                self.samples[name].append(value)
            return found

    def peak(self, name: str) -> int:
        """The most bytes that this source ever had."""
        return max(self.samples[name], default=0)

    def peak_together(self) -> int:
        """The most bytes that all sources had at one time."""
        return max(map(sum, zip(*self.samples.values(), strict=True)), default=0)

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_EVERY_S):
            self.take()

    def plot(self, axes: Any, label: str = "resident memory") -> None:
        """Draw onto matplotlib's axes: one line a source, one colour a stage, over the seconds."""
        import matplotlib

        for name, values in self.samples.items():
            axes.plot(self.times[: len(values)], [value / 2**20 for value in values], label=name, linewidth=1.8)
        names = list(dict.fromkeys(stage.name for stage in self.stages))
        colours = matplotlib.colormaps["Pastel1"]
        for name, start, end in self.stages:
            number = names.index(name)
            first = next(stage for stage in self.stages if stage.name == name).start == start
            axes.axvspan(start, end, color=colours(number % 9), alpha=0.6, label=name if first else None, linewidth=0)
        axes.set(xlabel="seconds", ylabel=f"{label}, MiB", ylim=(0, None))
        axes.margins(x=0)
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)


def resident_bytes(processes: Iterable[psutil.Process]) -> int:
    """Memory of those of them that still run: what each has of its own, and once what they share, such as libraries."""
    found = []
    for process in processes:
        try:
            found.append(process.memory_info())
        except psutil.NoSuchProcess:
            continue
    return sum(info.rss - info.shared for info in found) + max((info.shared for info in found), default=0)
