"""Memory of processes over time: samples, the stages of a run, and the curves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import psutil

SAMPLE_EVERY_S = 0.05


class Stage(NamedTuple):
    """A named part of a run; `start` and `end` are seconds since the timeline was made."""

    name: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Timeline:
    """Samples the memory of processes in the background, and at the start and the end of every stage.

    Args:
        sources: By name, a function that returns the resident bytes now.
    """

    def __init__(self, sources: Mapping[str, Callable[[], int]]) -> None:
        self.sources = sources
        self.times: list[float] = []
        self.samples: dict[str, list[int]] = {name: [] for name in sources}
        self.stages: list[Stage] = []
        self._start = time.monotonic()
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._sample, daemon=True)

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
        """Take and keep one sample: the resident bytes now, by source."""
        with self._lock:
            found = {name: resident_bytes() for name, resident_bytes in self.sources.items()}
            self.times.append(self.now())
            for name, value in found.items():
                self.samples[name].append(value)
            return found

    def peak(self, name: str) -> int:
        """The largest sample of this source, in bytes."""
        return max(self.samples[name], default=0)

    def peak_together(self) -> int:
        """The largest sum of all sources at one time, in bytes."""
        return max(map(sum, zip(*self.samples.values(), strict=True)), default=0)

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_EVERY_S):
            self.take()

    def plot(self, axes: Any, label: str = "resident memory") -> None:
        """Draw on matplotlib's axes, over the seconds: a line for each source, a colour for each stage."""
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
    """Memory of the processes that still run: the own memory of each, and once what they share, such as libraries."""
    found = []
    for process in processes:
        try:
            found.append(process.memory_info())
        except psutil.NoSuchProcess:
            continue
    return sum(info.rss - info.shared for info in found) + max((info.shared for info in found), default=0)
