"""One trace from the trainer to the ranks, as a collector of OpenTelemetry gets it from a real engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from opentelemetry.trace import Tracer

from integration.engines.base import Launch, Server
from integration.otlp import Collector, Span, children
from integration.traced import traced, tracer_to, train_step
from integration.waiting import wait_until
from rl_memory_plugins.errors import ManifestError
from tests.conformance.conftest import Weights

STEPS = {
    "sleep": {"synchronize", "backup", "release"},
    "wake_up": {"reserve", "map", "restore"},
    "update_weights": {"connect", "validate", "wait", "load"},
}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def tracer(collector: Collector) -> Iterator[Tracer]:
    with tracer_to(collector) as tracer:
        yield tracer


@pytest.fixture(scope="module")
def traced_server(
    request: pytest.FixtureRequest, launch: Launch, collector: Collector, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """With two ranks, if the suite does not say how many and there are no GPUs to count."""
    tp = 2 if launch.ranks == 1 and launch.device == "cpu" else launch.tp
    kind = traced(request.config.getoption("--engine"), collector)
    log = tmp_path_factory.mktemp("traced") / "server.log"
    with Server(kind, replace(launch, tp=tp), log) as server:
        yield server


def name_of(span: Span) -> str:
    return span.name.removeprefix("rl_memory.")


def ranks_of(server: Server) -> dict[int, set[int]]:
    """The ranks of each engine."""
    engines = server.control.memory()["engines"]
    return {engine["engine_rank"]: {rank["rank"] for rank in engine["ranks"]} for engine in engines}


def test_a_step_is_one_trace_from_the_trainer_to_the_steps_of_every_rank(
    traced_server: Server, collector: Collector, tracer: Tracer, weights: Weights
) -> None:
    root, spans = train_step(collector, tracer, traced_server, weights.other)
    assert {span.trace for span in collector.spans() if span.name.startswith("rl_memory.")} == {root.trace}

    transitions = children(spans, root)
    assert [name_of(span) for span in transitions] == ["sleep", "wake_up", "update_weights", "wake_up"]
    expected = ranks_of(traced_server)
    for transition in transitions:
        engines = children(spans, transition)
        assert {span.name for span in engines} == {"rl_memory.engine"}
        ranks: dict[int, set[int]] = {}
        for engine in engines:
            below = children(spans, engine)
            own = [span for span in below if span.name == "rl_memory.rank"]
            assert {name_of(span) for span in below} - {"rank", "drain", "finish"} == set()
            ranks[engine.attributes["rl_memory.engine"]] = {span.attributes["rl_memory.rank"] for span in own}
            assert len(own) == len({span.attributes["rl_memory.rank"] for span in own})
            for rank in own:
                assert {name_of(step) for step in children(spans, rank)} == STEPS[name_of(transition)]
        assert ranks == expected

    by_id = {span.id: span for span in spans}
    for span in spans:
        assert span.start_ns <= span.end_ns
        if span is not root:
            parent = by_id[span.parent]
            assert parent.start_ns <= span.start_ns and span.end_ns <= parent.end_ns, (parent, span)

    sleep, wake, update, _ = transitions
    assert sleep.attributes["rl_memory.level"] == 2 and sleep.attributes["rl_memory.bytes"] > 0
    assert wake.attributes["rl_memory.tags"] == ["weights"]
    assert update.attributes["rl_memory.weight_version"] == "step-1"
    received = [span.attributes for span in spans if span.parent in {one.id for one in children(spans, update)}]
    received = [attributes for attributes in received if "rl_memory.rank" in attributes]
    assert sum(one["rl_memory.bytes"] for one in received) == update.attributes["rl_memory.bytes"] > 0
    assert all(one["rl_memory.transport"] for one in received)


def test_a_transition_that_fails_is_an_error_in_the_trace(
    traced_server: Server, collector: Collector, tracer: Tracer
) -> None:
    with tracer.start_as_current_span("wrong update") as span, pytest.raises(ManifestError):
        traced_server.control.update_weights({"no.such.weight": torch.zeros(2)}, partial=True)
    trace = f"{span.get_span_context().trace_id:032x}"

    def found() -> list[Any]:
        return [one for one in collector.spans() if one.trace == trace and one.name == "rl_memory.update_weights"]

    wait_until(lambda: bool(found()), "the span of the update has come")
    [update] = found()
    assert update.failed and update.attributes["error.type"] == "ManifestError"
    assert update.parent == f"{span.get_span_context().span_id:016x}"


def test_a_caller_that_traces_nothing(traced_server: Server, collector: Collector) -> None:
    """Each transition is a trace of its own."""
    known = {span.id for span in collector.spans()}

    def roots() -> list[Span]:
        new = [span for span in collector.spans() if span.id not in known and span.name.startswith("rl_memory.")]
        return [span for span in new if not span.parent]

    traced_server.control.sleep(1, ["kv_cache"])
    traced_server.control.wake_up()
    wait_until(lambda: len(roots()) == 2, "both spans have come")
    assert len({span.trace for span in roots()}) == 2
