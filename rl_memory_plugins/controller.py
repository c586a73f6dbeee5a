"""The state machine of one engine: every transition of all its ranks goes through here, one at a time.

The controller runs where the engine's scheduler runs: in vLLM's engine core, in each of SGLang's schedulers.
It closes admission, lets the engine drain, has all ranks act in two phases, shows the result on the status
board and opens admission again when the rule of `admission.py` holds; with data-parallel peers it schedules again
at their client's `Resume`. Every command gets a reply, an error too; after any error the engine is in a state that
the board names, and the next correct command works.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

import msgspec

from rl_memory_plugins import admission, commands
from rl_memory_plugins.board import StatusBoard
from rl_memory_plugins.commands import AnyCommand, error_reply
from rl_memory_plugins.coordination import RankGroup, abort, commit, prepare, raise_failures
from rl_memory_plugins.errors import (
    DrainTimeoutError,
    InvalidRequestError,
    RLMemoryError,
    StateConflictError,
)
from rl_memory_plugins.records import (
    INITIAL_VERSION,
    LONGEST_VERSION,
    UNKNOWN,
    EngineStatus,
    RankStatus,
    Reply,
    Report,
    TagChange,
)
from rl_memory_plugins.tags import Content, Level, PauseMode, Tag

logger = logging.getLogger(__name__)

#: Every report names all steps of its operation; those that did not run stay 0.0.
STEPS = {
    "sleep": ("drain", "synchronize", "backup", "release", "total"),
    "wake_up": ("reserve", "map", "restore", "total"),
    "update_weights": ("drain", "connect", "validate", "wait", "load", "finish", "total"),
}


class EngineHooks(Protocol):
    """What the controller asks of an engine. An adapter implements it and decides nothing."""

    def drain(self, mode: PauseMode) -> Future[None]:
        """Stop scheduling, deal with running requests by `mode`; done once no work touches the device.

        Raises:
            UnsupportedError: this version of the engine cannot do this mode; nothing happened.
            StateConflictError: it cannot now; nothing happened.
        """

    def resume(self, *, lift_pause: bool) -> None:
        """Schedule again; kept requests go on. Called only when the admission rule holds.

        Args:
            lift_pause: Also lift a pause that was made through the engine's own API, as its own wake does.
        """

    def reset_caches(self) -> None:
        """Forget everything that was computed with the old weights or lies in the KV cache."""

    def afterwards(self, act: Callable[[], None]) -> None:
        """Call `act`, which does not raise, once the reply that is being made has been sent. Nobody waits for it."""

    def show(self, asleep_tags: list[str], weight_version: str) -> None:
        """Mirror the state into the engine's own fields, for its own code that looks at them."""


class _Held(NamedTuple):
    """A transition between its two phases; the engines of all data-parallel ranks decide on the second together."""

    ticket: str
    name: str
    finish: Callable[[bool], Any]


class _Operation:
    """One transition from its command to its reply.

    Args:
        ticket: Where data-parallel engines do it together: none of them resumes by itself after it.
        call: Names it for `CancelDrain`.
    """

    def __init__(self, name: str, ticket: str = "", call: str = "") -> None:
        self.name = name
        self.ticket = ticket
        self.call = call
        self.reply: Future[bytes] = Future()
        self.seconds = dict.fromkeys(STEPS[name], 0.0)
        self.cancelled = False
        self._start = time.perf_counter()

    def elapsed(self) -> float:
        return time.perf_counter() - self._start

    def add_seconds(self, replies: list[Reply[Any]]) -> None:
        """Add the steps the ranks ran; the slowest rank counts."""
        for reply in replies:
            for step, seconds in reply.result["seconds"].items():
                self.seconds[step] = max(self.seconds.get(step, 0.0), seconds)


class Controller:
    """Obeys the commands of `commands.py` for one engine.

    Args:
        ranks: The engine's ranks.
        engine: The engine itself.
        board: Where the status is shown; `None` on ranks that run the controller in step but do not report.
        engine_rank: This engine's data-parallel rank.
        update_timeout_s: How long the trainer may be silent during an update whose command does not say.
    """

    def __init__(
        self,
        ranks: RankGroup,
        engine: EngineHooks,
        board: StatusBoard | None,
        engine_rank: int = 0,
        *,
        update_timeout_s: float,
    ) -> None:
        self._ranks = ranks
        self._engine = engine
        self._board = board
        self._engine_rank = engine_rank
        self._update_timeout_s = update_timeout_s
        self._weight_version = INITIAL_VERSION
        self._updates = 0
        self._paused = False
        self._busy = ""
        self._draining: list[_Operation] = []
        self._drained: dict[str, str] = {}  # by ticket: the operations for which this engine stays drained
        self._held: _Held | None = None
        self._handlers: dict[type, Callable[[Any], Future[bytes]]] = {
            commands.Sleep: self._sleep,
            commands.WakeUp: self._wake_up,
            commands.UpdateWeights: self._update_weights,
            commands.Drain: self._drain,
            commands.Decide: self._decide,
            commands.CancelDrain: self._cancel_drain,
            commands.Resume: self._resume,
            commands.Checksums: self._checksums,
            commands.Hello: self._hello,
        }
        self.status = EngineStatus(ranks=[], engine_rank=engine_rank)
        self.refresh()

    # -- the face -------------------------------------------------------------------------------------------

    def execute(self, payload: bytes) -> Future[bytes]:
        """Obey an encoded command; the future holds the encoded reply. Neither ever raises."""
        try:
            command = commands.decode_command(payload)
        except msgspec.MsgspecError as error:
            return self._refused(InvalidRequestError(f"not a command: {error}"))
        return self.obey(command)

    def obey(self, command: AnyCommand) -> Future[bytes]:
        try:
            return self._handlers[type(command)](command)
        except Exception as error:
            if not isinstance(error, RLMemoryError):
                logger.exception("%s failed", type(command).__name__)
            return self._refused(error)

    def refusal(self) -> RLMemoryError | None:
        """Why the engine does not admit requests now, or `None` if it does."""
        return admission.refusal(self.status)

    def require_free(self) -> None:
        """Check that no operation is between its two phases, which what is done to the ranks now would not know of.

        Raises:
            StateConflictError: one is.
        """
        if self._held is not None:
            raise StateConflictError(f"{self._held.name} waits for the decision of its second phase")

    def refresh(self) -> None:
        """Ask all ranks for their state and show it."""
        replies = raise_failures(self._ranks.call("status"))
        if self._busy == UNKNOWN:
            self._busy = self._under_way()
        self._show_ranks(replies)

    def _refresh_or_close(self) -> None:
        """Refresh, at the end of an operation: what the board showed meanwhile must not stay."""
        try:
            self.refresh()
            return
        except RLMemoryError:
            logger.exception("the ranks did not say how they are; they are asked once more")
        try:
            self.refresh()
        except RLMemoryError:
            self._busy = UNKNOWN
            self._show(self.status.ranks)
            raise

    def _account(self) -> None:
        """Show what is left on the devices, which takes too long to be found out within a sleep."""
        try:
            self._show_ranks(raise_failures(self._ranks.call("account")))
        except Exception:
            logger.exception("what is left on the devices is not known")

    def note_foreign_changes(self, weight_version: str | None = None, *, paused: bool = False) -> None:
        """Others may have changed the ranks, e.g. loaded all weights: look, and schedule again if all is well.

        All data-parallel engines are asked this at a time, so those that were open but waited for a peer go on too.

        Args:
            weight_version: What they call the weights that are there now, if they said.
            paused: The engine's own pause stands. What it holds in its middle is kept over an update of the engine's
                own, as without us.
        """
        if weight_version:  # whatever others take for a name must fit
            self._weight_version = weight_version[:LONGEST_VERSION].encode(errors="replace").decode()
        was_closed = self.refusal() is not None
        self.refresh()
        self._resume_if_admitting(lift_pause=False)
        kept = paused and self.status.content is Content.UPDATING
        if not was_closed and self.refusal() is not None and not kept:
            self._engine.drain(PauseMode.ABORT)  # what runs would go on with a mixture of weights

    # -- commands -------------------------------------------------------------------------------------------

    def _sleep(self, command: commands.Sleep) -> Future[bytes]:
        level, tags, mode = command.level, command.tags, command.mode
        self.require_free()
        if mode is PauseMode.KEEP:
            self._require_none_waiting(command.hold)
        operation = _Operation("sleep", command.hold, command.call)

        def act() -> Any:
            self.require_free()
            if level is not Level.PAUSE and Tag.KV_CACHE in tags:
                self._engine.reset_caches()
            prepare(self._ranks, "sleep", level=int(level), tags=[tag.value for tag in tags])
            return self._decided(operation, finish)

        def finish(agreed: bool) -> Any:
            if not agreed:
                return abort(self._ranks, "sleep")
            replies = commit(self._ranks, "sleep")
            self._paused = self._paused or level is Level.PAUSE
            return self._report(operation, replies)

        return self._drain_then(operation, mode, act)

    def _wake_up(self, command: commands.WakeUp) -> Future[bytes]:
        tags = command.tags
        self.require_free()
        self._require_none_waiting(command.hold)
        operation = _Operation("wake_up", command.hold)

        def act() -> Any:
            prepare(self._ranks, "wake", tags=[tag.value for tag in tags])
            return self._decided(operation, finish)

        def finish(agreed: bool) -> Any:
            if not agreed:
                return abort(self._ranks, "wake")
            try:
                replies = commit(self._ranks, "wake")
            except RLMemoryError:
                paused, self._paused = self._paused, True  # the engine's own work may be left: the next wake does it
                self.refresh()
                if self.status.asleep_tags():
                    self._paused = paused
                raise
            self.refresh()
            if not self.status.asleep_tags():
                self._paused = False
            return self._report(operation, replies)

        self._run(operation, act)
        return operation.reply

    def _update_weights(self, command: commands.UpdateWeights) -> Future[bytes]:
        mode = command.mode
        self.require_free()
        self._require_none_waiting(command.hold)
        if Tag.WEIGHTS.value in self.status.asleep_tags():
            raise StateConflictError(
                "the weights are asleep: wake_up(tags=['weights']) before an update",
                asleep=self.status.asleep_tags(),
            )
        operation = _Operation("update_weights", command.hold, command.call)
        received: list[Reply[Any]] = []

        def act() -> Any:
            self.require_free()
            received[:] = self._ranks.call(
                "receive_weights",
                endpoints=command.endpoints,
                token=command.token,
                timeout_s=self._update_timeout_s if command.timeout_s is None else command.timeout_s,
            )
            try:
                raise_failures(received)
            except RLMemoryError:
                self._ranks.call("finish_update", complete=False)
                raise
            return self._decided(operation, finish)

        def finish(agreed: bool) -> Any:
            start = time.perf_counter()
            try:
                if agreed:  # first, for new weights must never answer from what the old ones left in a cache
                    self._engine.reset_caches()
            except BaseException:
                self._ranks.call("finish_update", complete=False)
                raise
            raise_failures(self._ranks.call("finish_update", complete=agreed))
            if not agreed:
                return None
            self._updates += 1
            self._weight_version = command.weight_version or str(self._updates)
            operation.seconds["finish"] = time.perf_counter() - start
            return self._report(
                operation,
                received,
                weight_version=self._weight_version,
                ranks=[reply.result for reply in received],
            )

        return self._drain_then(operation, mode, act)

    def _drain(self, command: commands.Drain) -> Future[bytes]:
        self.require_free()
        operation = _Operation(command.operation, command.ticket, command.call)

        def act() -> Any:  # also while another operation is held, whose turn it is first
            self._drained[operation.ticket] = operation.name
            return {"drained": operation.elapsed()}

        return self._drain_then(operation, PauseMode.WAIT, act)

    def _decide(self, command: commands.Decide) -> Future[bytes]:
        held = self._held
        if held is not None and command.ticket == held.ticket:
            self._held = None
            operation = _Operation(held.name, held.ticket)
            self._run(operation, lambda: held.finish(command.commit))
        elif command.ticket in self._drained and not command.commit:
            operation = _Operation(self._drained.pop(command.ticket), command.ticket)
            self._run(operation, lambda: None)
        else:  # perhaps another caller's operation is held
            raise StateConflictError("no such operation waits for a decision")
        return operation.reply

    def _cancel_drain(self, command: commands.CancelDrain) -> Future[bytes]:
        waiting = [one for one in self._draining if command.call in ("", one.call)]
        self._draining = [one for one in self._draining if one not in waiting]
        for operation in waiting:
            operation.cancelled = True
        error: Exception = DrainTimeoutError(
            "running requests did not finish within drain_timeout_s, and nothing was released: "
            "call with mode='abort' or 'keep', or allow them more time"
        )
        try:
            if waiting:
                self._busy = self._under_way()
                self._refresh_or_close()
                if not any(operation.ticket for operation in waiting):
                    self._resume_if_admitting(lift_pause=False)
        except Exception as failure:
            error = failure
        for operation in waiting:
            operation.reply.set_result(self._encoded(self._failure(operation.name, error)))
        return self._answered({"cancelled": [operation.name for operation in waiting]})

    def _resume(self, command: commands.Resume) -> Future[bytes]:
        self._resume_if_admitting(lift_pause=command.lift_pause)
        return self._answered(None)

    def _checksums(self, command: commands.Checksums) -> Future[bytes]:
        self.require_free()
        replies = raise_failures(self._ranks.call("checksums"))
        return self._answered([reply.result for reply in replies])

    def _hello(self, command: commands.Hello) -> Future[bytes]:
        return self._answered({"board": self._board.path if self._board else None, "status": self.status})

    # -- how an operation runs --------------------------------------------------------------------------------

    def _drain_then(self, operation: _Operation, mode: PauseMode, act: Callable[[], Any]) -> Future[bytes]:
        self._begin(operation.name)  # first: whoever answers a request that the drain ends, looks up why
        try:
            drained = self._engine.drain(mode)
        except BaseException:
            self._busy = self._under_way()
            self._show(self.status.ranks)
            raise
        self._draining.append(operation)

        def when_drained(done: Future[None]) -> None:
            if operation.cancelled:
                return
            self._draining.remove(operation)
            operation.seconds["drain"] = operation.elapsed()

            def run() -> Any:
                done.result()
                return act()

            self._run(operation, run)

        drained.add_done_callback(when_drained)
        return operation.reply

    def _run(self, operation: _Operation, act: Callable[[], Any]) -> None:
        """Run the body of an operation. Whatever happens the state is shown first, then the reply is sent."""
        self._begin(operation.name)
        try:
            reply: Reply[Any] = Reply(rank=self._engine_rank, result=msgspec.to_builtins(act()))
        except Exception as error:
            reply = self._failure(operation.name, error)
        self._busy = self._under_way()
        try:
            self._refresh_or_close()
            if not operation.ticket:
                if reply.error is not None and self.refusal() is None:
                    # Peers of which this client knows nothing may resume in step with it, once it has the answer.
                    operation.reply.set_result(self._encoded(reply))
                self._resume_if_admitting(lift_pause=operation.name == "wake_up")
        except Exception as error:
            reply = self._failure(operation.name, error)
        if not operation.reply.done():
            operation.reply.set_result(self._encoded(reply))
        if self.status.asleep_tags():
            self._engine.afterwards(self._account)

    def _decided(self, operation: _Operation, finish: Callable[[bool], Any]) -> Any:
        """Finish at once, or hold the second phase until the `Decide` with the ticket comes."""
        if not operation.ticket:
            return finish(True)
        self._drained.pop(operation.ticket, None)
        self._held = _Held(operation.ticket, operation.name, finish)
        return {"held": True}

    def _under_way(self) -> str:
        """The name of an operation that has begun here and not ended; empty if there is none."""
        if self._held is not None:
            return self._held.name
        return next(iter(self._waiting()), "")

    def _waiting(self, besides: str = "") -> list[str]:
        """The names of operations that wait for running requests, here or on a data-parallel peer.

        Args:
            besides: The ticket of one that is left out.
        """
        drained = (name for ticket, name in self._drained.items() if ticket != besides)
        return [*(operation.name for operation in self._draining), *drained]

    def _require_none_waiting(self, ticket: str) -> None:
        """Requests that somebody waits for must go on. What this operation itself has waited for is over."""
        waiting = self._waiting(besides=ticket)
        if waiting:
            raise StateConflictError(
                "a call is still waiting for running requests; let it end, or sleep(mode='abort')", waiting=waiting
            )

    def _begin(self, name: str) -> None:
        self._busy = name
        self._show(self.status.ranks)

    def _resume_if_admitting(self, *, lift_pause: bool) -> None:
        """Schedule again if the admission rule holds."""
        if self.refusal() is None:
            self._engine.resume(lift_pause=lift_pause)

    # -- what is shown ----------------------------------------------------------------------------------------

    def _show_ranks(self, replies: list[Reply[Any]]) -> None:
        self._show([msgspec.convert(reply.result, RankStatus) for reply in replies])

    def _show(self, ranks: list[RankStatus]) -> None:
        self.status = EngineStatus(
            ranks=ranks,
            weight_version=self._weight_version,
            paused=self._paused,
            busy=self._busy,
            engine_rank=self._engine_rank,
        )
        if self._board is not None:
            self._board.publish(self.status)  # first: what is refused depends on it
        self._engine.show(self.status.asleep_tags(), self._weight_version)

    def _report(self, operation: _Operation, replies: list[Reply[Any]], **details: Any) -> Report:
        operation.add_seconds(replies)
        operation.seconds["total"] = operation.elapsed()
        changes = [
            msgspec.convert(change, TagChange) for reply in replies for change in reply.result.get("changes", ())
        ]
        return Report(changes=changes, seconds=operation.seconds, details=details)

    # -- replies ----------------------------------------------------------------------------------------------

    def _answered(self, result: Any) -> Future[bytes]:
        return _done(self._encoded(Reply(rank=self._engine_rank, result=msgspec.to_builtins(result))))

    def _refused(self, error: BaseException) -> Future[bytes]:
        return _done(self._encoded(error_reply(self._engine_rank, error)))

    def _failure(self, name: str, error: BaseException) -> Reply[Any]:
        if not isinstance(error, RLMemoryError):
            logger.error("%s failed", name, exc_info=error)
        return error_reply(self._engine_rank, error)

    @staticmethod
    def _encoded(reply: Reply[Any]) -> bytes:
        return commands.encode_reply(reply)


def _done(reply: bytes) -> Future[bytes]:
    future: Future[bytes] = Future()
    future.set_result(reply)
    return future
