"""What vLLM's client makes of a request that the engine refused after it was admitted; no vLLM is needed."""

import asyncio
from types import SimpleNamespace

import pytest
from fake_control import rank_status

from rl_memory_plugins.engines.vllm.client import _checked_stream
from rl_memory_plugins.engines.vllm.core import REFUSED
from rl_memory_plugins.errors import EngineAsleepError
from rl_memory_plugins.records import EngineStatus

FACE = SimpleNamespace(status_now=lambda: [EngineStatus([rank_status()])])


def output(*stop_reasons, finished=True):
    return SimpleNamespace(finished=finished, outputs=[SimpleNamespace(stop_reason=one) for one in stop_reasons])


async def answers(*outputs):
    ended = []

    async def stream():
        try:
            for one in outputs:
                yield one
        finally:
            ended.append(True)

    try:
        return [one async for one in _checked_stream(FACE, stream())]
    finally:
        assert ended


@pytest.mark.parametrize(
    "outputs",
    [
        [output(None, 7, REFUSED + "updating")],  # several samples in one answer: those that came last
        [output("stop word"), output(REFUSED + "updating", finished=False), output(None)],  # one by one
    ],
)
def test_a_sample_that_was_refused_refuses_the_request(outputs):
    with pytest.raises(EngineAsleepError) as caught:
        asyncio.run(answers(*outputs))
    assert caught.value.details["reason"] == "updating"


def test_other_answers_pass():
    pooled = SimpleNamespace(finished=True, outputs=SimpleNamespace(data=1))
    passing = [output(None, "stop word", 3), output(finished=False), pooled]
    assert asyncio.run(answers(*passing)) == passing
