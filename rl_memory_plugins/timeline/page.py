"""A history as one HTML file without outside resources: pictures of the devices, and a table of the transitions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from rl_memory_plugins.byte_size import size
from rl_memory_plugins.timeline.history import History, Stretch, stretches_of
from rl_memory_plugins.timeline.perfetto import owners_of
from rl_memory_plugins.timeline.picture import pictures, utc
from rl_memory_plugins.timeline.records import Event, RankMemory

_HEAD = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>rl_memory timeline</title>
<style>
body { font: 14px sans-serif; margin: 1.5em; color: #222; background: white; }
figure { margin: 0 0 2em; overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 0.25em 0.7em; border-bottom: 1px solid #ddd; text-align: left; vertical-align: top; }
.failed { color: #cb181d; }
</style></head><body>
"""
_COLUMNS = ("start (UTC)", "where", "what", "seconds", "steps", "outcome", "version", "device bytes", "host bytes")


def html_page(history: History) -> str:
    """The text of the HTML file."""
    parts = [_HEAD, "<h1>Memory over time</h1>"]
    for name, timeline in history.engines.items():
        if timeline.dropped:
            parts.append(f"<p>{escape(name)}: not all of the first {timeline.dropped} calls are kept.</p>")
    for device, picture in pictures(history).items():
        parts.append(f"<h2>{escape(device)}</h2><figure>{picture}</figure>")
    parts += ["<h2>Transitions</h2>", *_table(_COLUMNS, _rows(history))]
    return "\n".join([*parts, "</body></html>", ""])


def _rows(history: History) -> list[tuple[Sequence[str], bool]]:
    """The cells of each row, and whether it failed; by time."""
    rows: list[tuple[int, Sequence[str], bool]] = []
    for name, timeline in history.engines.items():
        for event in timeline.events:
            cells = (
                utc(event.start_ns),
                name,
                what(event),
                f"{event.duration_ns / 1e9:.3f}",
                steps(event),
                event.outcome if event.error is None else f"{event.error}: {event.message}",
                event.weight_version or "",
                change(device_bytes(event.before), device_bytes(event.after)),
                change(host_bytes(event.before), host_bytes(event.after)),
            )
            rows.append((event.start_ns, cells, event.error is not None))
    for name, handoffs in history.trainers.items():
        for step in (step for handoff in handoffs for step in handoff.steps):
            held = change(step.trainer_bytes_before, step.trainer_bytes_after)
            seconds = f"{step.duration_ns / 1e9:.3f}"
            cells = (utc(step.start_ns), name, step.name, seconds, "", step.error or "completed", "", held, "")
            rows.append((step.start_ns, cells, step.error is not None))
    return [(cells, failed) for _, cells, failed in sorted(rows)]


def _table(columns: Iterable[str], rows: Iterable[tuple[Sequence[str], bool]]) -> Iterator[str]:
    yield f"<table><tr>{''.join(f'<th>{name}</th>' for name in columns)}</tr>"
    for cells, failed in rows:
        start = '<tr class="failed">' if failed else "<tr>"
        yield f"{start}{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
    yield "</table>"


def what(event: Event) -> str:
    """An event in a few words: `sleep 1 of weights, kv_cache`."""
    level = "" if event.level is None else f" {event.level}"
    tags = "" if event.tags is None else f" of {', '.join(event.tags)}"
    received = f", {size(event.received_bytes)} received" if event.received_bytes else ""
    calls = f", {event.count} calls" if event.count > 1 else ""
    return f"{event.operation}{level}{tags}{received}{', idle' if event.idle else ''}{calls}"


def steps(event: Event, at_least_ns: int = 0, between_them: str = ", ") -> str:
    """The steps of an event that took so long: `drain 0.002 to 0.102 s, release 0.090 to 0.400 s` after its start.

    Each goes from the begin of the first rank to the end of the last.
    """
    shown = (step for step in stretches_of(event) if step.duration_ns >= at_least_ns)
    return between_them.join(f"{step.name} {between(step, event)}" for step in shown)


def between(step: Stretch, event: Event) -> str:
    """Begin and end of a step after the start of the event: `0.110 to 0.400 s`."""
    begin_ns = step.start_ns - event.start_ns
    return f"{begin_ns / 1e9:.3f} to {(begin_ns + step.duration_ns) / 1e9:.3f} s"


def device_bytes(memories: Iterable[RankMemory]) -> int:
    """Bytes of all owners on all devices."""
    return sum(sum(owners_of(memory).values()) for memory in memories)


def host_bytes(memories: Iterable[RankMemory]) -> int:
    """Bytes of content in host memory, of all ranks."""
    return sum(sum(memory.host.values()) for memory in memories)


def change(before: int, after: int) -> str:
    return size(after) if before == after else f"{size(before)} → {size(after)}"
