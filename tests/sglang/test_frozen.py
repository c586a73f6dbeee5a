"""Requests that keep their KV cache: the parts of the prefix cache, and the results of a step in flight."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from rl_memory_plugins.engines.sglang import frozen
from rl_memory_plugins.engines.sglang.hooks import SCHEDULER, hooks
from rl_memory_plugins.engines.sglang.scheduler import capabilities_of
from rl_memory_plugins.engines.sglang.scheduler_hooks import SglangEngine
from rl_memory_plugins.tags import PauseMode
from tests.sglang.test_engine import Ranks


def request(key: str | None = None) -> Any:
    return SimpleNamespace(extra_key=key)


def test_before_any_freeze_requests_keep_their_keys() -> None:
    plain = request()
    frozen.Namespace().enter(plain)
    assert plain.extra_key is None


def test_requests_that_begin_later_have_another_key() -> None:
    namespace, running, waiting = frozen.Namespace(), request("tenant"), request("tenant")
    namespace.renew([waiting])
    new = request("tenant")
    namespace.enter(new)
    assert running.extra_key == "tenant"
    assert waiting.extra_key == new.extra_key != "tenant"
    assert new.extra_key.endswith("tenant"), "SGLang finds a LoRA adapter by the end of the key"
    other = request("other")
    namespace.enter(other)
    assert other.extra_key != new.extra_key


def test_each_freeze_makes_a_new_part_and_no_key_grows() -> None:
    namespace, retracted, keys = frozen.Namespace(), request("tenant"), set()
    for _ in range(3):
        namespace.renew([retracted])
        namespace.enter(retracted)
        keys.add(retracted.extra_key)
    assert len(keys) == 3
    assert len({len(key) for key in keys}) == 1


class Scheduler:
    """SGLang's, with a step in flight, as the overlap schedule leaves it to the next turn of its loop."""

    running_batch = last_batch = chunked_req = hisparse_coordinator = None

    def __init__(self) -> None:
        self._engine_paused = False
        self.result_queue = deque([("batch", "result")])
        self.processed: list[tuple[Any, Any]] = []
        self.cur_batch_for_debug: Any = "batch"
        self.retracted = 0
        self.waiting_queue: list[Any] = []
        self.max_queued_requests = None
        self.grammar_manager = SimpleNamespace(grammar_queue=[])
        self.enable_hierarchical_cache = False

    def process_batch_result(self, batch: Any, result: Any) -> None:
        if not frozen.is_done(result):
            self.processed.append((batch, result))

    def pause_generation(self, pause: Any) -> None:
        self._engine_paused = True
        self.retracted += pause.mode == "retract"

    def continue_generation(self, pause: Any) -> None:
        self._engine_paused = False

    def is_fully_idle(self) -> bool:
        return bool(self.retracted)


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    for name in ("pause_generation", "continue_generation"):
        monkeypatch.setitem(hooks.table, f"{SCHEDULER}.{name}", getattr(Scheduler, name))
    return Scheduler()


def test_the_tokens_of_a_step_in_flight_are_handed_out_once(scheduler: Scheduler) -> None:
    engine = SglangEngine(scheduler, Ranks(True))  # type: ignore[arg-type]
    for _ in range(2):  # a second call finds nothing more
        drained = engine.drain(PauseMode.FREEZE)
        engine.poll()
        assert drained.done()
    assert scheduler.processed == [("batch", "result")]
    assert len(scheduler.result_queue) == 1, "the loop takes one result out for each batch that it has run"
    scheduler.process_batch_result(*scheduler.result_queue.popleft())
    assert scheduler.processed == [("batch", "result")]
    assert scheduler.cur_batch_for_debug is None
    assert scheduler.retracted == 0


def test_the_step_in_flight_may_run_on_while_the_ranks_connect_to_a_trainer(scheduler: Scheduler) -> None:
    engine = SglangEngine(scheduler, Ranks(True))  # type: ignore[arg-type]
    drained = engine.drain(PauseMode.FREEZE, for_update=True)
    engine.poll()
    assert drained.done() and scheduler._engine_paused and scheduler.processed == []
    for _ in range(2):
        engine.end_frozen_step()
        assert scheduler.processed == [("batch", "result")]
    engine.resume(lift_pause=False)
    assert len(scheduler.result_queue) == 1

    # an update that never came so far, perhaps on this rank alone: all ranks go on with the same tokens
    scheduler.result_queue = deque([("batch", "next")])
    engine.drain(PauseMode.FREEZE, for_update=True)
    engine.poll()
    engine.resume(lift_pause=False)
    assert scheduler.processed == [("batch", "result"), ("batch", "next")]
    assert not scheduler._engine_paused
    scheduler.result_queue = deque([("batch", "later")])
    engine.end_frozen_step()
    assert len(scheduler.processed) == 2, "steps that run are the loop's"


def test_what_waits_in_the_queue_afterwards_concerns_no_request(scheduler: Scheduler) -> None:
    """SGLang computes no token of a request whose last one it takes to be in the queue, and asks grammars about it."""
    engine = SglangEngine(scheduler, Ranks(True))  # type: ignore[arg-type]
    engine.drain(PauseMode.FREEZE)
    engine.poll()
    [(batch, result)] = scheduler.result_queue
    assert batch.reqs == [] and result.grammar_advanced


def test_a_step_is_ended_also_after_a_call_that_has_retracted_requests(scheduler: Scheduler) -> None:
    """It may have failed, and SGLang's own call may have gone on without telling."""
    engine = SglangEngine(scheduler, Ranks(True))  # type: ignore[arg-type]
    engine.drain(PauseMode.KEEP)
    engine.poll()
    scheduler.continue_generation(None)
    engine.drain(PauseMode.FREEZE, for_update=True)
    engine.poll()
    engine.end_frozen_step()
    assert scheduler.processed == [("batch", "result")]


def test_a_sleep_waits_for_the_step_in_flight_also_after_an_update_that_did_not(scheduler: Scheduler) -> None:
    engine = SglangEngine(scheduler, Ranks(True))  # type: ignore[arg-type]
    engine.drain(PauseMode.FREEZE, for_update=True)
    engine.drain(PauseMode.FREEZE)
    engine.poll()
    assert scheduler.processed == [("batch", "result")]


def test_frozen_requests_give_up_their_kv_cache_for_a_call_that_recomputes_them(scheduler: Scheduler) -> None:
    engine = SglangEngine(scheduler, Ranks(True))  # type: ignore[arg-type]
    engine.drain(PauseMode.FREEZE)
    engine.poll()
    kept = engine.drain(PauseMode.KEEP)
    engine.poll()
    assert kept.done() and scheduler.retracted == 1
    engine.resume(lift_pause=False)
    assert not scheduler._engine_paused
    engine.drain(PauseMode.FREEZE)
    engine.poll()
    engine.drain(PauseMode.KEEP)
    engine.poll()
    assert scheduler.retracted == 2


@pytest.mark.parametrize(
    ("option", "value"), [("enable_streaming_session", True), ("radix_cache_backend", "of_another_package")]
)
def test_caches_that_would_mix_old_and_new_are_named(option: str, value: object) -> None:
    arguments = SimpleNamespace(enable_streaming_session=False, radix_cache_backend=None)
    assert PauseMode.FREEZE in capabilities_of(arguments).modes
    setattr(arguments, option, value)
    found = capabilities_of(arguments)
    assert PauseMode.FREEZE not in found.modes
    assert option.replace("_", "-") in found.no_freeze
