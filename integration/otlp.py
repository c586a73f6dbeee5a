"""A collector of OpenTelemetry spans in this process: what engines and trainers export over OTLP's HTTP."""

from __future__ import annotations

import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp


class Span(NamedTuple):
    name: str
    trace: str
    id: str
    parent: str  # empty for the first span of a trace
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    failed: bool

    @property
    def label(self) -> str:
        """The name, with what tells engines and ranks apart."""
        numbers = [
            str(self.attributes[key]) for key in ("rl_memory.engine", "rl_memory.rank") if key in self.attributes
        ]
        return " ".join([self.name, *numbers])


class Collector:
    """Receives spans while `with` lasts, and keeps them."""

    def __init__(self) -> None:
        collector = self

        class Receiver(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                collector.take(otlp.ExportTraceServiceRequest.FromString(body))
                answer = otlp.ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}/v1/traces"

    def __enter__(self) -> Collector:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def take(self, request: otlp.ExportTraceServiceRequest) -> None:
        with self._lock:
            self._spans += [
                _read(span)
                for resource in request.resource_spans
                for scope in resource.scope_spans
                for span in scope.spans
            ]

    def spans(self) -> list[Span]:
        """Those that have come, by start."""
        with self._lock:
            return sorted(self._spans, key=lambda span: (span.start_ns, -span.end_ns))


def children(spans: list[Span], parent: Span) -> list[Span]:
    return [span for span in spans if span.parent == parent.id]


def picture(spans: list[Span], first: Span) -> list[str]:
    """A trace as lines: of each span its name, and the milliseconds since the first one and to its own end; of a step
    also the sum of its parts."""

    def lines(span: Span, depth: int) -> list[str]:
        since, took = (span.start_ns - first.start_ns) / 1e6, (span.end_ns - span.start_ns) / 1e6
        parts = span.attributes.get("rl_memory.seconds")
        own = f"{'  ' * depth + span.label:36}{since:10.2f}{took:10.2f}" + (
            "" if parts is None else f"{parts * 1e3:10.2f}"
        )
        return [own, *(line for child in children(spans, span) for line in lines(child, depth + 1))]

    return lines(first, 0)


def _read(span: Any) -> Span:
    attributes = {one.key: _value(one.value) for one in span.attributes}
    parent, failed = span.parent_span_id.hex(), span.status.code == span.status.STATUS_CODE_ERROR
    times = (span.start_time_unix_nano, span.end_time_unix_nano)
    return Span(span.name, span.trace_id.hex(), span.span_id.hex(), parent, *times, attributes, failed)


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind)
