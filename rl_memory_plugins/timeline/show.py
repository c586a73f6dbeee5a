"""A history in the terminal: the present memory, and the latest transitions."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from rl_memory_plugins.byte_size import size
from rl_memory_plugins.timeline.history import History
from rl_memory_plugins.timeline.page import change, device_bytes, host_bytes, steps, what
from rl_memory_plugins.timeline.perfetto import owners_of
from rl_memory_plugins.timeline.picture import utc
from rl_memory_plugins.timeline.records import Present, RankMemory

BAR = 30  # characters
LATEST = 20  # events
SHOWN_NS = 500_000  # shorter steps are left out


def shown(history: History, missing: Mapping[str, str] | None = None) -> RenderableType:
    """What the terminal shows.

    Args:
        missing: The servers that do not answer now, and why. Their former answers are shown.
    """
    parts: list[RenderableType] = []
    for name, timeline in history.engines.items():
        if timeline.present is None:
            parts.append(Text(f"{name}: the server is still starting"))
            continue
        parts += [Text(f"{name}: {_state(timeline.present)}"), _memory(timeline.present.memory)]
    parts += [Text(f"{name} does not answer: {why}", style="red") for name, why in (missing or {}).items()]
    return Group(*parts, _transitions(history))


def _state(present: Present) -> str:
    state = "admits requests" if present.admitting else f"admits no requests ({present.reason})"
    busy = "".join(f"; engine {one.engine}: {one.operation} is under way" for one in present.under_way)
    return f"{state}; weights {present.content.value}, version {present.weight_version}{busy}"


def _memory(memories: list[RankMemory]) -> Table:
    table = Table("engine", "rank", "on the device", "", "in host memory")
    largest = max((device_bytes([memory]) for memory in memories), default=0)
    for memory in memories:
        held = device_bytes([memory])
        owners = ", ".join(f"{owner} {size(nbytes)}" for owner, nbytes in owners_of(memory).items() if nbytes)
        bar = "█" * round(BAR * held / largest) if largest else ""
        table.add_row(str(memory.engine), str(memory.rank), owners or "nothing", bar, size(host_bytes([memory])))
    return table


def _transitions(history: History) -> Table:
    several = len(history.engines) > 1
    where = ["where"] if several else []
    steps_column = Column("steps", no_wrap=True)  # each on a line of its own
    table = Table("start (UTC)", *where, "what", "seconds", steps_column, "on the devices", "outcome")
    events = [(event, name) for name, timeline in history.engines.items() for event in timeline.events]
    events.sort(key=lambda pair: pair[0].start_ns)
    for event, name in events[-LATEST:]:
        table.add_row(
            utc(event.start_ns)[11:],
            *([Text(name)] if several else []),  # Rich would read [...] of a string as markup
            Text(what(event)),
            f"{event.duration_ns / 1e9:.3f}",
            steps(event, SHOWN_NS, "\n"),
            change(device_bytes(event.before), device_bytes(event.after)),
            event.error or event.outcome,
            style="red" if event.error else None,
        )
    return table
