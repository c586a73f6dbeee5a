"""`RolloutHandoff` with the engines of a fleet that are up at each step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from rl_memory_plugins.errors import RLMemoryError
from rl_memory_plugins.ray.handle import EngineActorHandle
from rl_memory_plugins.trainer import EngineFailure, HandoffReport, RolloutHandoff
from rl_memory_plugins.trainer.sources.model import Tensors


class Fleet(Protocol):
    """What a handoff needs of an `EngineFleet`, whose module imports this one."""

    engines: list[EngineActorHandle]
    turn: AbstractContextManager[Any]

    def present(self) -> list[EngineActorHandle]: ...

    def leave_out(self, failures: Iterable[EngineFailure]) -> None: ...

    def next_version(self, weight_version: str | None) -> str: ...

    def updated_to(self, weight_version: str) -> None: ...

    def failed_to(
        self, weight_version: str, error: BaseException, engines: Sequence[EngineActorHandle] = ()
    ) -> None: ...


class FleetHandoff(RolloutHandoff):
    """A `RolloutHandoff` with `on_failure="continue"`. `EngineFleet.handoff` makes it.

    An engine that fails leaves the fleet until `EngineFleet.replace`.
    """

    def __init__(self, fleet: Fleet, source: Tensors, **options: Any) -> None:
        super().__init__(fleet.engines, source, on_failure="continue", **options)
        self._fleet = fleet

    def release(self) -> HandoffReport:
        """The first half: put the engines to sleep, and load the trainer."""
        with self._fleet.turn:
            self.engines = list(self._fleet.present())
            report = super().release()
            self._fleet.leave_out(report.failed)
            return report

    def sync(self, weight_version: str | None = None, report: HandoffReport | None = None) -> HandoffReport:
        """The second half: send the weights, and open the engines.

        Args:
            weight_version: The name of the new weights; by default the number of the fleet's update.
            report: A report to extend.
        """
        with self._fleet.turn:
            present = self._fleet.present()
            self.engines = list(present)
            version = self._fleet.next_version(weight_version)
            report = report or self._new_report()
            before = report.failed
            try:
                super().sync(version, report)
            except BaseException as error:
                if isinstance(error, RLMemoryError) or not report.update:  # else all have the weights, or are named
                    self._fleet.failed_to(version, error, present)
                raise
            finally:
                if report.update:  # also if a later step fails: some engines have the new weights
                    self._fleet.leave_out(report.failed)
                    self._fleet.updated_to(version)
                report.failed = [*before, *report.failed]
            return report
