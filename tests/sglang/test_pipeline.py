"""Pipeline stages: what waits until no step is in flight, and requests that stand between two steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rl_memory_plugins.engines.sglang import adapters, pipeline
from rl_memory_plugins.engines.sglang import scheduler as scheduler_module
from rl_memory_plugins.engines.sglang.pipeline import AGREED, Pipeline
from rl_memory_plugins.engines.sglang.scheduler import SglangScheduler
from rl_memory_plugins.engines.sglang.scheduler_hooks import SglangEngine
from rl_memory_plugins.memory.preparation import Pace
from rl_memory_plugins.tags import PauseMode


class TokenizedGenerateReqInput:
    """A request as SGLang names it."""


class RLMemoryReqInput:
    """A command."""


class Request:
    def __init__(self, finished: bool = False) -> None:
        self._finished = finished

    def finished(self) -> bool:
        return self._finished


class Batch:
    def __init__(self, reqs: Any = (), batch_is_full: bool = True) -> None:
        self.reqs, self.batch_is_full = list(reqs), batch_is_full


def scheduler(**fields: Any) -> Any:
    batches = {"mbs": [None, None], "last_mbs": [None, None], "running_mbs": [Batch(), Batch()]}
    others = {"waiting_queue": [], "running_batch": Batch(), "last_batch": None}
    return SimpleNamespace(**{**batches, **others, **fields})


def test_a_command_and_all_that_comes_after_it_wait_for_the_steps_in_flight() -> None:
    held = Pipeline(scheduler())
    before, command, after, later = TokenizedGenerateReqInput(), RLMemoryReqInput(), Request(), Request()
    assert held.pass_on([before]) == [before]
    assert held.pass_on([before, command, after]) == [before]
    assert held.pass_on([later]) == []
    assert held.held == [command, after, later]


def test_the_requests_that_wait_are_those_of_sglang_that_need_all_ranks() -> None:
    from sglang.srt.managers import io_struct

    own = {"RLMemoryReqInput", "PostProcessWeightsReqInput"}  # ours, and one that slime's patch adds
    assert [name for name in AGREED - own if not hasattr(io_struct, name)] == []


def test_a_pipeline_is_empty_once_all_stages_have_the_results_of_the_last_step() -> None:
    """A stage passes results on one pass after it has processed them, and its batch stays in its place until then."""
    processed = Batch()
    assert not Pipeline(scheduler(mbs=[processed, None])).is_empty
    assert Pipeline(scheduler()).is_empty
    assert Pipeline(SimpleNamespace()).is_empty  # before SGLang's loop begins


class Added:
    """What is added to a scheduler, with nothing to poll."""

    def __init__(self, of: Any, *, stops_steps: bool = False) -> None:
        self.pipeline = Pipeline(of)
        self.polled = 0
        self.engine = SimpleNamespace(stops_steps=stops_steps, poll=self._poll, draining=False)
        self._scheduler = of
        of.rl_memory = self

    def _poll(self) -> None:
        self.polled += 1

    may_begin_step = SglangScheduler.may_begin_step
    answer_health_checks = staticmethod(lambda requests: requests)
    after_input = lambda self: self.engine.poll()  # noqa: E731


@pytest.fixture
def handled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    monkeypatch.setattr(scheduler_module, "handle_natively", lambda scheduler, requests: found.extend(requests))
    return found


@pytest.fixture(autouse=True)
def _plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pipeline, "no_batch", lambda self: None)


def plan(of: Any) -> str | None:
    of.rl_memory.pace = Pace()
    return pipeline._plan_unless_stopped(lambda scheduler: "a batch")(of)


def test_no_stage_agrees_on_anything_while_a_step_is_in_flight(handled: list[Any]) -> None:
    """It would wait for the next stage, which waits for its results."""
    of = scheduler(mbs=[Batch(), None])
    added = Added(of)
    assert plan(of) == "a batch"
    assert added.polled == 0
    added.pipeline.pass_on([RLMemoryReqInput()])
    assert plan(of) is None  # the steps in flight end, and no other begins
    assert added.polled == 0 and handled == []


def test_what_waited_is_handled_before_the_next_step(handled: list[Any]) -> None:
    of = scheduler()
    added = Added(of)
    command = RLMemoryReqInput()
    added.pipeline.pass_on([command])
    assert plan(of) is None
    assert handled == [command] and added.polled == 1
    assert plan(of) == "a batch"
    assert handled == [command]


def test_an_engine_that_stands_still_plans_nothing(handled: list[Any]) -> None:
    """Stock: the loop of a pipeline ignores a pause."""
    of = scheduler()
    Added(of, stops_steps=True)
    assert plan(of) is None


@pytest.mark.parametrize(
    ("mode", "paused", "grammars", "stops"),
    [
        (None, False, 0, False),
        (None, True, 0, True),
        (PauseMode.ABORT, False, 0, False),
        (PauseMode.WAIT, False, 0, False),
        (PauseMode.KEEP, False, 0, True),
        (PauseMode.KEEP, False, 1, False),  # a step takes the request out of the queue for its grammar
        (PauseMode.FREEZE, False, 1, True),
    ],
)
def test_which_drains_stop_requests_where_they_are(
    mode: PauseMode | None, paused: bool, grammars: int, stops: bool
) -> None:
    queue = SimpleNamespace(grammar_queue=[Request()] * grammars)
    engine = SglangEngine(SimpleNamespace(_engine_paused=paused, grammar_manager=queue), None)  # type: ignore[arg-type]
    if mode is not None:
        engine.drain(mode) if mode is not PauseMode.ABORT else engine._drains.append((mode, False, None))  # type: ignore[arg-type]
    assert engine.stops_steps is stops


def test_prefilled_requests_that_no_batch_has_yet_keep_the_engine_busy() -> None:
    """Stock: between two steps no batch has them, and SGLang takes the engine for idle."""
    of = scheduler(last_mbs=[None, Batch([Request()])])
    of.rl_memory = SimpleNamespace(pipeline=Pipeline(of))
    assert not pipeline._is_fully_idle(lambda scheduler: True)(of)
    of.last_mbs = [None, Batch([Request(finished=True)])]
    assert pipeline._is_fully_idle(lambda scheduler: True)(of)


def test_an_abort_reaches_them_too() -> None:
    request = Request()
    of = scheduler(last_mbs=[None, Batch([request])])
    of.rl_memory = SimpleNamespace(pipeline=Pipeline(of))
    seen: list[Any] = []
    pipeline._abort_stopped_requests_too(
        lambda scheduler, asked: seen.extend(one for batch in scheduler.mbs if batch for one in batch.reqs)
    )(of, None)
    assert seen == [request]
    assert of.mbs == [None, None]


def test_the_adapters_of_all_batches_are_in_use() -> None:
    """SGLang's loop shows one batch at a time."""
    requests = [Request() for _ in range(3)]
    batches = [Batch([request]) for request in requests]
    of = scheduler(running_mbs=[batches[0], Batch()], mbs=[None, batches[1]], last_mbs=[None, batches[2]])
    assert {*adapters.requests_of(of)} == {*requests}


def test_a_retraction_takes_each_request_of_all_batches_once() -> None:
    """Stock: SGLang retracts those of one batch. A long prompt is in the last batches of two stages."""
    one, long_prompt, queued, done = Request(), Request(), Request(), Request(finished=True)
    running = [Batch([one, done]), Batch()]
    of = scheduler(
        running_mbs=running,
        running_batch=running[1],
        last_mbs=[Batch([long_prompt, one]), Batch([long_prompt, queued])],
        waiting_queue=[queued],
    )
    with Pipeline(of).as_one_batch():
        assert of.running_batch.reqs == [one, long_prompt]
        of.running_batch.reqs = []
    assert of.running_batch is running[1]
    assert [batch.reqs for batch in running] == [[], []]
    assert of.last_mbs == [None, None] and of.last_batch is None
