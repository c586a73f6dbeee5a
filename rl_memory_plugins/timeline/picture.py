"""Bytes by owner over time, and the transitions below, as an SVG picture for each device."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from html import escape

from rl_memory_plugins.byte_size import size
from rl_memory_plugins.timeline.history import History, Stretch, lanes_of, points_of, stretches_of
from rl_memory_plugins.timeline.perfetto import owners_of
from rl_memory_plugins.timeline.records import Event

HEIGHT = 260
ROW = 20
THIN = 6  # of the bars of steps
LEFT, RIGHT, TOP = 90, 20, 24
WIDTH, WIDEST = 1100, 16000
PER_EVENT = 60  # of the width
LEGEND = 18

#: By owner: blues are the engine's, orange the trainer's, greys what is left.
COLOURS = {"weights": "#2171b5", "kv_cache": "#9ecae1", "cuda_graph": "#08306b", "trainer": "#f16913"}
GREYS = ("#969696", "#bdbdbd", "#737373", "#d9d9d9", "#525252")
#: By operation or step.
ROWS = {"sleep": "#807dba", "wake_up": "#41ab5d", "wake_weights": "#41ab5d", "wake_kv_cache": "#41ab5d"}
UPDATE, FAILED = "#fd8d3c", "#cb181d"
#: By step of a transition: greys wait, blues prepare, greens and purples move bytes.
STEPS = {
    "drain": "#969696",
    "wait": "#bdbdbd",
    "synchronize": "#737373",
    "receive": "#525252",
    "connect": "#9ecae1",
    "validate": "#4292c6",
    "reserve": "#9ecae1",
    "map": "#4292c6",
    "backup": "#6a51a3",
    "release": "#bcbddc",
    "restore": "#006d2c",
    "load": "#006d2c",
    "add": "#74c476",
    "finish": "#74c476",
}


@dataclass
class Curve:
    """Bytes of one owner: from each moment to the next the former value holds."""

    name: str
    colour: str
    points: list[tuple[int, int]] = field(default_factory=list)  # (nanoseconds since 1970, bytes), by time

    def at(self, time_ns: int) -> int:
        """The bytes right after this moment; 0 before the first point."""
        place = bisect_right(self.points, time_ns, key=lambda point: point[0])
        return self.points[place - 1][1] if place else 0


@dataclass(frozen=True)
class Span:
    """A transition of an engine, or a step of one or of a handoff."""

    name: str
    start_ns: int
    duration_ns: int
    colour: str
    about: str
    parts: tuple[Span, ...] = ()  # the steps of a transition


def curves_of(history: History) -> dict[str, list[Curve]]:
    """The curves of all devices by the name of the device. Engines and trainers on one GPU share a picture."""
    devices: dict[str, list[Curve]] = {}
    for name, timeline in history.engines.items():
        for (engine, rank), points in points_of(timeline).items():
            place = f"{name}, engine {engine} rank {rank}"
            owners = list({owner: 0 for point in points for owner in owners_of(point.memory)})
            greys = iter(GREYS * len(owners))
            for owner in owners:
                colour = COLOURS.get(owner) or next(greys)
                values = [(point.at_ns, owners_of(point.memory).get(owner, 0)) for point in points]
                device = _memory(points[0].memory.device)
                devices.setdefault(device, []).append(Curve(f"{owner} ({place})", colour, values))
    for name, handoffs in history.trainers.items():
        by_device: dict[str, list[tuple[int, int]]] = {}
        for handoff in handoffs:
            for step in handoff.steps:
                values = by_device.setdefault(handoff.device, [])
                values.append((step.start_ns, step.trainer_bytes_before))
                values.append((step.start_ns + step.duration_ns, step.trainer_bytes_after))
        for device, values in by_device.items():
            devices.setdefault(_memory(device), []).append(
                Curve(f"trainer ({name})", COLOURS["trainer"], sorted(values))
            )
    return devices


def _memory(device: str) -> str:
    return "cpu" if device.startswith("cpu:") else device  # the ranks of a CPU share one memory


def rows_of(history: History) -> dict[str, list[Span]]:
    """The rows below the curves: the transitions of each engine server, and the steps of each trainer process."""
    rows: dict[str, list[Span]] = {}
    for name, timeline in history.engines.items():
        for number, lane in enumerate(lanes_of(timeline.events)):
            rows[name if not number else f"{name}, at the same time ({number})"] = [*map(_transition, lane)]
    for name, handoffs in history.trainers.items():
        rows[name] = [
            Span(
                step.name,
                step.start_ns,
                step.duration_ns,
                FAILED if step.error else ROWS.get(step.name, COLOURS["trainer"] if "load" in step.name else UPDATE),
                f"{step.name}: {step.duration_ns / 1e9:.3f} s{', ' + step.error if step.error else ''}",
            )
            for handoff in handoffs
            for step in handoff.steps
        ]
    return rows


def _transition(event: Event) -> Span:
    label = event.operation if event.level is None else f"{event.operation} {event.level}"
    label = f"{label}, {event.count} calls" if event.count > 1 else label
    stretches = stretches_of(event)
    ends = event.error or ", ".join(f"{step.name} {step.duration_ns / 1e9:.3f} s" for step in stretches)
    about = f"{label}: {event.duration_ns / 1e9:.3f} s{', ' + ends if ends else ''}"
    colour = FAILED if event.error else ROWS.get(event.operation, UPDATE)
    parts = tuple(_step(step, event) for step in stretches)
    return Span(label, event.start_ns, event.duration_ns, colour, about, parts)


def _step(step: Stretch, event: Event) -> Span:
    begin, end = ((at_ns - event.start_ns) / 1e9 for at_ns in (step.start_ns, step.start_ns + step.duration_ns))
    rank = step.longest.rank
    several = len({(one.engine, one.rank) for one in event.steps if one.name == step.name}) > 1
    slowest = f", longest in engine {step.longest.engine} rank {rank}" if several and rank is not None else ""
    about = f"{step.name} of {event.operation}: {begin:.3f} s to {end:.3f} s{slowest}"
    return Span(step.name, step.start_ns, step.duration_ns, STEPS.get(step.name, "#737373"), about)


def pictures(history: History) -> dict[str, str]:
    """An SVG picture for each device, by the name of the device."""
    times = history.times()
    if not times:
        return {}
    rows = rows_of(history)
    width = min(max(WIDTH, PER_EVENT * max(map(len, rows.values()), default=0)), WIDEST)
    axis = _Axis(times[0], max(times[-1], times[0] + 1), width)
    total = {
        _memory(memory.device): memory.device_total_bytes
        for timeline in history.engines.values()
        for memory in (timeline.present.memory if timeline.present else [])
    }
    return {
        device: "\n".join(_picture(curves, rows, axis, total.get(device, 0)))
        for device, curves in curves_of(history).items()
    }


@dataclass(frozen=True)
class _Axis:
    start_ns: int
    end_ns: int
    width: int

    def x(self, at_ns: int) -> float:
        share = (at_ns - self.start_ns) / (self.end_ns - self.start_ns)
        return LEFT + share * (self.width - LEFT - RIGHT)


def _picture(curves: Sequence[Curve], rows: dict[str, list[Span]], axis: _Axis, total: int) -> Iterator[str]:
    moments = sorted({axis.start_ns, axis.end_ns, *(at_ns for curve in curves for at_ns, _ in curve.points)})
    stacks = _stacked(curves, moments)
    peak = max((above for _, above in stacks[-1]), default=0) if stacks else 0
    top = max(total if total < 20 * peak else peak, 1) * 1.05  # a host's memory would press all curves flat
    lanes = {name: max((len(lanes_of(span.parts)) for span in spans), default=0) for name, spans in rows.items()}
    heights = [2 * ROW + THIN * lanes[name] for name in rows]
    legend_y = TOP + HEIGHT + 30 + sum(heights)
    height = legend_y + LEGEND * len(curves) + 10
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {axis.width} {height}" width="{axis.width}" '
        f'height="{height}" font-family="sans-serif" font-size="12" role="img">'
    )
    yield f'<rect width="{axis.width}" height="{height}" fill="white"/>'

    def y(held: float) -> float:
        return TOP + HEIGHT * (1 - held / top)

    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        at = y(top / 1.05 * share)
        yield f'<path d="M{LEFT} {at:.1f}H{axis.width - RIGHT}" stroke="#ddd"/>'
        yield f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{size(top / 1.05 * share)}</text>'
    for curve, stack in zip(curves, stacks, strict=True):
        if any(below != above for below, above in stack):
            area = _area(stack, moments, axis, y)
            yield f'<path d="{area}" fill="{curve.colour}"><title>{_text(curve.name)}</title></path>'
    if peak and total < 20 * peak:
        yield f'<path d="M{LEFT} {y(total):.1f}H{axis.width - RIGHT}" stroke="black" stroke-dasharray="6 4"/>'
    yield from _time_labels(axis)
    row_y = TOP + HEIGHT + 30
    for (name, spans), row_height in zip(rows.items(), heights, strict=True):
        yield f'<text x="{LEFT}" y="{row_y + 12}">{_text(name)}</text>'
        for span in spans:
            yield _bar(span, axis, row_y + ROW - 3)
            for place, lane in enumerate(lanes_of(span.parts)):
                for part in lane:
                    yield _thin(part, axis, row_y + 2 * ROW - 6 + THIN * place)
        row_y += row_height
    for number, curve in enumerate(curves):
        at = legend_y + LEGEND * number
        yield f'<rect x="{LEFT}" y="{at}" width="12" height="12" fill="{curve.colour}"/>'
        yield f'<text x="{LEFT + 18}" y="{at + 11}">{_text(curve.name)}</text>'
    yield "</svg>"


def _stacked(curves: Sequence[Curve], moments: Sequence[int]) -> list[list[tuple[int, int]]]:
    """For each curve the lower and the upper edge after each moment, in bytes; each curve lies on the former."""
    edges = [0] * len(moments)
    stacks = []
    for curve in curves:
        above = [edge + curve.at(at_ns) for edge, at_ns in zip(edges, moments, strict=True)]
        stacks.append(list(zip(edges, above, strict=True)))
        edges = above
    return stacks


def _area(stack: Sequence[tuple[int, int]], moments: Sequence[int], axis: _Axis, y: Callable[[float], float]) -> str:
    """The outline of a stacked curve with steps at the moments."""
    upper, lower = [], []
    for place, (below, above) in enumerate(stack):
        end = moments[min(place + 1, len(moments) - 1)]
        for at_ns in (moments[place], end):
            upper.append(f"{axis.x(at_ns):.2f} {y(above):.2f}")
            lower.append(f"{axis.x(at_ns):.2f} {y(below):.2f}")
    return "M" + "L".join([*upper, *reversed(lower)]) + "Z"


def _time_labels(axis: _Axis) -> Iterator[str]:
    marks = max((axis.width - LEFT - RIGHT) // 160, 1)
    for mark in range(marks + 1):
        at_ns = axis.start_ns + (axis.end_ns - axis.start_ns) * mark // marks
        anchor = "end" if mark == marks else "start" if mark == 0 else "middle"
        yield (
            f'<text x="{axis.x(at_ns):.1f}" y="{TOP + HEIGHT + 16}" text-anchor="{anchor}" fill="#555">'
            f"{utc(at_ns)[11:]}</text>"
        )


def _bar(span: Span, axis: _Axis, y: float) -> str:
    x = axis.x(span.start_ns)
    width = max(axis.x(span.start_ns + span.duration_ns) - x, 1.0)
    label = f'<text x="{x + 3:.2f}" y="{y + 12:.1f}" fill="white" font-size="11">{_text(span.name)}</text>'
    return (
        f'<g><title>{_text(span.about)}</title><rect x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{ROW - 4}" '
        f'fill="{span.colour}"/>{label if width > 7 * len(span.name) + 6 else ""}</g>'
    )


def _thin(span: Span, axis: _Axis, y: float) -> str:
    x = axis.x(span.start_ns)
    width = max(axis.x(span.start_ns + span.duration_ns) - x, 0.3)
    return (
        f'<rect x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{THIN - 1}" fill="{span.colour}">'
        f"<title>{_text(span.about)}</title></rect>"
    )


def utc(at_ns: int) -> str:
    """A moment for a person, with milliseconds: `2026-11-27 02:00:00.123`."""
    return datetime.fromtimestamp(at_ns / 1e9, timezone.utc).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]


def _text(value: str) -> str:
    return escape(value, quote=True)
