"""What vLLM's client makes of a request that the engine refused after it was admitted; no vLLM is needed."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from types import SimpleNamespace

import pytest
from fake_control import rank_status

from rl_memory_plugins.commands import Checksums, Hello, encode_reply
from rl_memory_plugins.engines.vllm import client
from rl_memory_plugins.engines.vllm.client import SyncApi, _checked_stream, _ending_when_aborted
from rl_memory_plugins.engines.vllm.core import REFUSED
from rl_memory_plugins.errors import EngineAsleepError
from rl_memory_plugins.records import EngineStatus, Reply
from rl_memory_plugins.tags import TagState

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


# -- requests with images: the client's half of the cache -------------------------------------------------------

ASLEEP = EngineStatus([rank_status(weights=TagState.PRESERVED)])


def engine_of(api, model_is_multimodal):
    resets = []
    config = SimpleNamespace(model_config=SimpleNamespace(is_multimodal_model=model_is_multimodal))
    return SimpleNamespace(rl_memory=api, vllm_config=config, reset_mm_cache=lambda: resets.append(True), resets=resets)


@pytest.mark.parametrize("with_images", [True, False])
def test_a_refused_llm_forgets_images_that_the_core_never_got(with_images):
    api = SimpleNamespace(status=lambda: None, run=lambda operation: [ASLEEP])
    engine = engine_of(api, with_images)
    add = client._gated_add(lambda *args: pytest.fail("it was added"))
    with pytest.raises(EngineAsleepError):
        add(engine, "request")
    assert bool(engine.resets) is with_images


def test_a_request_that_may_hold_images_is_refused_by_the_core():
    """It has got them then, as this side's half of the cache says."""
    api = SimpleNamespace(status_now=lambda: [ASLEEP])

    async def ask(core_refuses, *outputs):
        async def stream():
            for one in outputs:
                yield one

        return [one async for one in _checked_stream(api, stream(), core_refuses=core_refuses)]

    with pytest.raises(EngineAsleepError) as caught:
        asyncio.run(ask(True, output(REFUSED + "asleep")))
    assert caught.value.message == "the engine closed before the request had an answer"  # it came from there
    with pytest.raises(EngineAsleepError, match="asleep"):
        asyncio.run(ask(False))


# -- requests that stream their input --------------------------------------------------------------------------


def test_a_session_that_the_engine_has_ended_is_over():
    """For vLLM it goes on, and what comes next would be computed without what came before."""

    def piece(finish_reason):
        return SimpleNamespace(finished=False, outputs=[SimpleNamespace(finish_reason=finish_reason)])

    pieces = [piece(None), piece("length"), piece("abort"), piece(None)]

    async def stream():
        for one in pieces:
            yield one

    async def ask():
        return [one async for one in _ending_when_aborted(stream())]

    assert asyncio.run(ask()) == pieces[:3]
    assert [one.finished for one in pieces] == [False, False, True, False]


def test_threads_take_turns_at_a_core_in_their_process():
    """Such a core obeys in the thread of its caller, and two transitions at once would mix up the weights."""
    inside, most = [], []

    def obey(payload):
        inside.append(payload)
        most.append(len(inside))
        time.sleep(0.01)
        inside.pop()
        return encode_reply(Reply(rank=0, result={}))

    class Engine:
        engine_core = SimpleNamespace(engine_core=SimpleNamespace(rl_memory_call=obey))

    engine = Engine()
    api = SyncApi(engine, None)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: api._call(Hello()), range(8)))
    assert most == [1] * 8


@pytest.mark.parametrize("busy", ["", "sleep"])
def test_a_thread_notices_loads_while_another_reads(monkeypatch, busy):
    """A read does not look for loads at its end, as an operation does. An operation may wait for this thread."""
    begun, go_on, looked = threading.Event(), threading.Event(), []

    def obey(payload):
        begun.set()
        assert go_on.wait(60)
        return encode_reply(Reply(rank=0, result={}))

    class Engine:
        status = SimpleNamespace(busy=busy)
        engine_core = SimpleNamespace(
            engine_core=SimpleNamespace(rl_memory_call=obey, rl_memory=SimpleNamespace(status=status))
        )

    monkeypatch.setattr(client, "notice_loads", lambda core, version: looked.append(go_on.is_set()))
    engine = Engine()
    api = SyncApi(engine, None)
    with ThreadPoolExecutor(2) as pool:
        reading = pool.submit(api._call, Checksums())
        assert begun.wait(60)
        noticing = pool.submit(api.notice_loads)
        has_returned = bool(wait([noticing], 60 if busy else 0.1).done)
        go_on.set()
        noticing.result(60)
        reading.result(60)
    assert (has_returned, looked) == ((True, []) if busy else (False, [True]))
