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

from rl_memory_plugins.errors import (
    InvalidRequestError,
    RLMemoryError,
    StateConflictError,
    UnsupportedError,
    WeightUpdateError,
)
from rl_memory_plugins.tags import Content, Level, PauseMode, Tag
from rl_memory_plugins.timing import LONGEST_S
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


class Relay:
    """The engines of one host as one engine, with the calls that a trainer makes. Runs on that host.

    An engine that an update has not reached is closed, and stays closed until an update reaches it. Engines that admit
    requests are paused before an update and opened behind it: if this process dies meanwhile, nobody else would close
    those that the update does not reach. A relay that starts counts paused engines among them.

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
        self._behind: set[int] | None = None  # the engines that the last update has not reached; see `_left_behind`
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
        return self._each(everywhere, lambda engine: engine.sleep(level=level, tags=tags, mode=mode, **given))

    def wake_up(self, tags: Any = None) -> dict[str, Any]:
        """`EngineClient.wake_up` of all engines, as `sleep`. If it opens engines, those that are behind fail."""
        opens = tags is None or Tag.KV_CACHE.value in tags
        behind = self._left_behind() if opens else set()
        missed = StateConflictError("the last update has not reached the engine, which stays closed until one does")
        places = [place for place in range(len(self._engines)) if place not in behind]
        if not places:
            raise missed
        answer = self._each(places, lambda engine: engine.wake_up(tags))
        answer["failed"] += [{"engine": place, "error": record_of(missed)} for place in sorted(behind)]
        return answer

    def _left_behind(self) -> set[int]:
        """The engines that no `wake_up` opens. A relay before this one may have died with them paused."""
        if self._behind is None:
            states = enumerate(self.states())
            self._behind = {place for place, state in states if state is not None and state["reason"] == "paused"}
        return self._behind

    def states(self) -> list[dict[str, Any] | None]:
        """`EngineClient.weights_state` of each engine; `None` for one that does not tell."""
        return [state if isinstance(state, dict) else None for state in self._asked()]

    def _asked(self) -> list[dict[str, Any] | RLMemoryError | None]:
        return on_each(self._engines, state_of, STATE_S)

    def _each(self, places: Sequence[int], call: Callable[[EngineHandle], Any]) -> dict[str, Any]:
        answers = on_each([self._engines[place] for place in places], call, LONGEST_S)
        errors = {place: one for place, one in zip(places, answers, strict=True) if isinstance(one, RLMemoryError)}
        if errors and len(errors) == len(places):
            raise next(iter(errors.values()))
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

    def _pause(self, mode: str, timeout_s: float) -> list[int]:
        """Close the engines that admit requests. Returns the places of those that may be paused now."""
        admitting = [place for place, state in enumerate(self.states()) if state is not None and state["admitting"]]
        engines = [self._engines[place] for place in admitting]
        answers = on_each(engines, lambda engine: engine.sleep(level=Level.PAUSE.value, mode=mode), timeout_s)
        # A conflict is with another caller's transition. After other errors the engine may have carried the call out.
        return [place for place, one in zip(admitting, answers, strict=True) if not isinstance(one, StateConflictError)]

    def _resume(self, places: Sequence[int], timeout_s: float) -> dict[int, RLMemoryError]:
        """Undo `_pause`. Returns the errors by place."""
        answers = on_each([self._engines[place] for place in places], lambda engine: engine.wake_up(), timeout_s)
        return {place: one for place, one in zip(places, answers, strict=True) if isinstance(one, RLMemoryError)}

    def _pass_on(self, incoming: Incoming, body: dict[str, Any]) -> dict[str, Any]:
        mode = body.get("mode") or PauseMode.KEEP.value
        behind = self._left_behind()
        paused: list[int] = []
        try:
            incoming.open()
            paused += self._pause(mode, incoming.trainer_s / 4)
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
            behind |= {one["engine"] for one in details.get("engines", ()) if one["error"] is not None}
            self._resume(paused, incoming.trainer_s / 4)
            raise
        failed = report["failed"]
        self._behind = {failure.engine for failure in failed}
        states = on_each([self._engines[failure.engine] for failure in failed], closed, CLOSE_S + 1)
        reached = [place for place in paused if place not in self._behind]
        unopened = self._resume(reached, incoming.trainer_s / 4)
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
