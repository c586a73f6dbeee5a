"""The refusals of SGLang's requests; no SGLang is needed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import HTTPException

from rl_memory_plugins.engines.sglang import client
from rl_memory_plugins.engines.sglang.client import _checked_here, _refuse, _reporting_refusals
from rl_memory_plugins.engines.sglang.scheduler import finish_reason_of
from rl_memory_plugins.errors import EngineAsleepError, InvalidRequestError, RLMemoryError

REFUSAL = EngineAsleepError("the engine does not admit requests: paused", reason="paused", retry_after_s=1)


def outputs_of(*, stream: bool) -> list[Any]:
    """What a request to an engine gets that is paused and closed."""

    async def collect() -> list[Any]:
        return [output async for output in _refuse(SimpleNamespace(rid="7", stream=stream), REFUSAL)]

    return asyncio.run(collect())


def test_a_refused_stream_has_one_output_as_the_head_of_its_answer_is_sent() -> None:
    (output,) = outputs_of(stream=True)
    assert output["output_ids"] == []
    assert output["meta_info"]["id"] == "7"
    reason = {"type": "abort", "status_code": 503, "message": REFUSAL.message, "err_type": "EngineAsleepError"}
    assert output["meta_info"]["finish_reason"] == reason
    with pytest.raises(HTTPException, match="paused"):
        outputs_of(stream=False)


def answered(token: int, reason: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"output_ids": [token], "meta_info": {"finish_reason": reason}}


def refused() -> dict[str, Any]:
    """As SGLang passes on a scheduler's refusal, which has come as msgpack."""
    return answered(0, {**finish_reason_of(REFUSAL), "status_code": 503})


#: The outputs of a request, or its error; and whether a scheduler has refused the request.
ENDS: dict[str, tuple[list[Any], bool]] = {
    "stream": ([refused()], True),
    "stream of a batch": ([answered(5), refused()], True),
    "batch": ([[answered(5), refused()]], True),
    "whole": ([HTTPException(503, REFUSAL.message)], True),
    "answer": ([answered(5), answered(6, {"type": "length"})], False),
    "answers": ([[answered(5), answered(6, {"type": "length"})]], False),
    "aborted": ([answered(5, {"type": "abort", "message": "by /abort_request"})], False),
    "embedding": ([{"embedding": [0.5], "meta_info": {}}], False),
    "queue full": ([HTTPException(503, "The request queue is full.")], False),
    "no adapter": ([answered(0, finish_reason_of(InvalidRequestError("removed", field="lora_path")))], False),
}


@pytest.mark.parametrize("paused", [False, True], ids=["", "behind a pause"])
@pytest.mark.parametrize(("outputs", "told"), ENDS.values(), ids=ENDS)
def test_the_gate_gets_the_refusal_of_a_scheduler_before_the_server_gets_the_output(
    monkeypatch: pytest.MonkeyPatch, outputs: list[Any], told: bool, paused: bool
) -> None:
    """The engine has closed since the gate looked, and has opened again since it refused."""
    monkeypatch.setattr(client, "_is_health_check", lambda rid: False)
    events: list[Any] = []
    serve_output = events.append
    monkeypatch.setattr(client, "report_refusal", events.append)

    async def original(*_: Any) -> AsyncIterator[Any]:
        try:
            for output in outputs:
                if isinstance(output, Exception):
                    raise output
                yield output
        finally:
            events.append("closed")

    tokenizer = SimpleNamespace(is_pause=paused, rl_memory=SimpleNamespace(status_now=list))

    async def serve() -> None:
        async for output in _reporting_refusals(original)(tokenizer, SimpleNamespace(rid="7")):
            serve_output(output)

    try:
        asyncio.run(serve())
    except HTTPException as error:
        events.append(error)
    reports = [event for event in events if isinstance(event, RLMemoryError)]
    assert [type(report) for report in reports] == [EngineAsleepError] * told
    if told:
        (report,) = reports
        assert (report.message, report.details["reason"]) == (REFUSAL.message, "paused")
        assert report.details["retry_after_s"] == 1
        assert events.index(report) < events.index(outputs[-1]), "the gate must know it before the answer begins"
    assert [event for event in events if event not in ("closed", *reports)] == outputs


def test_sglang_knows_a_refusal_as_an_error() -> None:
    """It tells an error by the type of the status, which does not outlast msgpack."""
    output = refused()
    client._refusal_in(SimpleNamespace(status_now=list), output)  # type: ignore[arg-type]
    for reason in (output["meta_info"]["finish_reason"], finish_reason_of(REFUSAL)):
        assert isinstance(reason["status_code"], HTTPStatus) and reason["status_code"] == 503


def test_a_caller_that_goes_away_ends_its_request_at_once() -> None:
    ended = []

    async def original(*_: Any) -> AsyncIterator[Any]:
        try:
            while True:
                yield answered(5)
        finally:
            ended.append(True)

    async def leave() -> None:
        tokenizer = SimpleNamespace(is_pause=False, rl_memory=SimpleNamespace(status_now=list))
        outputs = _reporting_refusals(original)(tokenizer, SimpleNamespace(rid="7"))
        await anext(outputs)
        await outputs.aclose()
        assert ended

    asyncio.run(leave())


@pytest.mark.parametrize("now", [REFUSAL, None], ids=["closed", "open again"])
def test_the_offline_engine_raises_it(monkeypatch: pytest.MonkeyPatch, now: EngineAsleepError | None) -> None:
    monkeypatch.setattr("rl_memory_plugins.engines.sglang.client.first_refusal", lambda engines: now)
    api: Any = SimpleNamespace(status_now=list)
    answered = {"output_ids": [5], "meta_info": {"finish_reason": {"type": "length"}}}
    stream = _checked_here(api, iter([answered, *outputs_of(stream=True)]))
    assert next(stream) is answered
    with pytest.raises(EngineAsleepError, match="paused"):
        next(stream)
