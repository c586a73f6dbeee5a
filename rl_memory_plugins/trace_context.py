"""The trace to which a call belongs: the caller's current span of OpenTelemetry, as headers of W3C trace context.

OpenTelemetry is used only where the process has imported it: elsewhere no span can be current. A process without it
still passes on the headers that it has received.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.context import Context

#: Of other values nothing is kept: the headers go on to other servers.
_VALID = {
    "traceparent": re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-[ -~]{0,100})?"),
    "tracestate": re.compile(r"[ -~]{1,8192}"),
}

_received: ContextVar[Mapping[str, str]] = ContextVar("rl_memory_trace", default=MappingProxyType({}))


def api() -> ModuleType | None:
    """The module `opentelemetry.trace`; `None` if this process has not imported it."""
    if "opentelemetry.trace" not in sys.modules:
        return None
    try:
        from opentelemetry import trace  # waits for a thread that is importing it
    except ImportError:
        return None
    return trace


@contextmanager
def continued(headers: Mapping[str, str]) -> Iterator[None]:
    """The body is part of the trace that the headers of a request name, if they name one."""
    found = {name: headers.get(name, "") for name in _VALID}
    valid = {name: value for name, value in found.items() if _VALID[name].fullmatch(value)}
    token = _received.set(valid if "traceparent" in valid else {})
    try:
        yield
    finally:
        _received.reset(token)


def outgoing() -> dict[str, str]:
    """The headers that make a request part of the caller's trace; empty outside of a trace."""
    if not _has_span():
        return dict(_received.get())
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    headers: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(headers)
    return headers


def parent() -> Context:
    """The context whose span is the parent of new ones: the current span, else that of a received header.

    OpenTelemetry must be imported.
    """
    from opentelemetry.context import get_current
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return get_current() if _has_span() else TraceContextTextMapPropagator().extract(_received.get())


def _has_span() -> bool:
    trace = api()
    return trace is not None and trace.get_current_span().get_span_context().is_valid
