"""One step of a trainer with an engine on the CPU, as one trace; prints the trace.

    python -m integration.traced --engine vllm

The engine exports by its own flag, and the trainer by OpenTelemetry's SDK, to a collector in this process.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from integration.engines import ENGINES
from integration.engines.base import EngineKind, Launch, Server
from integration.models import SHAPES, new_model, write_model
from integration.otlp import Collector, Span, picture
from integration.waiting import wait_until
from rl_memory_plugins.trainer import ModelSource, RolloutHandoff

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

FLAGS = {"vllm": [], "sglang": ["--enable-trace"]}
STEP = "train step"


def traced(name: str, collector: Collector) -> EngineKind:
    """An engine that exports its spans to the collector."""

    class Traced(ENGINES[name]):  # type: ignore[misc]
        def command(self, launch: Launch, port: int) -> list[str]:
            return [*super().command(launch, port), *FLAGS[name], "--otlp-traces-endpoint", collector.endpoint]

        def environment(self, launch: Launch) -> dict[str, str]:
            return {
                **super().environment(launch),
                "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
                "OTEL_BSP_SCHEDULE_DELAY": "100",  # milliseconds; the engines' spans come so much later
                "NO_PROXY": "127.0.0.1",
                "no_proxy": "127.0.0.1",
            }

    return Traced()  # type: ignore[no-any-return]


@contextmanager
def tracer_to(collector: Collector) -> Iterator[Tracer]:
    """A trainer's own tracer."""
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1"
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(endpoint=collector.endpoint)))
    try:
        yield provider.get_tracer("trainer")
    finally:
        provider.shutdown()


def train_step(collector: Collector, tracer: Tracer, server: Server, model: Any) -> tuple[Span, list[Span]]:
    """One step of a trainer in a span of its own. Returns that span, and all spans of its trace."""
    handoff = RolloutHandoff(server.control, ModelSource(model))
    before = {span.id for span in collector.spans()}
    with tracer.start_as_current_span(STEP), handoff.training(weight_version="step-1"):
        pass  # here the trainer trains

    def ours() -> list[Span]:
        return [span for span in collector.spans() if span.id not in before]

    def has_ended() -> bool:  # the first span of each transition is exported after its others
        names = [span.name for span in ours()]
        return names.count("rl_memory.wake_up") == 2 and STEP in names

    wait_until(has_ended, "the spans of the last transition have come")
    [root] = [span for span in ours() if span.name == STEP]
    return root, [span for span in ours() if span.trace == root.trace]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=sorted(ENGINES), default="vllm")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--dp", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Collector() as collector, tracer_to(collector) as tracer:
        model = write_model(Path(folder, "model"), SHAPES["small"], seed=1)
        launch = Launch(model, tp=options.tp, dp=options.dp, forked=True)
        with Server(traced(options.engine, collector), launch, Path(folder, "server.log")) as server:
            root, spans = train_step(collector, tracer, server, new_model(model, 2))
        print(*picture(spans, root), sep="\n")


if __name__ == "__main__":
    main()
