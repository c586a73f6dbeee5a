"""The last step of requests that have ended.

SGLang begins a step before it has the result of the one before. It answers a request in a pass of its loop in which a
step with that request is still in flight, and an update that comes at once finds the scheduler busy. So it waits.
"""

from __future__ import annotations

from typing import Any

from rl_memory_plugins.engines.sglang.pipeline import split_at
from rl_memory_plugins.engines.sglang.scheduler_hooks import RankedGroup

#: The most passes that an update waits; a request leaves the scheduler within three.
PASSES = 8


class LastStep:
    """Holds updates of a scheduler without pipeline stages.

    Attributes:
        held: The requests that wait, in their order.
    """

    def __init__(self, scheduler: Any, ranks: RankedGroup) -> None:
        self._scheduler = scheduler
        self._ranks = ranks
        self.held: list[Any] = []
        self._passes = 0  # that the first of them has waited

    def pass_on(self, requests: list[Any]) -> list[Any]:
        """Hold the first update that flushes the caches, and all after it, while nothing but a last step is in flight.

        Returns those before it. All ranks call this at the same pass, with the same requests.
        """
        before, self.held = split_at(
            self.held + requests, lambda request: getattr(request, "flush_cache", False) and self._must_wait()
        )
        return before

    def _must_wait(self) -> bool:
        """Whether no rank has requests that run, and some rank has a last step. All ranks agree."""
        states = self._ranks.gather(self._state())
        waits = "busy" not in states and "ending" in states and self._passes < PASSES
        self._passes = self._passes + 1 if waits else 0
        return waits

    def _state(self) -> str:
        scheduler = self._scheduler
        if scheduler.is_fully_idle():
            return "idle"
        in_flight = getattr(scheduler, "result_queue", ())  # batches with their results, where steps overlap
        batches = scheduler.running_batch, scheduler.last_batch, *(one[0] for one in in_flight)
        runs = any(not request.finished() for batch in batches if batch is not None for request in batch.reqs)
        return "busy" if runs or scheduler.waiting_queue or scheduler._engine_paused else "ending"
