"""Transitions as spans of OpenTelemetry, by the tracer provider of the process, which the engine has set.

The spans are made when a transition has ended, from the times that the engines and the ranks have measured themselves:

    rl_memory.sleep            the transition, in the process that runs it on all engines; a child of the caller's span
      rl_memory.engine         one engine, from its first step to its last
        rl_memory.drain        a step of the engine as a whole
        rl_memory.rank         one rank, from its first step to its last
          rl_memory.release    a step of the rank

Without a provider no span is made, and OpenTelemetry is not imported.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import rl_memory_plugins
from rl_memory_plugins import trace_context
from rl_memory_plugins.commands import RemoveAdapter, Sleep, Transition, UpdateAdapter, UpdateWeights, WakeUp
from rl_memory_plugins.errors import as_rl_memory_error
from rl_memory_plugins.records import Report, StepTime

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer
    from opentelemetry.util.types import Attributes

logger = logging.getLogger(__name__)

K = TypeVar("K")


def emit(command: Transition, start_ns: int, end_ns: int, outcome: Report | Exception) -> None:
    """Make the spans of a transition that has ended. Never raises.

    Args:
        start_ns, end_ns: When the transition ran, in nanoseconds since 1970.
        outcome: What the caller gets.
    """
    try:
        tracer = _tracer()
        if tracer is not None:
            _emit(tracer, command, start_ns, end_ns, outcome)
    except Exception:
        logger.exception("a transition could not be traced")


def _tracer() -> Tracer | None:
    """`None` if this process traces nothing."""
    trace = trace_context.api()
    if trace is None:
        return None
    provider = trace.get_tracer_provider()
    if isinstance(provider, trace.ProxyTracerProvider):  # nobody has set one
        return None
    return provider.get_tracer("rl_memory_plugins", _version())  # type: ignore[no-any-return]


@functools.cache
def _version() -> str:
    return rl_memory_plugins.__version__


def _emit(tracer: Tracer, command: Transition, start_ns: int, end_ns: int, outcome: Report | Exception) -> None:
    from opentelemetry.trace import SpanKind, Status, StatusCode, get_current_span

    parent = trace_context.parent()
    is_remote = get_current_span(parent).get_span_context().is_remote
    span = tracer.start_span(
        f"rl_memory.{command.name}",
        parent,
        SpanKind.SERVER if is_remote else SpanKind.INTERNAL,
        attributes=_of_command(command),
        start_time=start_ns,
    )
    if not span.is_recording():
        span.end(end_ns)
        return
    if isinstance(outcome, Exception):
        error = as_rl_memory_error(outcome)
        span.set_attribute("error.type", error.code)
        if "failed_ranks" in error.details:
            span.set_attribute("rl_memory.failed_ranks", error.details["failed_ranks"])
        span.record_exception(outcome, timestamp=end_ns)
        span.set_status(Status(StatusCode.ERROR, error.message))
    else:
        span.set_attributes(_of_report(outcome))
        _emit_engines(tracer, span, outcome)
    span.end(end_ns)


def _emit_engines(tracer: Tracer, parent: Span, report: Report) -> None:
    engines = report.details.get("engines", [report.details])
    groups = _grouped(report.steps, lambda step: step.engine)
    for details, (engine, steps) in zip(engines, groups, strict=False):
        received = {rank["rank"]: rank for rank in details.get("ranks", ())}
        whole, end_ns = _begin(tracer, parent, "engine", steps, {"rl_memory.engine": engine})
        for rank, own in _grouped(steps, lambda step: step.rank):
            if rank is None:
                _emit_steps(tracer, whole, [step for step in own if step.step != "total"])
                continue
            attributes = {"rl_memory.rank": rank, **_of_received(received.get(rank, {}))}
            span, rank_end_ns = _begin(tracer, whole, "rank", own, attributes)
            _emit_steps(tracer, span, own)
            span.end(rank_end_ns)
        whole.end(end_ns)


def _emit_steps(tracer: Tracer, parent: Span, steps: Iterable[StepTime]) -> None:
    for step in steps:
        span, end_ns = _begin(tracer, parent, step.step, [step], {"rl_memory.seconds": step.seconds})
        span.end(end_ns)


def _begin(
    tracer: Tracer, parent: Span, name: str, steps: Sequence[StepTime], attributes: Attributes
) -> tuple[Span, int]:
    """A span over these steps, and the time of its end."""
    from opentelemetry.trace import set_span_in_context

    start_ns = min(step.start_ns for step in steps)
    context = set_span_in_context(parent)
    span = tracer.start_span(f"rl_memory.{name}", context, attributes=attributes, start_time=start_ns)
    return span, max(step.end_ns for step in steps)


def _grouped(steps: Iterable[StepTime], key: Callable[[StepTime], K]) -> list[tuple[K, list[StepTime]]]:
    groups: dict[K, list[StepTime]] = {}
    for step in steps:
        groups.setdefault(key(step), []).append(step)
    return list(groups.items())


def _of_command(command: Transition) -> dict[str, Any]:
    attributes: dict[str, Any] = {}
    if isinstance(command, Sleep):
        attributes["rl_memory.level"] = int(command.level)
        attributes["rl_memory.idle"] = command.idle_s is not None
    if isinstance(command, Sleep | WakeUp):
        attributes["rl_memory.tags"] = [tag.value for tag in command.tags]
    if isinstance(command, Sleep | UpdateWeights):
        attributes["rl_memory.mode"] = command.mode.value
    if isinstance(command, UpdateAdapter | RemoveAdapter):
        attributes["rl_memory.adapter"] = command.adapter
    return attributes


def _of_report(report: Report) -> dict[str, Any]:
    engines = report.details.get("engines", [report.details])
    received = [rank for engine in engines for rank in engine.get("ranks", ())]
    moved = sum(change.bytes_released + change.bytes_restored for change in report.changes)
    attributes = {"rl_memory.bytes": moved + sum(rank["bytes"] for rank in received)}
    for name in ("weight_version", "adapter_version"):
        if name in engines[0]:
            attributes[f"rl_memory.{name}"] = engines[0][name]
    return attributes


def _of_received(record: dict[str, Any]) -> dict[str, Any]:
    """Of a rank that has received tensors."""
    return {f"rl_memory.{name}": record[name] for name in ("bytes", "transport") if name in record}
