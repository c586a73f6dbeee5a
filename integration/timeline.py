"""Memory over time: samples of processes' RSS, the stages they were taken in, and their picture."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SAMPLE_EVERY_S = 0.05


@dataclass
class Timeline:
    """Samples some processes' memory in the background.

    Args:
        sources: By name, a function that gives the resident bytes now.
    """

    sources: Mapping[str, Callable[[], int]]
    times: list[float] = field(default_factory=list)
    samples: dict[str, list[int]] = field(default_factory=dict)
    stages: list[tuple[str, float, float]] = field(default_factory=list)  # name, start, end

    def __post_init__(self) -> None:
        self._start = time.monotonic()
        self._stop = threading.Event()
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
        start = self.now()
        try:
            yield
        finally:
            self.stages.append((name, start, self.now()))

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_EVERY_S):
            self.times.append(self.now())
            for name, resident_bytes in self.sources.items():
                self.samples[name].append(resident_bytes())

    def draw(self, path: Path, title: str) -> None:
        """Write a PNG: one line a process, one colour a stage."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot as plt

        figure, axes = plt.subplots(figsize=(13, 5), constrained_layout=True)
        self.plot(axes)
        axes.set(title=title)
        figure.savefig(path, dpi=120)
        plt.close(figure)

    def plot(self, axes: Any, label: str = "resident memory") -> None:
        """Draw onto matplotlib's axes."""
        import matplotlib

        for name, values in self.samples.items():
            axes.plot(self.times[: len(values)], [value / 2**20 for value in values], label=name, linewidth=1.8)
        names = list(dict.fromkeys(name for name, _, _ in self.stages))
        colours = matplotlib.colormaps["Pastel1"]
        for name, start, end in self.stages:
            number = names.index(name)
            first = next(stage for stage in self.stages if stage[0] == name)[1] == start
            axes.axvspan(start, end, color=colours(number % 9), alpha=0.6, label=name if first else None, linewidth=0)
        axes.set(xlabel="seconds", ylabel=f"{label}, MiB", ylim=(0, None))
        axes.margins(x=0)
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)
