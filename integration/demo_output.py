"""The demo's output: a line at the end of each step, and on a terminal the current memory of both processes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.live import Live
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import Console

GB = 1e9
BAR_GB = 0.25  # the width of one character
STYLES = {"engine": "blue", "trainer": "dark_orange"}


class Output:
    """Lines for a log or a terminal.

    Args:
        console: The destination. If it is no terminal, it gets only the lines.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._step = ""
        self._since = time.monotonic()
        self._memory: Mapping[str, list[int]] = {}
        self._live = Live(console=console, get_renderable=self._now, refresh_per_second=4, transient=True)

    def __enter__(self) -> Output:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def watch(self, memory: Mapping[str, list[int]]) -> None:
        """Show the latest of these samples (bytes, by process) under the lines."""
        self._memory = memory

    def say(self, text: str) -> None:
        """Write one line at once, without wrapping."""
        self._console.print(Text(text), soft_wrap=True)
        self._console.file.flush()

    def begin(self, step: str) -> None:
        self._step, self._since = step, time.monotonic()

    def end(self, seconds: float, memory: Mapping[str, int], note: str) -> None:
        """Write the line of the step that `begin` named."""
        held = "  ".join(f"{name} {gigabytes(value):>7}" for name, value in memory.items())
        self.say(f"{self._step:28} {seconds:6.2f} s   {held}   {note}".rstrip())
        self._step = ""

    def table(self, title: str, rows: Mapping[str, str]) -> None:
        """A table of two columns."""
        self.say(f"\n{title}")
        width = max(map(len, rows))
        for name, value in rows.items():
            self.say(f"  {name:{width}}   {value}")

    def _now(self) -> Table:
        table = Table.grid(padding=(0, 1))
        waited = f"{self._step} … {time.monotonic() - self._since:.0f} s" if self._step else ""
        table.add_row(Text(waited, style="bold"))
        for name, samples in self._memory.items():
            held = samples[-1] if samples else 0
            bar = Text("█" * round(held / GB / BAR_GB), style=STYLES[name])
            table.add_row(Text(f"{name:8}{gigabytes(held):>8} ").append_text(bar))
        return table


def gigabytes(count: float) -> str:
    return f"{count / GB:.2f} GB"
