"""Passes updates on to the engines of one host, so that the trainer's link carries the weights once.

For the trainer a relay is an engine with one rank, which needs all tensors whole. For its engines it is the trainer:
the buckets that arrive are the source of an update with `on_failure="continue"`. It keeps no weights.

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
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import torch

from rl_memory_plugins.client import TRANSITION_S
from rl_memory_plugins.errors import (
    InvalidRequestError,
    RLMemoryError,
    StateConflictError,
    UnsupportedError,
    WeightUpdateError,
)
from rl_memory_plugins.tags import Content, Level, PauseMode, Tag
from rl_memory_plugins.trainer.engine_handle import EngineHandle, as_engines
from rl_memory_plugins.trainer.outcomes import STATE_S, on_each, record_of, state_of
from rl_memory_plugins.trainer.participants import CLOSE_S, closed
from rl_memory_plugins.trainer.update import push_from_all, require_options
from rl_memory_plugins.weights import wire
from rl_memory_plugins.weights.addresses import places_of
from rl_memory_plugins.weights.buffers import AttachedBuffer, StreamedAttached, attach
from rl_memory_plugins.weights.dial import dial
from rl_memory_plugins.weights.entries import next_spec, tensor_of
from rl_memory_plugins.weights.manifest import Manifest, TensorSpec
from rl_memory_plugins.weights.sender import DEFAULT_TIMEOUT_S
from rl_memory_plugins.weights.slices import Slice
from rl_memory_plugins.weights.update_hosts import UpdateHosts

CONTENTS = [Content.VALID, Content.STALE, Content.UPDATING, Content.FAILED]
"""From best to worst."""


ANSWER_S = 0.9 * TRANSITION_S
"""How long the engines of a relay may take for a sleep or a wake. The caller, which by default gives up after
`TRANSITION_S`, then still hears which of them have obeyed."""


class Relay:
    """The engines of one host as one engine, with the calls that a trainer makes. Runs on that host.

    An engine that an update has not reached is closed, and stays closed until an update reaches it. Engines that admit
    requests are paused before an update and opened behind it: if this process dies meanwhile, nobody else would close
    those that the update does not reach. What a relay has closed it opens, if not behind this update, then behind the
    next that reaches the engine; what a caller has closed through the relay is the caller's to open.

    For a relay that starts, these engines have missed an update: those that are paused; those that are closed, if
    engines have different versions; and those that have not told their state yet.

    Args:
        engines: The engines; see `RolloutHandoff`.
        hosts: Where the relay may connect to; its own host alone by default.
        **options: Options of `push_from_all` for the updates of the engines, e.g. `bucket_bytes`.

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

        def wake(place: int) -> None:
            self._engines[place].wake_up(tags)
            if place in behind:  # open now, if these tags were all that slept
                kept_closed(self._engines[place])

        answer = self._each(places, wake)
        self._to_open.update(behind)  # the caller wants them open
        answer["failed"] += [{"engine": place, "error": record_of(error)} for place, error in errors.items()]
        return answer

    def _left_behind(self) -> set[int]:
        """The engines that no `wake_up` opens. A relay before this one may have died with engines that are behind."""
        if self._untold:
            found = self._asked()
            versions = {state["weight_version"] for state in found if isinstance(state, dict)}
            for place in sorted(self._untold):
                state = found[place]
                if isinstance(state, RLMemoryError) or (state is not None and state["reason"] == "updating"):
                    continue
                self._untold.discard(place)
                if state is None or state["admitting"] or (state["reason"] != "paused" and len(versions) < 2):
                    self._behind.discard(place)
                    self._to_open.discard(place)
        return set(self._behind)

    def states(self) -> list[dict[str, Any] | None]:
        """`EngineClient.weights_state` of each engine; `None` for one that does not tell."""
        return [state if isinstance(state, dict) else None for state in self._asked()]

    def _asked(self) -> list[dict[str, Any] | RLMemoryError | None]:
        return on_each(self._engines, state_of, STATE_S)

    def _each(self, places: Sequence[int], call: Callable[[int], Any]) -> dict[str, Any]:
        """Have a caller's call made at these places. Those that obey are the caller's to open."""
        answers = on_each(places, call, ANSWER_S)
        errors = {place: one for place, one in zip(places, answers, strict=True) if isinstance(one, RLMemoryError)}
        if errors and len(errors) == len(places):
            raise next(iter(errors.values()))
        self._to_open.difference_update(set(places) - errors.keys())
        return {"failed": [{"engine": place, "error": record_of(error)} for place, error in errors.items()]}

    def weights_state(self) -> dict[str, Any]:
        """As `EngineClient.weights_state`, of the engines that answer: the worst content; whether any admits requests.

        Raises:
            RLMemoryError: no engine answers.
        """
        memory = self.memory()
        return {name: memory[name] for name in ("content", "weight_version", "admitting", "reason")}

    def memory(self) -> dict[str, Any]:
        """`weights_state`; `engines`, the relay itself as one engine; and `behind`, the `states` of its engines.

        Each engine is asked once, so that one which hangs is waited for once, and the answer agrees with itself.

        Raises:
            RLMemoryError: no engine answers.
        """
        found = self._asked()
        states = [state for state in found if isinstance(state, dict)]
        if not states:
            raise next((one for one in found if isinstance(one, RLMemoryError)), UnsupportedError("no engine tells"))
        return {
            "content": max((state["content"] for state in states), key=CONTENTS.index),
            "weight_version": ", ".join(sorted({str(state["weight_version"]) for state in states})),
            "admitting": any(state["admitting"] for state in states),
            "reason": next((state["reason"] for state in states if not state["admitting"]), None),
            "engines": [{"ranks": [{"device": device} for device in self.devices()]}],
            "behind": [state if isinstance(state, dict) else None for state in found],
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

    def _pause(self, mode: str, timeout_s: float) -> set[int]:
        """Close the engines that admit requests. Returns the places of those that may have been open."""
        states = list(enumerate(self.states()))
        admitting = [place for place, state in states if state is not None and state["admitting"]]
        engines = [self._engines[place] for place in admitting]
        answers = on_each(engines, lambda engine: engine.sleep(level=Level.PAUSE.value, mode=mode), timeout_s)
        # A conflict is with another caller's transition. After other errors the engine may have carried the call out.
        self._to_open |= {
            place for place, one in zip(admitting, answers, strict=True) if not isinstance(one, StateConflictError)
        }
        return {place for place, state in states if state is None or state["admitting"]}

    def _resume(self, behind: set[int], timeout_s: float) -> dict[int, RLMemoryError]:
        """Open what a relay has closed, but for `behind`. Returns the errors by place; the next update tries again."""
        places = sorted(self._to_open - behind)
        answers = on_each([self._engines[place] for place in places], resumed, timeout_s)
        self._to_open -= {place for place, one in zip(places, answers, strict=True) if one is True}
        return {place: one for place, one in zip(places, answers, strict=True) if isinstance(one, RLMemoryError)}

    def _pass_on(self, incoming: Incoming, body: dict[str, Any]) -> dict[str, Any]:
        mode = body.get("mode") or PauseMode.KEEP.value
        behind = self._left_behind()
        were_open: set[int] = set()
        try:
            incoming.open()
            were_open = self._pause(mode, incoming.trainer_s / 4)
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
        failed = report["failed"]
        self._behind = {failure.engine for failure in failed}
        self._untold.clear()
        self._to_open |= self._behind & were_open
        close_s = min(CLOSE_S, incoming.trainer_s / 8)
        left_out = [self._engines[failure.engine] for failure in failed]
        states = on_each(left_out, lambda engine: closed(engine, close_s), close_s + 1)
        unopened = self._resume(self._behind, incoming.trainer_s / 4)
        incoming.done(report)
        return {
            "engines": msgspec.to_builtins(report["engines"], enc_hook=str),
            "failed": [
                {
                    "engine": failure.engine,
                    "error": record_of(failure.error),
                    "state": state if isinstance(state, dict) else failure.state,
                }
                for failure, state in zip(failed, states, strict=True)
            ]
            + [{"engine": place, "error": record_of(error), "state": None} for place, error in unopened.items()],
        }


def resumed(engine: EngineHandle) -> bool:
    """Open a paused engine, unless tags of it are asleep or its weights are not valid. Returns whether it is open."""
    state = state_of(engine)
    if state is None:
        return False
    if state["reason"] == "paused":
        engine.wake_up()
        return True
    return bool(state["admitting"])


def kept_closed(engine: EngineHandle) -> dict[str, Any] | None:
    """Close an engine that has missed an update, if a call that ended late has opened it. Returns as `closed`."""
    state = state_of(engine)
    return closed(engine) if state is not None and state["admitting"] else state


class Incoming:
    """The tensors of an update, as they arrive from the trainer: the source of the update of the relay's engines.

    Args:
        connection: To the trainer; this object owns it.
        device, token: How the relay shows that it is the one whom the trainer waits for.
        timeout_s: The longest silence of the trainer, in seconds.

    Attributes:
        manifest: What the trainer sends, after `open`.
        trainer_s: The longest silence of the relay that the trainer bears, in seconds.
    """

    def __init__(self, connection: wire.Connection, device: str, token: str, timeout_s: float) -> None:
        self._connection = connection
        self._device = device
        self._token = token
        self._timeout_s = timeout_s
        self._buffer: AttachedBuffer | None = None
        self._cuts = False
        self._bytes = 0
        self.manifest = Manifest([], 0, 0, False)
        self.trainer_s = timeout_s

    def open(self) -> None:
        """Receive the offer. The relay takes every manifest: its engines answer for theirs when the update begins."""
        self._connection.send(wire.Hello(wire.PROTOCOL, self._device, self._token, 0), self._timeout_s)
        while self._buffer is None:
            offer, fds = self._connection.receive_with_fds(wire.Offer, wire.Ask, timeout_s=self._timeout_s)
            try:
                if isinstance(offer, wire.Offer):
                    self._buffer = attach(offer.buffer, fds, device=self._device)
                    self._cuts = bool(offer.buffer.get("slices"))
                    self.manifest, self.trainer_s = offer.manifest, float(offer.buffer["timeout_s"])
                else:
                    self._connection.send(wire.Accept([]), self._timeout_s)
            except UnsupportedError as error:
                self._connection.send(wire.Unopened(str(error)), self._timeout_s)
            finally:
                wire.close_fds(fds)

    @property
    def silence_s(self) -> float:
        """See `several.WaitingSource`: while the trainer waits for its other engines, nothing arrives here."""
        return self._timeout_s

    def specs(self) -> list[TensorSpec]:
        return self.manifest.tensors

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors. Ends after the trainer's commit, so the engines commit after the trainer.

        It begins when all engines that are left have accepted the manifest, and only then does the trainer begin.
        """
        assert self._buffer is not None
        whole: list[Slice | None] = [None] * len(self.manifest.tensors) if self._cuts else []
        self._connection.send(wire.Accept([], slices=whole), self._timeout_s)
        index = received = 0
        rows: torch.Tensor | None = None  # of a tensor that comes in several buckets
        while True:
            message = self._connection.receive(wire.Bucket, wire.Commit, timeout_s=self._timeout_s)
            if isinstance(message, wire.Commit):
                break
            assert isinstance(message, wire.Bucket)
            if not 0 <= message.slot < self.manifest.slots:
                raise WeightUpdateError(f"the trainer announced slot {message.slot}")
            if isinstance(self._buffer, StreamedAttached):
                self._buffer.receive(self._connection, message, self._timeout_s)
            for entry in message.entries:
                memory = self._buffer.memory(message.slot, entry)
                spec = next_spec(entry, (index, received), self.manifest, len(memory))
                part = tensor_of(memory, entry, spec)
                received += entry.nbytes
                self._bytes += entry.nbytes
                if entry.nbytes != spec.nbytes:
                    if rows is None:
                        rows = torch.empty(spec.shape, dtype=part.dtype, device="cpu")
                    rows.narrow(0, entry.start // spec.row_nbytes, len(part)).copy_(part)
                if received == spec.nbytes:
                    yield spec.name, part if rows is None else rows
                    index, received, rows = index + 1, 0, None
                del memory, part
            self._connection.send(wire.Ack(message.slot), self._timeout_s)
        if index != len(self.manifest.tensors):
            missing = [spec.name for spec in self.manifest.tensors[index:]]
            raise WeightUpdateError(f"the trainer committed without {missing[0]}", missing=missing)

    def done(self, report: dict[str, Any]) -> None:
        """Tell the trainer that the update is over. `report` is that of the engines' update."""
        assert self._buffer is not None
        found = {
            "rank": 0,
            "device": self._device,
            "bytes": self._bytes,
            "tensors": len(self.manifest.tensors),
            "partial": self.manifest.partial,
            "unused": report["unused"],
            "transport": self._buffer.transport,
            "seconds": {},
            "relayed": msgspec.to_builtins(report["receivers"], enc_hook=str),
        }
        self._connection.send(wire.Done(found), self._timeout_s)

    def fail(self, error: RLMemoryError) -> None:
        self._connection.fail(error)

    def close(self) -> None:
        if self._buffer is not None:
            self._buffer.close()
        self._connection.close()
