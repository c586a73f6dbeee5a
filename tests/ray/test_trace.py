"""The trace of a caller reaches the engine in an actor. Needs Ray, and no cluster."""

from __future__ import annotations

import asyncio
import sys
from contextvars import Context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, use_span

from rl_memory_plugins import spans, trace_context
from rl_memory_plugins.ray import handle as handles
from rl_memory_plugins.ray.actor import EngineActor

sys.path[:0] = [str(Path(__file__).parents[1] / "unit")]

from fake_control import FakeControl  # noqa: E402

SPAN = SpanContext(0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331, is_remote=False, trace_flags=TraceFlags(1))


def test_a_call_of_an_actor_belongs_to_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    actor = EngineActor("vllm", {}, None)
    actor._engine = SimpleNamespace(api=FakeControl(), lives=lambda: True)  # type: ignore[assignment]

    def remote(*arguments: Any) -> Any:
        """In a context of its own, as in another process."""
        return Context().run(lambda: asyncio.run(actor.call(*arguments)))

    handle = handles.EngineActorHandle(SimpleNamespace(call=SimpleNamespace(remote=remote)), 0)
    monkeypatch.setattr(handle, "result", lambda answer, timeout_s: answer)
    seen: list[Any] = []
    monkeypatch.setattr(spans, "emit", lambda *_: seen.append(trace_context.outgoing()))
    with use_span(NonRecordingSpan(SPAN)):
        handle.sleep()
    handle.wake_up()
    assert seen == [{"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}, {}]
