"""Pipeline stages: where all of them can agree on something, and what waits until then.

A stage handles a request before the next stage has it, and then waits for that stage's part of the steps in flight. If
it waited for an agreement first, both would wait for ever. But all stages plan the same batches in the same order, and
so all of them find at the same pass of their loops that no step is in flight. There they agree: requests that need it
wait, no stage begins a step meanwhile, and running requests stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rl_memory_plugins.engines.enabled import on_enabled
from rl_memory_plugins.engines.sglang.hooks import SCHEDULER
from rl_memory_plugins.hooking import Hooks

#: The requests whose handlers need all stages. The others (work, aborts, questions about the load) do not wait.
AGREED = frozenset(
    {
        "RLMemoryReqInput",
        "PauseGenerationReqInput",
        "ContinueGenerationReqInput",
        "ReleaseMemoryOccupationReqInput",
        "ResumeMemoryOccupationReqInput",
        "UpdateWeightFromDiskReqInput",
        "UpdateWeightsFromDistributedReqInput",
        "UpdateWeightsFromTensorReqInput",
        "UpdateWeightsFromIPCReqInput",
        "InitWeightsUpdateGroupReqInput",
        "DestroyWeightsUpdateGroupReqInput",
        "InitWeightsSendGroupForRemoteInstanceReqInput",
        "SendWeightsToRemoteInstanceReqInput",
        "BeginWeightUpdateReqInput",
        "EndWeightUpdateReqInput",
        "PostProcessWeightsReqInput",
        "UpdateWeightVersionReqInput",
        "GetWeightsByNameReqInput",
        "CheckWeightsReqInput",
        "RpcReqInput",
    }
)


def install(hooks: Hooks) -> None:
    hooks.wrap(f"{SCHEDULER}.get_next_batch_to_run", _plan_unless_stopped)
    hooks.wrap(f"{SCHEDULER}.is_fully_idle", _is_fully_idle)
    hooks.wrap(f"{SCHEDULER}.abort_request", _abort_stopped_requests_too)


def split_at(requests: list[Any], must_wait: Callable[[Any], bool]) -> tuple[list[Any], list[Any]]:
    """The requests before the first that must wait; and that one with all after it, which must not overtake it."""
    for number, request in enumerate(requests):
        if must_wait(request):
            return requests[:number], requests[number:]
    return requests, []


class Pipeline:
    """The stage of one scheduler.

    Attributes:
        held: The requests that wait until no step is in flight, in their order.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self.held: list[Any] = []

    def pass_on(self, requests: list[Any]) -> list[Any]:
        """Hold the first request of `AGREED`, and all after it. Returns those before it."""
        before, held = split_at(requests, lambda request: bool(self.held) or type(request).__name__ in AGREED)
        self.held += held
        return before

    @property
    def is_empty(self) -> bool:
        """Whether no step is in flight, on any stage. All stages see this at the same pass of their loops.

        A stage passes the results of a step on one pass after it has processed them. By then a stage that plans nothing
        has put `None` in place of the step's batch.
        """
        return all(batch is None for batch in getattr(self._scheduler, "mbs", ()))

    def running(self) -> list[Any]:
        """The requests that run or stand between two steps, each once.

        Those that were just prefilled belong to no running batch: the next plan adds them to one.
        """
        scheduler = self._scheduler
        batches = (*getattr(scheduler, "running_mbs", ()), *getattr(scheduler, "last_mbs", ()))
        queued = {id(request) for request in scheduler.waiting_queue}
        found = {id(request): request for batch in batches if batch is not None for request in batch.reqs}
        return [one for key, one in found.items() if key not in queued and not one.finished()]

    @contextmanager
    def stopped_requests_in_flight(self) -> Iterator[None]:
        """SGLang looks for running requests among the batches in flight."""
        scheduler = self._scheduler
        if not hasattr(scheduler, "mbs"):
            yield
            return
        scheduler.mbs, in_flight = [*scheduler.mbs, *scheduler.last_mbs], scheduler.mbs
        try:
            yield
        finally:
            scheduler.mbs = in_flight

    @contextmanager
    def as_one_batch(self) -> Iterator[None]:
        """In the body, `running_batch` has the running requests of all batches. The body must take all of them out."""
        scheduler = self._scheduler
        present = scheduler.running_batch
        scheduler.running_batch = type(present)(reqs=self.running(), batch_is_full=False)
        scheduler.last_batch = None
        yield
        for batch in scheduler.running_mbs:
            batch.reqs, batch.batch_is_full = [], False
        scheduler.last_mbs = [None] * len(scheduler.last_mbs)
        scheduler.running_batch = present

    def no_batch(self) -> Any:
        """The plan of a pass that begins no step."""
        from sglang.srt.managers import schedule_batch

        plan = getattr(schedule_batch, "NextBatchPlan", None)
        return plan and plan(batch_to_run=None, running_batch=self._scheduler.running_batch)


def of(scheduler: Any, stages: int) -> Pipeline | None:
    """The pipeline of a scheduler; `None` if there is one stage."""
    return Pipeline(scheduler) if stages > 1 else None


# -- hooks --------------------------------------------------------------------------------------------------


@on_enabled()
def _plan_unless_stopped(added: Any, original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Agree before a step is planned: here the next stage has, or soon gets, all that this stage has received."""
    if added.pipeline is not None and not added.may_begin_step():
        return added.pipeline.no_batch()
    batch = original(scheduler, *args, **kwargs)
    if batch is not None:
        added.pace.note_step()
    return batch


@on_enabled()
def _is_fully_idle(added: Any, original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> bool:
    idle = bool(original(scheduler, *args, **kwargs))
    return idle and not (added.pipeline and added.pipeline.running())


@on_enabled()
def _abort_stopped_requests_too(added: Any, original: Callable[..., Any], scheduler: Any, recv_req: Any) -> Any:
    if added.pipeline is None:
        return original(scheduler, recv_req)
    with added.pipeline.stopped_requests_in_flight():
        return original(scheduler, recv_req)
