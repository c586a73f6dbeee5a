"""What is added to SGLang's scheduler, without an engine."""

from __future__ import annotations

import types
from concurrent.futures import Future

import pytest

from rl_memory_plugins.engines.sglang import pipeline, scheduler
from rl_memory_plugins.engines.sglang.scheduler_hooks import SglangEngine
from rl_memory_plugins.errors import EngineAsleepError
from rl_memory_plugins.memory.preparation import Pace


@pytest.mark.parametrize(("draining", "naps"), [(True, 0), (False, 1)])
def test_a_drain_ends_when_the_last_request_does(draining: bool, naps: int) -> None:
    """Stock: with --sleep-on-idle the scheduler naps for a second once nothing runs, and looks at nothing meanwhile."""
    napped: list[object] = []
    maybe_sleep_on_idle = scheduler._stay_awake_while_draining(napped.append)
    added = types.SimpleNamespace(must_stay_awake=draining)
    maybe_sleep_on_idle(types.SimpleNamespace(rl_memory=added))
    assert len(napped) == naps


def test_a_command_that_waits_for_a_trainer_is_no_hang() -> None:
    """Stock: the watchdog ends a server that has requests and begins no step. An update of an adapter leaves them."""
    watched: list[object] = []
    running = types.SimpleNamespace(cur_batch_for_debug="a batch")

    def execute(payload: bytes) -> Future[bytes]:
        watched.append(running.cur_batch_for_debug)
        return Future()

    added = object.__new__(scheduler.SglangScheduler)
    added._scheduler = running
    added.controller = types.SimpleNamespace(execute=execute)  # type: ignore[assignment]
    added.handle(types.SimpleNamespace(payload=b""))
    assert watched == [None]


def test_a_command_leaves_the_batch_that_aborts_of_older_releases_read() -> None:
    older = types.SimpleNamespace(cur_batch="a batch")
    added = object.__new__(scheduler.SglangScheduler)
    added._scheduler = older
    added.controller = types.SimpleNamespace(execute=lambda payload: Future())  # type: ignore[assignment]
    added.handle(types.SimpleNamespace(payload=b""))
    assert older.cur_batch == "a batch"


def test_background_work_hears_of_each_step() -> None:
    """Host memory is prepared while the first requests run, and would slow them by half."""
    paces = Pace(), Pace()
    begun, ended = (types.SimpleNamespace(rl_memory=types.SimpleNamespace(pace=one, pipeline=None)) for one in paces)
    results: list[object] = []
    process = scheduler._process_once(lambda scheduler, batch, result: results.append(result))
    process(ended, "a batch", "its result")
    batches: list[object] = [None, "a batch"]
    plan = pipeline._plan_unless_stopped(lambda scheduler: batches.pop(0))
    assert plan(begun) is None
    assert [one.engine_computes for one in paces] == [False, True] and results == ["its result"]
    assert plan(begun) == "a batch"
    assert paces[0].engine_computes


@pytest.mark.parametrize("tags", [set(), {"kv_cache"}])
def test_a_flush_touches_no_kv_cache_that_sleeps(tags: set[str]) -> None:
    """Stock: models with state besides the KV cache set it to zero, and it lies in the same memory."""
    flushed: list[object] = []

    def original(scheduler: object, empty_cache: bool = True) -> bool:
        flushed.append(empty_cache)
        return True

    engine = SglangEngine(types.SimpleNamespace(weight_updater=types.SimpleNamespace(offload_tags=tags)), None)  # type: ignore[arg-type]
    added = types.SimpleNamespace(engine=engine)
    assert scheduler._flush_what_is_there(original)(types.SimpleNamespace(rl_memory=added), empty_cache=False)
    assert flushed == ([] if tags else [False])


def test_a_refused_request_gives_back_the_memory_of_its_images() -> None:
    """SGLang's own early answers do; what is not given back is missing to later requests."""
    given_back: list[str] = []
    sent: list[object] = []
    output = types.SimpleNamespace(send_output=lambda answer, request: sent.append(answer))
    added = object.__new__(scheduler.SglangScheduler)
    added._scheduler = types.SimpleNamespace(ipc_channels=types.SimpleNamespace(send_to_tokenizer=output))
    lent = types.SimpleNamespace(release_transport_proxies=lambda: given_back.append("an image"))
    for inputs in (None, types.SimpleNamespace(mm_items=[lent, types.SimpleNamespace()])):
        added.refuse(types.SimpleNamespace(rid="one", mm_inputs=inputs), EngineAsleepError("it sleeps"))
    assert given_back == ["an image"]
    assert len(sent) == 2
