"""Passes updates on to the engines of one host, so that the trainer's link carries the weights once.

For the trainer a relay is an engine with one rank, which needs all tensors whole. For its engines it is the trainer:
the buckets that arrive are the source of an update with `on_failure="continue"`. It keeps no weights. An engine of it
may be a relay of another host.

    trainer                  relay                                engines of its host
    Offer              →     specs()                         →    Offer to each rank
    Accept             ←     tensors() begins                ←    all have accepted, or are left out
    Bucket, its bytes  →     a tensor once it is whole       →    Bucket to each rank
    Ack                ←     the next tensor is asked for    ←    all have read it
    Commit             →     tensors() ends                  →    Commit
    Done               ←     the update's report             ←    Done
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from rl_memory_plugins.answer_time import SHARE
from rl_memory_plugins.client import TRANSITION_S
from rl_memory_plugins.errors import (
    InvalidRequestError,
    RLMemoryError,
    StateConflictError,
    UnsupportedError,
)
from rl_memory_plugins.tags import Content, Level, PauseMode, Tag
from rl_memory_plugins.trainer.engine_handle import EngineHandle, as_engines
from rl_memory_plugins.trainer.incoming import Incoming
from rl_memory_plugins.trainer.outcomes import (
    STATE_S,
    EngineFailure,
    Outcome,
    behind_relay,
    on_each,
    record_of,
    relayed,
    state_of,
)
from rl_memory_plugins.trainer.participants import CLOSE_S, closed
from rl_memory_plugins.trainer.update import push_from_all, require_options
from rl_memory_plugins.weights import wire
from rl_memory_plugins.weights.addresses import places_of
from rl_memory_plugins.weights.dial import dial
from rl_memory_plugins.weights.sender import DEFAULT_TIMEOUT_S
from rl_memory_plugins.weights.update_hosts import UpdateHosts

CONTENTS = [Content.VALID, Content.STALE, Content.UPDATING, Content.FAILED]
"""From best to worst."""


ANSWER_S = SHARE * TRANSITION_S
"""How long the engines of a relay may take for a sleep or a wake, if the caller does not tell when it gives up."""


class Relay:
    """The engines of one host as one engine, with the calls that a trainer makes. Runs on that host.

    An engine that an update has not reached is closed, and stays closed until an update reaches it. Engines that admit
    requests are paused before an update and opened behind it: if this process dies meanwhile, nobody else would close
    those that the update does not reach. What a relay has closed it opens, if not behind this update, then behind the
    next that reaches the engine; what a caller has closed through the relay is the caller's to open.

    For a relay that starts, these engines have missed an update: those that are paused; those that are closed, until
    all engines have told the same version; and those that have not told their state yet.

    Args:
        engines: The engines; see `RolloutHandoff`.
        hosts: Where the relay may connect to; its own host alone by default.
        **options: Options of `push_from_all` for the updates of the engines, e.g. `bucket_bytes`. Engines and relays of
            other hosts need `advertise`.

    Raises:
        InvalidRequestError: there is no engine, or an option is unknown.
    """

    def __init__(self, engines: Any, *, hosts: UpdateHosts | None = None, **options: Any) -> None:
        self._engines = as_engines(engines)
        if not self._engines:
            raise InvalidRequestError("a relay needs an engine", field="engines")
        require_options(options)
        self._hosts = hosts or UpdateHosts()
        self._options = options
        self._device = f"relay:{secrets.token_hex(4)}"
        everywhere = range(len(self._engines))
        self._untold = set(everywhere)  # have not told how a relay before this one has left them
        self._behind = set(everywhere)  # have missed an update that others have got; see `_left_behind`
        self._versions: dict[int, Any] = {}  # those that engines have told; see `_left_behind`
        self._to_open = set(everywhere)  # were closed by a relay, and not yet opened again
        self._updating = threading.Lock()

    def devices(self) -> list[str]:
        """One name, under which the trainer serves this relay."""
        return [self._device]

    def sleep(self, level: Any = 1, tags: Any = None, mode: Any = "abort", keep: Any = None) -> dict[str, Any]:
        """`EngineClient.sleep` of all engines.

        Returns: `failed`, as of `post_update`.

        Raises:
            RLMemoryError: all engines have failed.
        """
        self._left_behind()
        given = {} if keep is None else {"keep": keep}
        everywhere = range(len(self._engines))
        return self._each(
            everywhere, lambda place: self._engines[place].sleep(level=level, tags=tags, mode=mode, **given)
        )

    def wake_up(self, tags: Any = None) -> dict[str, Any]:
        """`EngineClient.wake_up` of all engines, as `sleep`. It opens none that is behind.

        Those that are behind fail if `tags` has the KV cache, or is `None`. Other tags of theirs wake up.
        """
        opens = tags is None or Tag.KV_CACHE.value in tags
        behind = sorted(self._left_behind())
        states = on_each([self._engines[place] for place in behind], kept_closed, CLOSE_S + 1)
        missed = StateConflictError("the last update has not reached the engine, which stays closed until one does")
        left_out: dict[int, RLMemoryError | None] = {}
        for place, state in zip(behind, states, strict=True):
            if opens:
                left_out[place] = missed
            elif isinstance(state, RLMemoryError):  # it may be paused
                left_out[place] = state
            elif state is not None and state["reason"] in ("paused", "updating"):
                # Nothing is asleep, and any wake ends the pause.
                left_out[place] = None
        places = [place for place in range(len(self._engines)) if place not in left_out]
        errors = {place: error for place, error in left_out.items() if error is not None}
        if errors and not places:
            raise next(iter(errors.values()))

        def wake(place: int) -> Any:
            # An update may have ended without the engine since the relay asked.
            if opens and place in self._behind:
                raise missed
            answer = self._engines[place].wake_up(tags)
            if place in self._behind:  # open now, if these tags were all that slept
                kept_closed(self._engines[place])
            return answer

        answer = self._each(places, wake)
        self._to_open.update(behind)  # the caller wants them open
        answer["failed"] += relayed(failed_with(errors))
        return answer

    def _left_behind(self, timeout_s: float = STATE_S) -> set[int]:
        """The engines that no `wake_up` opens. A relay before this one may have died with engines that are behind."""
        closed: list[int] = []
        for place, state in enumerate(self._asked(timeout_s) if self._untold else ()):
            if isinstance(state, RLMemoryError) or (state is not None and state["reason"] == "updating"):
                continue
            self._versions[place] = state and state["weight_version"]
            if place not in self._untold:
                continue
            if state is None or state["admitting"]:
                self._is_like_others(place)
            elif state["reason"] == "paused":
                self._untold.discard(place)
            else:
                closed.append(place)
        # An engine that is silent may have newer weights than one that is closed.
        if len(self._versions) == len(self._engines) and len(set(self._versions.values()) - {None}) < 2:
            for place in closed:
                self._is_like_others(place)
        return set(self._behind)

    def _is_like_others(self, place: int) -> None:
        """An engine has missed no update."""
        for places in (self._untold, self._behind, self._to_open):
            places.discard(place)

    def states(self) -> list[dict[str, Any] | None]:
        """`EngineClient.weights_state` of each engine; `None` for one that does not tell."""
        return told(self._asked())

    def _asked(self, timeout_s: float = STATE_S) -> list[dict[str, Any] | RLMemoryError | None]:
        return on_each(self._engines, state_of, min(timeout_s, STATE_S))

    def _each(self, places: Sequence[int], call: Callable[[int], Any]) -> dict[str, Any]:
        """Have a caller's call made at these places. Those that obey are the caller's to open."""
        answers = on_each(places, call, ANSWER_S)
        errors = {place: one for place, one in zip(places, answers, strict=True) if isinstance(one, RLMemoryError)}
        if errors and len(errors) == len(places):
            raise next(iter(errors.values()))
        self._to_open.difference_update(set(places) - errors.keys())
        further = [one for place, answer in zip(places, answers, strict=True) for one in behind_relay(answer, 0, place)]
        return {"failed": relayed([*failed_with(errors), *further])}

    def weights_state(self) -> dict[str, Any]:
        """As `EngineClient.weights_state`, of the engines that answer: the worst content; whether any admits requests.

        Raises:
            RLMemoryError: no engine answers.
        """
        memory = self.memory()
        return {name: memory[name] for name in ("content", "weight_version", "admitting", "reason")}

    def memory(self) -> dict[str, Any]:
        """`weights_state`; `engines`, the relay itself as one engine; and `behind`, the `states` of its engines.

        The reason is `updating` until an update is over, and `paused` if any engine is: a relay in front of this one
        then wakes it.

        Each engine is asked once, so that one which hangs is waited for once, and the answer agrees with itself.

        Raises:
            RLMemoryError: no engine answers.
        """
        found = self._asked()
        states = [state for state in found if isinstance(state, dict)]
        if not states:
            raise next((one for one in found if isinstance(one, RLMemoryError)), UnsupportedError("no engine tells"))
        versions = {version for state in states for version in str(state["weight_version"]).split(", ")}
        reasons = [state["reason"] for state in states if state["reason"] is not None]
        if reasons and self._updating.locked():
            reasons = ["updating"]
        return {
            "content": max((state["content"] for state in states), key=CONTENTS.index),
            "weight_version": ", ".join(sorted(versions)),
            "admitting": any(state["admitting"] for state in states),
            "reason": min(reasons, key=lambda reason: reason != "paused", default=None),
            "engines": [{"ranks": [{"device": device} for device in self.devices()]}],
            "behind": told(found),
        }

    def post_update(self, body: dict[str, Any]) -> dict[str, Any]:
        """Take an update from the trainer, and pass it on.

        Args:
            body: As for an engine's `/update_weights_from_ipc`.

        Returns: `engines`, the answer of each engine or `None`; and `failed`, for each engine without the weights its
        place `engine`, `error` and `state`.

        Raises:
            StateConflictError: another update is under way.
            RLMemoryError: no engine has got the weights, or the trainer has failed. `details["engines"]` names each.
        """
        if not self._updating.acquire(blocking=False):
            raise StateConflictError("the relay passes another update on")
        try:
            timeout_s = DEFAULT_TIMEOUT_S if body.get("timeout_s") is None else body["timeout_s"]
            places = body["endpoints"].get(self._device, body["endpoints"].get("*"))
            if not places:
                raise InvalidRequestError(f"endpoints has no socket for {self._device}", field="endpoints")
            sock = dial(places_of(places), self._hosts, timeout_s)
            incoming = Incoming(wire.Connection(sock, "the trainer"), self._device, body["token"], timeout_s)
            try:
                return self._pass_on(incoming, body)
            except Exception as error:
                incoming.fail(wire.as_update_error(error))
                raise
            finally:
                incoming.close()
        finally:
            self._updating.release()

    def _pause(self, mode: str, trainer_s: float) -> set[int]:
        """Close the engines that admit requests. Returns the places of those that may have been open."""
        states = list(enumerate(told(self._asked(trainer_s / 8))))
        admitting = [place for place, state in states if state is not None and state["admitting"]]
        engines = [self._engines[place] for place in admitting]
        answers = on_each(engines, lambda engine: engine.sleep(level=Level.PAUSE.value, mode=mode), trainer_s / 4)
        # A conflict is with another caller's transition. After other errors the engine may have carried the call out.
        self._to_open |= {
            place for place, one in zip(admitting, answers, strict=True) if not isinstance(one, StateConflictError)
        }
        return {place for place, state in states if state is None or state["admitting"]}

    def _resume(self, behind: set[int], timeout_s: float) -> list[Outcome]:
        """Open what a relay has closed, but for `behind`. Returns the failures; the next update tries again."""
        places = sorted(self._to_open - behind)
        found = dict(zip(places, on_each([self._engines[place] for place in places], resumed, timeout_s), strict=True))
        self._to_open -= {place for place, one in found.items() if isinstance(one, dict)}
        errors = {place: one for place, one in found.items() if isinstance(one, RLMemoryError)}
        return failed_with(errors) + [one for place, answer in found.items() for one in behind_relay(answer, 0, place)]

    def _pass_on(self, incoming: Incoming, body: dict[str, Any]) -> dict[str, Any]:
        mode = body.get("mode") or PauseMode.KEEP.value
        incoming.open()
        behind = self._left_behind(incoming.trainer_s / 8)
        were_open: set[int] = set()
        try:
            were_open = self._pause(mode, incoming.trainer_s)
            report = push_from_all(
                self._engines,
                incoming,
                partial=incoming.manifest.partial,
                weight_version=body.get("weight_version"),
                mode=mode,
                base_version=body.get("base_version"),
                # While the trainer waits for one message, an engine may fall silent, and another one after it.
                timeout_s=incoming.trainer_s / 2,
                on_failure="continue",
                **self._options,
            )
        except Exception as error:
            details = error.details if isinstance(error, RLMemoryError) else {}
            missed = {one["engine"] for one in details.get("engines", ()) if one["error"] is not None}
            # No engine has the new weights: the update leaves those open that were, and a `wake_up` may open them.
            self._behind |= missed - self._to_open - were_open
            self._resume(behind, incoming.trainer_s / 4)
            raise
        failed: list[EngineFailure] = report["failed"]
        self._behind = {failure.engine for failure in failed if not failure.behind}
        self._untold.clear()
        self._to_open |= self._behind & were_open
        left_out = sorted(self._behind)
        try:
            incoming.done(report)  # first: the trainer waits as long again for the answer
        finally:
            close_s = min(CLOSE_S, incoming.trainer_s / 8)
            engines = [self._engines[place] for place in left_out]
            answers = on_each(engines, lambda engine: closed(engine, close_s), close_s + 1)
            unopened = self._resume(self._behind, incoming.trainer_s / 2)
        states = {place: one for place, one in zip(left_out, answers, strict=True) if isinstance(one, dict)}
        without = [
            Outcome(
                0,
                one.engine,
                record_of(one.error),
                one.state if one.behind else states.get(one.engine, one.state),
                one.behind,
            )
            for one in failed
        ]
        return {
            "engines": msgspec.to_builtins(report["engines"], enc_hook=str),
            "failed": relayed([*without, *unopened]),
        }


def told(found: Sequence[dict[str, Any] | RLMemoryError | None]) -> list[dict[str, Any] | None]:
    """The states that engines have told; `None` for one that has not."""
    return [state if isinstance(state, dict) else None for state in found]


def failed_with(errors: Mapping[int, RLMemoryError]) -> list[Outcome]:
    """The outcomes of engines that have failed, by their places."""
    return [Outcome(0, place, record_of(error)) for place, error in errors.items()]


def resumed(engine: EngineHandle) -> dict[str, Any] | None:
    """Open a paused engine, unless tags of it are asleep or its weights are not valid.

    Returns: its answer, if it is open; of a relay that has opened the paused ones of its engines. `None` if it is not.
    """
    state = state_of(engine)
    if state is None or state["reason"] == "updating":
        return None
    if state["reason"] == "paused":
        # Their weights are awake, and any wake ends a pause. It must not wake the caches of others behind a relay.
        answer = engine.wake_up([Tag.WEIGHTS.value])
        return answer if isinstance(answer, dict) else {}
    return {} if state["admitting"] else None


def kept_closed(engine: EngineHandle) -> dict[str, Any] | None:
    """Close an engine that has missed an update, if a call that ended late has opened it. Returns as `closed`."""
    state = state_of(engine)
    return closed(engine) if state is not None and state["admitting"] else state
