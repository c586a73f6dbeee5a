"""`RolloutHandoff` with the engines of a fleet that are up at each step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from rl_memory_plugins.ray.handle import EngineActorHandle
from rl_memory_plugins.trainer import HandoffReport, RolloutHandoff
from rl_memory_plugins.trainer.sources.model import Tensors

T = TypeVar("T")


class Fleet(Protocol):
    """What a handoff needs of an `EngineFleet`, whose module imports this one."""

    engines: list[EngineActorHandle]

    def without_lost(self, call: Callable[[list[EngineActorHandle]], T]) -> T: ...

    def next_version(self, weight_version: str | None) -> str: ...

    def updated_to(self, weight_version: str) -> None: ...


class FleetHandoff(RolloutHandoff):
    """A `RolloutHandoff` that goes on without an engine that dies. `EngineFleet.handoff` makes it.

    A half of the handoff that loses an engine begins again without it: steps that are done do nothing. All processes of
    the trainer begin again together.
    """

    def __init__(self, fleet: Fleet, source: Tensors, **options: Any) -> None:
        super().__init__(fleet.engines, source, **options)
        self._fleet = fleet

    def release(self) -> HandoffReport:
        """The first half: put the engines to sleep, and load the trainer."""
        return self._fleet.without_lost(lambda engines: self._release(engines))

    def sync(self, weight_version: str | None = None, report: HandoffReport | None = None) -> HandoffReport:
        """The second half: send the weights, and open the engines.

        Args:
            weight_version: The name of the new weights; by default the number of the fleet's update.
            report: A report to extend.
        """
        version = self._fleet.next_version(weight_version)
        report = report or HandoffReport()
        self._fleet.without_lost(lambda engines: self._sync(engines, version, report))
        self._fleet.updated_to(version)
        return report

    def _release(self, engines: list[EngineActorHandle]) -> HandoffReport:
        self.engines = list(engines)
        return super().release()

    def _sync(self, engines: list[EngineActorHandle], version: str, report: HandoffReport) -> None:
        self.engines = list(engines)
        super().sync(version, report)
