"""The state machine of one engine. It runs the transitions of all ranks, one at a time.

The controller runs beside the scheduler of the engine: in vLLM's engine core, and in each of SGLang's schedulers. For a
transition it closes admission, lets the engine drain, makes all ranks act in two phases, publishes the result on the
status board, and opens admission again if the rule of `admission.py` holds. With data-parallel peers it schedules again
at the `Resume` of their client. Every command gets a reply. After an error the board names the state of the engine, and
the next correct command works.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from rl_memory_plugins import admission, commands
from rl_memory_plugins.board import StatusBoard
from rl_memory_plugins.capabilities import EVERYTHING, Capabilities
from rl_memory_plugins.commands import AnyCommand, done, encode_reply, error_reply
from rl_memory_plugins.coordination import RankGroup, abort, commit, prepare, raise_failures
from rl_memory_plugins.engine_hooks import EngineHooks
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
)
from rl_memory_plugins.tags import Content, Level, PauseMode, Tag
from rl_memory_plugins.transition import Held, PendingTransition

logger = logging.getLogger(__name__)


class Controller:
    """Obeys the commands of `commands.py` for one engine.

    Args:
        ranks: The ranks of the engine.
        engine: The scheduler of the engine.
        board: The status board; `None` on ranks that run the controller in step and publish nothing.
        engine_rank: The data-parallel rank of this engine.
        update_timeout_s: The longest silence of a trainer, for updates whose command has no `timeout_s`.
        capabilities: The abilities of the engine. The ranks add theirs.
    """

    def __init__(
        self,
        ranks: RankGroup,
        engine: EngineHooks,
        board: StatusBoard | None,
        engine_rank: int = 0,
        *,
        update_timeout_s: float,
        capabilities: Capabilities = EVERYTHING,
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
        self._draining: list[PendingTransition] = []
        self._drained: dict[str, str] = {}  # by ticket: the names of transitions that this engine stays drained for
        self._held: Held | None = None
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
        declared = [msgspec.convert(one.result, Capabilities) for one in raise_failures(ranks.call("capabilities"))]
        self.capabilities = msgspec.structs.replace(capabilities, ranks=len(declared)).merged(declared)
        self.status = EngineStatus(ranks=[], engine_rank=engine_rank, capabilities=self.capabilities)
        self.refresh()

    # -- entry points -------------------------------------------------------------------------------------------

    def execute(self, payload: bytes) -> Future[bytes]:
        """Obey an encoded command. The future holds the encoded reply; it never holds an exception."""
        try:
            command = commands.decode_command(payload)
        except msgspec.MsgspecError as error:
            return done(error_reply(self._engine_rank, InvalidRequestError(f"not a command: {error}")))
        return self.obey(command)

    def obey(self, command: AnyCommand) -> Future[bytes]:
        try:
            return self._handlers[type(command)](command)
        except Exception as error:
            return done(self._failed(type(command).__name__, error))

    def refusal(self) -> RLMemoryError | None:
        """Why the engine does not admit requests now; `None` if it does."""
        return admission.refusal(self.status)

    def require_free(self) -> None:
        """Check that no transition is between its two phases: the ranks must not change then.

        Raises:
            StateConflictError: a transition waits for its second phase.
        """
        if self._held is not None:
            raise StateConflictError(f"{self._held.name} waits for the decision of its second phase")

    def refresh(self) -> None:
        """Ask all ranks for their state, and publish it."""
        replies = raise_failures(self._ranks.call("status"))
        if self._busy == UNKNOWN:
            self._busy = self._under_way()
        self._show_ranks(replies)

    def _refresh_content(self, contents: Sequence[tuple[str, int]] | None) -> None:
        """Publish content and epoch alone: trainers load tensor by tensor, and the whole status takes longer."""
        if self._busy == UNKNOWN:
            self.refresh()
            return
        if contents is None:
            contents = [reply.result for reply in raise_failures(self._ranks.call("content"))]
        self._show(
            [
                msgspec.structs.replace(rank, content=Content(content), content_epoch=epoch)
                for rank, (content, epoch) in zip(self.status.ranks, contents, strict=True)
            ]
        )

    def _refresh_or_close(self) -> None:
        """Refresh at the end of a transition, so that the board does not keep the state of its middle."""
        try:
            self.refresh()
            return
        except RLMemoryError:
            logger.exception("the ranks did not report their state; the controller asks them once more")
        try:
            self.refresh()
        except RLMemoryError:
            self._busy = UNKNOWN
            self._show(self.status.ranks)
            raise

    def _account(self) -> None:
        """Publish the memory that is left on the devices. Measuring it takes too long for a sleep."""
        try:
            self._show_ranks(raise_failures(self._ranks.call("account")))
        except Exception:
            logger.exception("the memory that is left on the devices could not be measured")

    def note_foreign_changes(
        self,
        weight_version: str | None = None,
        *,
        paused: bool = False,
        contents: Sequence[tuple[str, int]] | None = None,
    ) -> None:
        """Publish changes that the engine's own calls have made, and schedule again if the admission rule holds.

        All data-parallel engines call this at the same time, so an engine that waited for a peer goes on too.

        Args:
            weight_version: The version that the caller gave the new weights, if it gave one.
            paused: The engine is paused by its own API. Requests in that pause are kept over an update of the engine's
                own, as on an engine without the plugin.
            contents: The content of each rank's weights and its epoch, if known. The ranks are asked otherwise.
        """
        if weight_version:  # others check neither its length nor its characters
            self._weight_version = weight_version[:LONGEST_VERSION].encode(errors="replace").decode()
        was_closed = self.refusal() is not None
        self._refresh_content(contents)
        self._resume_if_admitting(lift_pause=False)
        kept = paused and self.status.content is Content.UPDATING
        if not was_closed and self.refusal() is not None and not kept:
            self._engine.drain(PauseMode.ABORT)  # running requests would go on with a mixture of weights

    # -- commands -------------------------------------------------------------------------------------------

    def _sleep(self, command: commands.Sleep) -> Future[bytes]:
        level, tags, mode = command.level, command.tags, command.mode
        if level is Level.DISCARD and Tag.WEIGHTS in tags:
            self.capabilities.require_updatable("sleep(level=2) of the weights")
        self.require_free()
        if mode is PauseMode.KEEP:
            self._require_none_waiting(command.hold)
        operation = PendingTransition("sleep", command.hold, command.call)

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
            return operation.report(replies)

        return self._drain_then(operation, mode, act)

    def _wake_up(self, command: commands.WakeUp) -> Future[bytes]:
        tags = command.tags
        self.require_free()
        self._require_none_waiting(command.hold)
        operation = PendingTransition("wake_up", command.hold)

        def act() -> Any:
            prepare(self._ranks, "wake", tags=[tag.value for tag in tags])
            return self._decided(operation, finish)

        def finish(agreed: bool) -> Any:
            if not agreed:
                return abort(self._ranks, "wake")
            try:
                replies = commit(self._ranks, "wake")
            except RLMemoryError:
                paused, self._paused = self._paused, True  # `after_wake` may have failed: the next wake calls it again
                self.refresh()
                if self.status.asleep_tags():
                    self._paused = paused
                raise
            self.refresh()
            if not self.status.asleep_tags():
                self._paused = False
            return operation.report(replies)

        self._run(operation, act)
        return operation.reply

    def _update_weights(self, command: commands.UpdateWeights) -> Future[bytes]:
        mode = command.mode
        self.capabilities.require_updatable("update_weights")
        self.require_free()
        self._require_none_waiting(command.hold)
        if Tag.WEIGHTS.value in self.status.asleep_tags():
            raise StateConflictError(
                "the weights are asleep: wake_up(tags=['weights']) before an update",
                asleep=self.status.asleep_tags(),
            )
        operation = PendingTransition("update_weights", command.hold, command.call)
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
                if agreed:  # before the content is valid: caches hold results of the old weights
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
            return operation.report(
                received,
                weight_version=self._weight_version,
                ranks=[reply.result for reply in received],
            )

        return self._drain_then(operation, mode, act)

    def _drain(self, command: commands.Drain) -> Future[bytes]:
        self.require_free()
        operation = PendingTransition(command.operation, command.ticket, command.call)

        def act() -> Any:  # also while another transition is held, which goes first
            self._drained[operation.ticket] = operation.name
            return {"drained": operation.elapsed()}

        return self._drain_then(operation, PauseMode.WAIT, act)

    def _decide(self, command: commands.Decide) -> Future[bytes]:
        held = self._held
        if held is not None and command.ticket == held.ticket:
            self._held = None
            operation = PendingTransition(held.name, held.ticket)
            self._run(operation, lambda: held.finish(command.commit))
        elif command.ticket in self._drained and not command.commit:
            operation = PendingTransition(self._drained.pop(command.ticket), command.ticket)
            self._run(operation, lambda: None)
        else:  # the transition of another caller may be held
            raise StateConflictError("no transition with this ticket waits for a decision")
        return operation.reply

    def _cancel_drain(self, command: commands.CancelDrain) -> Future[bytes]:
        waiting = [one for one in self._draining if command.call in ("", one.call)]
        self._draining = [one for one in self._draining if one not in waiting]
        for operation in waiting:
            operation.cancelled = True
        error: Exception = DrainTimeoutError(
            "running requests did not finish within drain_timeout_s, and nothing was released: "
            "use mode='abort' or mode='keep', or a larger drain_timeout_s"
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
            operation.reply.set_result(encode_reply(self._failed(operation.name, error)))
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

    # -- transitions --------------------------------------------------------------------------------

    def _drain_then(self, operation: PendingTransition, mode: PauseMode, act: Callable[[], Any]) -> Future[bytes]:
        self._begin(operation.name)  # first: the server looks up why the drain has ended a request
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

    def _run(self, operation: PendingTransition, act: Callable[[], Any]) -> None:
        """Run the body of a transition. Publish the state in any case, and only then send the reply."""
        self._begin(operation.name)
        try:
            reply: Reply[Any] = Reply(rank=self._engine_rank, result=msgspec.to_builtins(act()))
        except Exception as error:
            reply = self._failed(operation.name, error)
        self._busy = self._under_way()
        try:
            self._refresh_or_close()
            if not operation.ticket:
                if reply.error is not None and self.refusal() is None:
                    # Reply first: peers that this client does not know may resume in step once it has the answer.
                    operation.reply.set_result(encode_reply(reply))
                self._resume_if_admitting(lift_pause=operation.name == "wake_up")
        except Exception as error:
            reply = self._failed(operation.name, error)
        if not operation.reply.done():
            operation.reply.set_result(encode_reply(reply))
        if self.status.asleep_tags():
            self._engine.call_after_reply(self._account)

    def _decided(self, operation: PendingTransition, finish: Callable[[bool], Any]) -> Any:
        """Finish at once; or, with a ticket, hold the second phase until its `Decide` comes."""
        if not operation.ticket:
            return finish(True)
        self._drained.pop(operation.ticket, None)
        self._held = Held(operation.ticket, operation.name, finish)
        return {"held": True}

    def _under_way(self) -> str:
        """The name of a transition that has begun and not ended; empty if there is none."""
        if self._held is not None:
            return self._held.name
        return next(iter(self._waiting()), "")

    def _waiting(self, besides: str = "") -> list[str]:
        """The names of transitions that wait for running requests, here or on a data-parallel peer.

        Args:
            besides: The ticket of a transition to leave out.
        """
        drained = (name for ticket, name in self._drained.items() if ticket != besides)
        return [*(operation.name for operation in self._draining), *drained]

    def _require_none_waiting(self, ticket: str) -> None:
        """Check that no other transition waits for running requests, which must go on for it."""
        waiting = self._waiting(besides=ticket)
        if waiting:
            raise StateConflictError(
                "another call still waits for running requests: let it end, or call sleep(mode='abort')",
                waiting=waiting,
            )

    def _begin(self, name: str) -> None:
        self._busy = name
        self._show(self.status.ranks)

    def _resume_if_admitting(self, *, lift_pause: bool) -> None:
        """Schedule again if the admission rule holds."""
        if self.refusal() is None:
            self._engine.resume(lift_pause=lift_pause)

    # -- the status ----------------------------------------------------------------------------------------

    def _show_ranks(self, replies: list[Reply[Any]]) -> None:
        self._show([msgspec.convert(reply.result, RankStatus) for reply in replies])

    def _show(self, ranks: list[RankStatus]) -> None:
        self.status = EngineStatus(
            ranks=ranks,
            weight_version=self._weight_version,
            paused=self._paused,
            busy=self._busy,
            engine_rank=self._engine_rank,
            capabilities=self.capabilities,
        )
        if self._board is not None:
            self._board.publish(self.status)  # first: servers refuse requests by it
        self._engine.show(self.status.asleep_tags(), self._weight_version)

    def _answered(self, result: Any) -> Future[bytes]:
        return done(Reply(rank=self._engine_rank, result=msgspec.to_builtins(result)))

    def _failed(self, name: str, error: BaseException) -> Reply[Any]:
        if not isinstance(error, RLMemoryError):
            logger.error("%s failed", name, exc_info=error)
        return error_reply(self._engine_rank, error)
