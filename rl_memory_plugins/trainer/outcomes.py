"""How an update of several engines ended at each of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from rl_memory_plugins import answer_time
from rl_memory_plugins.errors import RLMemoryError, WeightUpdateError, from_record
from rl_memory_plugins.memory.threads import on_this_gpu
from rl_memory_plugins.trainer.engine_handle import EngineHandle
from rl_memory_plugins.weights import wire
from rl_memory_plugins.weights.wire import Deadline

STATE_S = 5.0
"""How long an engine may take to tell its state after a failure."""

E = TypeVar("E")
T = TypeVar("T")


class Outcome(msgspec.Struct):
    """How an update ended at one engine.

    Attributes:
        trainer_rank: The trainer process that controls the engine.
        engine: The index of the engine among those of this process; in a fleet its number.
        error: The record of the error; `None` if the engine has the new weights.
        state: Of a failed engine its `content`, `weight_version`, `admitting` and `reason`; `None` if it does not tell.
        behind: Of an engine behind a relay its place there, and `engine` is then the relay's. If the relay has another
            one behind it, the place of that one comes first. Empty of all others.
    """

    trainer_rank: int
    engine: int
    error: dict[str, Any] | None = None
    state: dict[str, Any] | None = None
    behind: tuple[int, ...] = ()


@dataclass(frozen=True)
class EngineFailure:
    """An engine that an update or a handoff with `on_failure="continue"` goes on without.

    Attributes:
        trainer_rank, engine, state, behind: See `Outcome`.
        error: Why.
    """

    trainer_rank: int
    engine: int
    error: RLMemoryError
    state: dict[str, Any] | None
    behind: tuple[int, ...] = ()


def behind_relay(answer: object, rank: int, number: int) -> list[Outcome]:
    """The engines that have failed behind a relay that has not.

    Args:
        answer: The relay's. That of an engine names none.
        rank: The rank of this process.
        number: The relay's; see `number_of`.
    """
    failed = answer.get("failed", ()) if isinstance(answer, dict) else ()
    return [
        Outcome(rank, number, one["error"], one.get("state"), (one["engine"], *one.get("behind", ()))) for one in failed
    ]


def relayed(outcomes: Iterable[Outcome]) -> list[dict[str, Any]]:
    """The failures in a relay's answer; see `behind_relay`. Of several of one engine the first is the cause."""
    first: dict[tuple[int, ...], Outcome] = {}
    for one in outcomes:
        if one.error is not None:
            first.setdefault((one.engine, *one.behind), one)
    return [
        {"engine": one.engine, "behind": list(one.behind), "error": one.error, "state": one.state}
        for one in first.values()
    ]


def outcomes_of(
    engines: Sequence[EngineHandle], errors: Sequence[RLMemoryError | None], rank: int, timeout_s: float
) -> list[Outcome]:
    """The outcomes at the engines of this process. Asks those that failed for their states, all at once.

    Args:
        errors: Of each engine; `None` if it has the new weights.
        rank: The rank of this process.
        timeout_s: The longest silence of an engine in the update. The states take a quarter of it at most.
    """
    failed = [place for place, error in enumerate(errors) if error is not None]
    found = on_each([engines[place] for place in failed], state_of, min(STATE_S, timeout_s / 4))
    states = dict(zip(failed, found, strict=True))
    return [
        Outcome(
            rank,
            number_of(engines[place], place),
            None if error is None else record_of(error),
            state if isinstance(state := states.get(place), dict) else None,
        )
        for place, error in enumerate(errors)
    ]


def devices_of(engines: Sequence[EngineHandle], timeout_s: float) -> list[list[str]]:
    """The devices of each engine. Asks all at once, and waits so long for all of them together.

    Raises:
        RLMemoryError: an engine does not tell. `details["engine"]` is its number.
    """
    found = on_each(engines, lambda engine: engine.devices(), timeout_s)
    devices: list[list[str]] = []
    try:
        for place, one in enumerate(found):
            if isinstance(one, RLMemoryError):
                one.details.setdefault("engine", number_of(engines[place], place))
                raise one
            devices.append(one)
        return devices
    finally:
        one = []
        found.clear()  # breaks the reference cycle between the error and this frame


def number_of(engine: EngineHandle, place: int) -> int:
    """How failures name an engine: by its attribute `number` if it has one, else by its place in the list."""
    return int(getattr(engine, "number", place))


def failures_of(outcomes: Sequence[Outcome], specificity: Callable[[Exception], int]) -> list[EngineFailure]:
    """The engines that have failed, if one is left that has not.

    Args:
        outcomes: Those of all processes.
        specificity: Ranks errors.

    Raises:
        RLMemoryError: all engines have failed. The most specific error, with all of `outcomes` in its details.
    """
    failed = [
        EngineFailure(one.trainer_rank, one.engine, from_record(one.error), one.state, one.behind)
        for one in outcomes
        if one.error is not None
    ]
    if failed and all(one.error is not None for one in outcomes):
        error = max((one.error for one in failed), key=specificity)
        error.details["engines"] = msgspec.to_builtins(outcomes)
        raise error
    return failed


def record_of(error: RLMemoryError) -> dict[str, Any]:
    """The record of an error, for an agreement of all processes: details that it cannot carry become strings."""
    record: dict[str, Any] = msgspec.to_builtins(error.to_record(), enc_hook=str)
    return record


def state_of(engine: EngineHandle) -> dict[str, Any] | None:
    """See `EngineClient.weights_state`. A handle may lack the method."""
    ask = getattr(engine, "weights_state", None)
    return None if ask is None else ask()


def on_each(engines: Sequence[E], call: Callable[[E], T], timeout_s: float) -> list[T | RLMemoryError]:
    """Call all engines at once. Returns the result or the error of each.

    Args:
        timeout_s: How long all of them may take together. The call of an engine that takes longer is left to itself. It
            is less if the caller of this call waits less; see `answer_time`.
    """
    timeout_s = min(timeout_s, answer_time.SHARE * answer_time.left())
    found: list[T | RLMemoryError] = [
        WeightUpdateError(f"the engine did not answer within {timeout_s:g} s", reason="stalled", timeout_s=timeout_s)
        for _ in engines
    ]

    def ask(number: int) -> None:
        try:
            with answer_time.within(timeout_s):
                found[number] = call(engines[number])
        except Exception as error:
            found[number] = wire.as_update_error(error).with_traceback(None)

    threads = [
        threading.Thread(target=on_this_gpu(lambda number=number: ask(number)), name="rl-memory-engine", daemon=True)  # type: ignore[misc]
        for number in range(len(engines))
    ]
    deadline = Deadline(timeout_s)
    for number, thread in enumerate(threads):
        try:
            thread.start()
        except RuntimeError as error:  # this process cannot start more threads
            found[number] = wire.as_update_error(error)
    for thread in threads:
        if thread.ident is not None:
            thread.join(deadline.remaining())
    return list(found)
