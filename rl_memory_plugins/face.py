"""All that a client may ask of an engine, as operations without I/O.

An adapter makes one face for each client object of its engine, adds its engine's own words, and gives `run`: how an
operation runs over its transport.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from rl_memory_plugins import admission, operations
from rl_memory_plugins.board import Boards
from rl_memory_plugins.commands import UpdateWeights, WakeUp
from rl_memory_plugins.errors import RLMemoryError
from rl_memory_plugins.operations import Operation, Transition
from rl_memory_plugins.records import EngineStatus, Report


class Face(ABC):
    """The contract over all data-parallel engines behind one client object; each method is an operation."""

    def __init__(self) -> None:
        self._boards: Boards | None = None

    @abstractmethod
    def run(self, operation: Operation) -> Any:
        """The operation's result; over an asyncio transport, a coroutine of it."""

    def status(self) -> Operation:
        """Every engine's status; never waits for a transition."""
        if self._boards is None or self._boards.outdated:
            self._boards = Boards((yield from operations.hello()))
        return self._boards.read()

    def status_now(self) -> list[EngineStatus]:
        """The status, for code that cannot wait; empty where it is not known yet, and then the engines refuse."""
        return [] if self._boards is None or self._boards.outdated else self._boards.read()

    def sleep(self, level: object = 1, tags: object = None, mode: object = "abort") -> Operation:
        """Release memory; see the contract."""
        return (yield from self._transition(operations.sleep(level, tags, mode)))

    def wake_up(self, tags: object = None) -> Operation:
        """Take memory back; see the contract."""
        return (yield from self._transition(operations.wake_up(tags)))

    def update_weights(self, command: UpdateWeights) -> Operation:
        return (yield from self._transition(command))

    def update_weights_from_ipc(self, endpoints: dict[str, str], token: str, **options: Any) -> Operation:
        """Take weights from a trainer's sockets; ends when they are in place. See `commands.UpdateWeights`."""
        return (yield from self.update_weights(operations.update_weights(endpoints, token, **options)))

    def is_sleeping(self) -> Operation:
        """Whether any tag is released or an engine is paused."""
        return admission.is_sleeping((yield from self.status()))

    def memory_status(self) -> Operation:
        """Every engine's and rank's memory by tag; never waits for a transition."""
        return (yield from self.status())

    def weight_version(self) -> Operation:
        """The version that the last complete update gave."""
        return (yield from self.status())[0].weight_version

    def weight_checksums(self) -> Operation:
        """Checksums of the weights as they are, of all engines; see `weights.checksums`."""
        from rl_memory_plugins.weights.checksums import merge_engines

        return merge_engines((yield from operations.checksums()))

    def _transition(self, command: Transition) -> Operation:
        engines = yield from self.status()
        failure: RLMemoryError | None = None
        try:
            report: Report = yield from operations.transition(command, engines)
        except RLMemoryError as error:
            failure = error
        finally:
            if self._boards is not None and not self._boards.complete:
                self._boards = None  # what was told is no longer so
        # Also after a failure: several engines resume together or not at all.
        if len(engines) > 1 and admission.first_refusal((yield from self.status())) is None:
            yield from operations.resume(lift_pause=isinstance(command, WakeUp))
        if failure is not None:
            raise failure
        return report
