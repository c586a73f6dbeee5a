"""The refusals of SGLang's requests; no SGLang is needed."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import HTTPException

from rl_memory_plugins.engines.sglang.client import _checked_here, _refuse
from rl_memory_plugins.errors import EngineAsleepError

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


@pytest.mark.parametrize("now", [REFUSAL, None], ids=["closed", "open again"])
def test_the_offline_engine_raises_it(monkeypatch: pytest.MonkeyPatch, now: EngineAsleepError | None) -> None:
    monkeypatch.setattr("rl_memory_plugins.engines.sglang.client.first_refusal", lambda engines: now)
    api: Any = SimpleNamespace(status_now=list)
    answered = {"output_ids": [5], "meta_info": {"finish_reason": {"type": "length"}}}
    stream = _checked_here(api, iter([answered, *outputs_of(stream=True)]))
    assert next(stream) is answered
    with pytest.raises(EngineAsleepError, match="paused"):
        next(stream)
