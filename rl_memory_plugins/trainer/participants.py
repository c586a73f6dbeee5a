"""Which engines take part in a handoff, and what becomes of those that fail."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rl_memory_plugins.errors import RLMemoryError, StateConflictError, from_record
from rl_memory_plugins.timing import LONGEST_S
from rl_memory_plugins.trainer.engine_handle import EngineHandle, on_all
from rl_memory_plugins.trainer.outcomes import (
    EngineFailure,
    Outcome,
    behind_relay,
    failures_of,
    number_of,
    on_each,
    record_of,
    state_of,
)
from rl_memory_plugins.trainer.peers import Peers
from rl_memory_plugins.trainer.push import specificity
from rl_memory_plugins.weights.wire import Deadline

CLOSE_S = 10.0
"""How long the engines that were left out may take together to close."""

ASK_AGAIN_S = 0.1


class Participants:
    """The engines of a trainer in one half of a handoff. All processes make each call together.

    Args:
        engines: The engines that this process controls.
        peers: The processes of the trainer.
        goes_on: Leave out an engine that fails, and go on without it. Otherwise the first failure is raised.

    Attributes:
        failures: The engines of all processes that were left out, those behind relays among them.
    """

    def __init__(self, engines: Sequence[EngineHandle], peers: Peers, *, goes_on: bool) -> None:
        self._engines = list(engines)
        self._numbers = [number_of(engine, place) for place, engine in enumerate(engines)]
        self._peers = peers
        self._goes_on = goes_on
        self._errors: dict[int, RLMemoryError] = {}  # by place, of those left out
        self._states: dict[int, dict[str, Any] | None] = {}
        self._behind: dict[tuple[int, ...], Outcome] = {}  # by number and places: a relay leaves those out
        self.failures: list[EngineFailure] = []

    def call(self, call: Callable[[EngineHandle], Any]) -> None:
        """Call the engines that take part, all at once.

        Raises:
            Exception: an engine failed; if the handoff goes on without it, only if no engine of any process is left.
        """
        if not self._goes_on:
            self._peers.agree(lambda: on_all(self._engines, call))
            return

        def ask() -> list[Outcome]:
            present = [place for place in range(len(self._engines)) if place not in self._errors]
            answers = on_each([self._engines[place] for place in present], call, LONGEST_S)
            for place, answer in zip(present, answers, strict=True):
                if isinstance(answer, RLMemoryError):
                    self._leave_out(place, answer)
                for outcome in behind_relay(answer, self._peers.rank, self._numbers[place]):
                    self._behind.setdefault((outcome.engine, *outcome.behind), outcome)
            return self._outcomes()

        self._note(self._peers.agree(ask, as_type=list[Outcome]))

    def for_update(self) -> list[EngineHandle]:
        """The engines for `push_from_all`. It names one that was left out, with the error of its former step."""
        return [
            LeftOut(engine, self._numbers[place], self._errors[place]) if place in self._errors else engine
            for place, engine in enumerate(self._engines)
        ]

    def updated(self, report: Mapping[str, Any]) -> None:
        """Note the engines that an update has not reached. `report` is that of `push_from_all`."""
        self.failures = report.get("failed", [])
        for failure in self.failures:
            failure.error.details.setdefault("step", self._peers.step)
            if failure.trainer_rank != self._peers.rank:
                continue
            if not failure.behind:
                self._errors[self._numbers.index(failure.engine)] = failure.error
            else:
                place, record = (failure.engine, *failure.behind), record_of(failure.error)
                found = Outcome(self._peers.rank, failure.engine, record, failure.state, failure.behind)
                self._behind.setdefault(place, found)  # the error of a former step is the cause

    def take_back(self) -> None:
        """Forget all failures."""
        self._errors.clear()
        self._behind.clear()
        self.failures = []

    def close_the_rest(self) -> None:
        """Close the engines that were left out, before the others open: none answers under former weights.

        Raises:
            StateConflictError: an engine answers, admits requests, and cannot be closed.
        """

        def close() -> None:
            places = sorted(self._errors)
            found = on_each([self._engines[place] for place in places], closed, CLOSE_S + 1)
            for place, state in zip(places, found, strict=True):
                if isinstance(state, StateConflictError):
                    raise state
                self._states[place] = state if isinstance(state, dict) else None

        if self.failures:
            self._peers.agree(close)

    def tell_states(self) -> None:
        """Complete `failures` with the states in which the engines are now."""

        def ask() -> list[Outcome]:
            places = sorted(self._errors.keys() - self._states.keys())
            found = on_each([self._engines[place] for place in places], state_of, CLOSE_S)
            self._states |= {
                place: one if isinstance(one, dict) else None for place, one in zip(places, found, strict=True)
            }
            return self._outcomes()

        if self.failures:
            self._note(self._peers.agree(ask, as_type=list[Outcome]))

    def _leave_out(self, place: int, error: RLMemoryError) -> None:
        error.details.setdefault("step", self._peers.step)
        self._errors[place] = error

    def _outcomes(self) -> list[Outcome]:
        records = {place: record_of(error) for place, error in self._errors.items()}
        return [
            Outcome(self._peers.rank, number, records.get(place), self._states.get(place))
            for place, number in enumerate(self._numbers)
        ] + list(self._behind.values())

    def _note(self, shared: Sequence[Sequence[Outcome]]) -> None:
        self.failures = failures_of([one for outcomes in shared for one in outcomes], specificity)


class LeftOut:
    """An engine that takes no part in an update: its first answer there is the error for which it was left out."""

    def __init__(self, engine: EngineHandle, number: int, error: RLMemoryError) -> None:
        self._engine = engine
        self._error = error
        self.number = number

    def sleep(self, level: Any = 1, tags: Any = None, mode: Any = "abort", keep: Any = None) -> Any:
        raise self._error

    def wake_up(self, tags: Any = None) -> Any:
        raise self._error

    def devices(self) -> list[str]:
        raise self._error

    def post_update(self, body: dict[str, Any]) -> Any:
        raise self._error

    def post_adapter(self, body: dict[str, Any]) -> Any:
        raise self._error


def closed(engine: EngineHandle, patience_s: float | None = None) -> dict[str, Any] | None:
    """Make an engine that was left out admit nothing. Returns its state; `None` if it does not tell.

    A handle with a method `leave` does that itself. Of others admission is paused, which a `wake_up` without tags ends.
    An engine that is asleep and refuses the pause for that long is left as it is: another call may open it later.

    Args:
        patience_s: How long it asks an engine that refuses, in seconds; `CLOSE_S` by default.

    Raises:
        StateConflictError: the engine admits requests, and does not let itself be closed.
    """
    leave = getattr(engine, "leave", None)
    if leave is not None:
        leave()
        return state_of(engine)
    deadline = Deadline(CLOSE_S if patience_s is None else patience_s)
    while True:
        refusal: RLMemoryError | None = None
        try:
            answer = engine.sleep(level=0)
        except RLMemoryError as error:
            answer, refusal = None, error
        state = state_of(engine)
        for one in behind_relay(answer, 0, 0):  # a relay fails only if all of its engines do
            refused = from_record(one.error or {})
            if isinstance(refused, StateConflictError) or (state is not None and state["admitting"]):
                refusal = refused
        if refusal is None or state is None:
            return state
        # An update that breaks off before its first byte ends with the former weights, and opens the engine again. So
        # does a call that waits for running requests until its time is over; it is `asleep` meanwhile.
        if not state["admitting"] and state["reason"] not in ("updating", "asleep"):
            return state
        if deadline.remaining() <= ASK_AGAIN_S:
            if state["reason"] == "asleep":  # rather than hold up the others for a call that hangs
                return state
            raise StateConflictError(
                f"an engine that was left out admits requests under former weights, and cannot be closed: {refusal}",
                state=state,
            )
        time.sleep(ASK_AGAIN_S)
