"""Transitions as spans: their tree, their times, what they say, and when there are none."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import msgspec
import pytest
from fake_control import FakeControl
from fastapi import FastAPI
from helpers import FakeRank, LocalRanks
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode
from test_controller import Engine

from rl_memory_plugins import commands, operations, spans
from rl_memory_plugins.board import StatusBoard
from rl_memory_plugins.client import EngineClient
from rl_memory_plugins.commands import decode_reply, encode_command
from rl_memory_plugins.controller import Controller
from rl_memory_plugins.engine_api import AsyncioApi
from rl_memory_plugins.errors import DeviceMemoryError, HostMemoryError, StateConflictError
from rl_memory_plugins.memory.threads import on_this_gpu
from rl_memory_plugins.observing import trying_again
from rl_memory_plugins.records import Reply, Report, StepTime
from rl_memory_plugins.server.auth import ControlAuth
from rl_memory_plugins.server.router import build_router
from rl_memory_plugins.trainer.engine_handle import on_all
from rl_memory_plugins.trainer.outcomes import on_each

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Spans(InMemorySpanExporter):
    """The spans that this process has ended."""

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.get_finished_spans() if span.name == f"rl_memory.{name}"]

    def one(self, name: str) -> ReadableSpan:
        [span] = self.named(name)
        return span

    def children(self, parent: ReadableSpan) -> list[ReadableSpan]:
        assert parent.context is not None
        return [one for one in self.get_finished_spans() if one.parent and one.parent.span_id == parent.context.span_id]


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> TracerProvider:
    """The provider of this process, as an engine sets it."""
    provider = TracerProvider()
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    return provider


@pytest.fixture
def found(provider: TracerProvider) -> Spans:
    found = Spans()
    provider.add_span_processor(SimpleSpanProcessor(found))
    return found


class OfControllers(AsyncioApi):
    """Of the controllers of several engines, each with two ranks, in this process."""

    def __init__(self, count: int = 1) -> None:
        super().__init__(drain_timeout_s=60)
        self.ranks = [[FakeRank(0), FakeRank(1)] for _ in range(count)]
        self.boards = [StatusBoard() for _ in self.ranks]
        self.controllers = [
            Controller(LocalRanks([rank.agent for rank in ranks]), Engine(), board, number, update_timeout_s=7.5)
            for number, (ranks, board) in enumerate(zip(self.ranks, self.boards, strict=True))
        ]

    async def _call(self, command: commands.AnyCommand) -> list[Reply[Any]]:
        payload = encode_command(command)
        return [decode_reply(controller.execute(payload).result(timeout=1)) for controller in self.controllers]

    def transition_now(self, command: commands.Transition) -> Report:
        return asyncio.run(self.run(self.transition(command)))  # type: ignore[no-any-return]


Controllers = Callable[..., OfControllers]


@pytest.fixture
def controllers() -> Iterator[Controllers]:
    with ExitStack() as closing:

        def make(count: int = 1) -> OfControllers:
            api = OfControllers(count)
            for board in api.boards:
                closing.callback(board.close)
            return api

        yield make


def tree(found: Spans, span: ReadableSpan) -> dict[str, Any]:
    """The names of the spans below, with the number of an engine or a rank."""

    def label(child: ReadableSpan) -> str:
        attributes = child.attributes or {}
        number = attributes.get("rl_memory.rank", attributes.get("rl_memory.engine", ""))
        return f"{child.name.removeprefix('rl_memory.')}{number}"

    return {label(child): tree(found, child) for child in found.children(span)}


STEPS = {"synchronize": {}, "backup": {}, "release": {}}


def test_a_transition_is_one_trace_down_to_the_steps_of_each_rank(found: Spans, controllers: Controllers) -> None:
    report = controllers().transition_now(operations.sleep(1, ["weights"], "keep"))
    root = found.one("sleep")
    assert root.parent is None and root.kind is SpanKind.INTERNAL
    assert tree(found, root) == {"engine0": {"drain": {}, "rank0": STEPS, "rank1": STEPS}}
    released = sum(change.bytes_released for change in report.changes)
    assert root.attributes == {
        "rl_memory.level": 1,
        "rl_memory.tags": ("weights",),
        "rl_memory.mode": "keep",
        "rl_memory.idle": False,
        "rl_memory.bytes": released,
    }
    assert released > 0 and root.status.status_code is StatusCode.UNSET


def test_the_spans_have_the_times_that_the_ranks_have_measured(found: Spans, controllers: Controllers) -> None:
    report = controllers().transition_now(operations.sleep())
    by_rank = {span.attributes["rl_memory.rank"]: span for span in found.named("rank")}  # type: ignore[index]
    steps = [step for step in report.steps if step.rank is not None]
    assert len(steps) == 6
    for step in steps:
        [span] = [one for one in found.children(by_rank[step.rank]) if one.name == f"rl_memory.{step.step}"]
        assert (span.start_time, span.end_time) == (step.start_ns, step.end_ns)
        assert span.attributes == {"rl_memory.seconds": step.seconds}
    for parent in found.get_finished_spans():
        for child in found.children(parent):
            assert parent.start_time <= child.start_time <= child.end_time <= parent.end_time  # type: ignore[operator]


def test_several_engines_are_one_trace(found: Spans, controllers: Controllers) -> None:
    """Also with the drain that comes before the engines agree."""
    controllers(2).transition_now(operations.sleep(1, None, "wait"))
    [root] = [span for span in found.get_finished_spans() if span.parent is None]
    assert root.name == "rl_memory.sleep"
    whole = {"drain": {}, "rank0": STEPS, "rank1": STEPS}
    assert tree(found, root) == {"engine0": whole, "engine1": whole}
    assert len({span.context.trace_id for span in found.get_finished_spans() if span.context}) == 1


def test_a_wake_is_traced(found: Spans, controllers: Controllers) -> None:
    api = controllers()
    api.transition_now(operations.sleep())
    found.clear()
    api.transition_now(operations.wake_up())
    steps = {"reserve": {}, "map": {}, "restore": {}}
    assert tree(found, found.one("wake_up")) == {"engine0": {"rank0": steps, "rank1": steps}}
    assert found.one("wake_up").attributes["rl_memory.tags"] == ("kv_cache", "weights", "cuda_graph")  # type: ignore[index]


def test_an_update_says_what_each_rank_has_received(found: Spans) -> None:
    received = [{"rank": rank, "bytes": 10 + rank, "transport": way} for rank, way in enumerate(("shm", "tcp"))]
    steps = [StepTime("total", None, 5, 90, 1.0), StepTime("load", 0, 10, 40, 0.5), StepTime("load", 1, 20, 80, 0.5)]
    report = Report([], {}, {"ranks": received, "weight_version": "step-4"}, steps)
    spans.emit(operations.update_weights({"*": "/s"}, "secret"), 1, 100, report)
    assert found.one("update_weights").attributes == {
        "rl_memory.mode": "keep",
        "rl_memory.bytes": 21,
        "rl_memory.weight_version": "step-4",
    }
    assert [dict(span.attributes or {}) for span in found.named("rank")] == [
        {"rl_memory.rank": 0, "rl_memory.bytes": 10, "rl_memory.transport": "shm"},
        {"rl_memory.rank": 1, "rl_memory.bytes": 11, "rl_memory.transport": "tcp"},
    ]
    assert "secret" not in str([span.to_json() for span in found.get_finished_spans()])


def test_an_adapter_is_named(found: Spans) -> None:
    details = {"adapter": "policy", "adapter_version": "3"}
    spans.emit(operations.remove_adapter("policy"), 1, 2, Report([], {}, details))
    attributes = found.one("remove_adapter").attributes
    assert attributes == {
        "rl_memory.adapter": "policy",
        "rl_memory.bytes": 0,
        "rl_memory.adapter_version": "3",
    }


def test_a_failure_is_an_error_of_its_type(found: Spans, controllers: Controllers) -> None:
    api = controllers()
    api.ranks[0][1].device.fail("synchronize", error=HostMemoryError("full"))
    with pytest.raises(HostMemoryError):
        api.transition_now(operations.sleep(1))
    span = found.one("sleep")
    assert span.status.status_code is StatusCode.ERROR and span.status.description
    assert span.attributes is not None and span.attributes["error.type"] == "HostMemoryError"
    assert span.attributes["rl_memory.failed_ranks"] == (1,)
    assert [event.name for event in span.events] == ["exception"]


def test_an_unknown_failure_has_the_type_that_the_caller_sees(found: Spans) -> None:
    control = FakeControl()
    control.failure = OSError("gone")
    with pytest.raises(OSError):
        asyncio.run(control.run(control.transition(operations.sleep())))
    assert found.one("sleep").attributes["error.type"] == "EngineFaultError"  # type: ignore[index]


def test_an_engine_that_turns_out_not_to_be_idle_has_no_span(found: Spans) -> None:
    control = FakeControl()
    control.failure = StateConflictError("it had requests")
    with pytest.raises(StateConflictError):
        asyncio.run(control.run(control.transition(operations.sleep_if_idle(5.0))))
    assert not found.get_finished_spans()


def test_a_wake_that_is_tried_again_has_no_span_for_each_failure(found: Spans) -> None:
    control = FakeControl()
    control.failure = DeviceMemoryError("full")
    with trying_again(), pytest.raises(DeviceMemoryError):
        asyncio.run(control.run(control.transition(operations.wake_up())))
    assert not found.get_finished_spans()


# -- the trace of the caller ------------------------------------------------------------------------------------


def app_of(control: AsyncioApi) -> FastAPI:
    app = FastAPI()
    app.include_router(build_router(lambda: control, ControlAuth()))
    return app


def post(control: AsyncioApi, route: str, headers: dict[str, str]) -> httpx.Response:
    async def call() -> httpx.Response:
        transport = httpx.ASGITransport(app_of(control))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.post(route, headers=headers)

    return asyncio.run(call())


@pytest.mark.parametrize("route", ["/sleep", "/v1/rl_memory/sleep"])
def test_a_request_continues_the_trace_of_its_header(found: Spans, route: str) -> None:
    assert post(FakeControl(), route, {"traceparent": PARENT, "tracestate": "vendor=1"}).status_code == 200
    span = found.one("sleep")
    assert span.kind is SpanKind.SERVER
    assert span.parent is not None and span.context is not None
    assert f"00-{span.context.trace_id:032x}-{span.parent.span_id:016x}-01" == PARENT
    assert span.context.trace_state.get("vendor") == "1"


@pytest.mark.parametrize("header", ["", "nonsense", f"{PARENT}\u00e9", "00-" + "0" * 32 + "-b7ad6b7169203331-01"])
def test_a_header_that_names_no_trace_is_ignored(found: Spans, header: str) -> None:
    headers = {"traceparent": header.encode("latin-1")}
    assert post(FakeControl(), "/sleep", headers).status_code == 200  # type: ignore[arg-type]
    assert found.one("sleep").parent is None


def test_a_span_that_is_current_in_the_server_is_the_parent(found: Spans, provider: TracerProvider) -> None:
    """As with instrumentation of the server: its span continues the header's trace already."""
    app = app_of(FakeControl())

    async def instrumented(scope: Any, receive: Any, send: Any) -> None:
        with provider.get_tracer("server").start_as_current_span("POST /sleep"):
            await app(scope, receive, send)

    async def call() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(instrumented), base_url="http://localhost") as http:
            await http.post("/sleep", headers={"traceparent": PARENT})

    asyncio.run(call())
    [server] = [span for span in found.get_finished_spans() if span.name == "POST /sleep"]
    assert [child.name for child in found.children(server)] == ["rl_memory.sleep"]


class Headers:
    """A server that notes the trace of each request."""

    def __init__(self) -> None:
        self.seen: list[str | None] = []

    def client(self) -> EngineClient:
        def answer(request: httpx.Request) -> httpx.Response:
            self.seen.append(request.headers.get("traceparent"))
            return httpx.Response(200, json={"is_sleeping": False})

        return EngineClient("http://engine", transport=httpx.MockTransport(answer))


@pytest.fixture
def server() -> Headers:
    return Headers()


@pytest.fixture
def trainer_span(provider: TracerProvider) -> Iterator[str]:
    """The `traceparent` of a span that is current."""
    with provider.get_tracer("trainer").start_as_current_span("step") as span:
        context = span.get_span_context()
        yield f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def test_a_client_names_the_current_span(server: Headers, trainer_span: str) -> None:
    server.client().is_sleeping()
    assert server.seen == [trainer_span]


def test_a_client_names_no_span_where_none_is_current(server: Headers) -> None:
    server.client().is_sleeping()
    assert server.seen == [None]


def test_calls_in_other_threads_belong_to_the_trace(server: Headers, trainer_span: str) -> None:
    """Those that a handoff and an update of several engines make."""
    engines = [server.client(), server.client()]
    on_all(engines, lambda engine: engine.wake_up())
    on_each(engines, lambda engine: engine.is_sleeping(), 60)
    on_this_gpu(lambda: engines[0].is_sleeping())()
    assert server.seen == [trainer_span] * 5


def test_an_update_belongs_to_the_trace(server: Headers, trainer_span: str) -> None:
    from rl_memory_plugins.trainer.push import EngineCall

    call = EngineCall(server.client().post_update, {}, lambda error: None)
    assert call.finish(60) is None
    assert server.seen == [trainer_span]


def test_a_relay_passes_the_trace_on_without_opentelemetry(server: Headers) -> None:
    """The server of a relay calls its engines; it need not trace anything itself."""

    class Relaying(FakeControl):
        def status_now(self) -> Any:
            server.client().is_sleeping()
            return super().status_now()

    post(Relaying(), "/sleep", {"traceparent": PARENT})
    assert server.seen and set(server.seen) == {PARENT}


# -- no tracing -------------------------------------------------------------------------------------------------


def test_nothing_is_traced_without_a_provider(monkeypatch: pytest.MonkeyPatch, controllers: Controllers) -> None:
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: trace.ProxyTracerProvider())
    monkeypatch.setattr(spans, "_emit", None)  # fails if it is called
    assert controllers().transition_now(operations.sleep()).changes
    assert spans._tracer() is None


def test_opentelemetry_is_not_imported() -> None:
    code = (
        "import sys\n"
        "from rl_memory_plugins import engine_api, operations, spans, trace_context\n"
        "from rl_memory_plugins.client import EngineClient\n"
        "from rl_memory_plugins.records import Report\n"
        "spans.emit(operations.sleep(), 1, 2, Report([], {}))\n"
        "assert trace_context.outgoing() == {}\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_a_trace_that_is_not_sampled_has_no_spans(monkeypatch: pytest.MonkeyPatch, controllers: Controllers) -> None:
    provider, found = TracerProvider(sampler=ALWAYS_OFF), Spans()
    provider.add_span_processor(SimpleSpanProcessor(found))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    monkeypatch.setattr(spans, "_emit_engines", None)
    controllers().transition_now(operations.sleep())
    assert not found.get_finished_spans()


def test_a_trace_that_cannot_be_made_changes_no_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, found: Spans, controllers: Controllers
) -> None:
    monkeypatch.setattr(spans, "_emit", None)
    report = controllers().transition_now(operations.sleep())
    assert msgspec.to_builtins(report)["changes"]
    assert "could not be traced" in caplog.text
