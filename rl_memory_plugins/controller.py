"""The state machine of one engine. It runs the transitions of all ranks, one at a time.

The controller runs beside the scheduler of the engine: in vLLM's engine core, and in each of SGLang's schedulers. For a
transition it closes admission, lets the engine drain, makes all ranks act in two phases, publishes the result on the
status board, and opens admission again if the rule of `admission.py` holds. With data-parallel peers it schedules again
at the `Resume` of their client. Every command gets a reply. After an error the board names the state of the engine, and
the next correct command works.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from rl_memory_plugins import admission, commands
from rl_memory_plugins.adapters import Adapters
from rl_memory_plugins.board import StatusBoard
from rl_memory_plugins.capabilities import EVERYTHING, Capabilities
from rl_memory_plugins.commands import AnyCommand, done, encode_reply, error_reply
from rl_memory_plugins.coordination import RankGroup, abort, call_or_undo, commit, prepare, raise_failures
from rl_memory_plugins.engine_hooks import EngineHooks
from rl_memory_plugins.errors import InvalidRequestError, RLMemoryError, StateConflictError
from rl_memory_plugins.keep import checked_globs
from rl_memory_plugins.published_state import PublishedState
from rl_memory_plugins.records import LONGEST_VERSION, EngineStatus, Reply, WeightsStatus
from rl_memory_plugins.tags import Content, Level, PauseMode, Tag
from rl_memory_plugins.timing import Moment
from rl_memory_plugins.transition import PendingTransition, given_up

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
        keep: The globs of weights that a level-2 sleep preserves if its caller names none.
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
        keep: Sequence[str] = (),
    ) -> None:
        self._ranks = ranks
        self._engine = engine
        self._update_timeout_s = update_timeout_s
        self._keep = keep
        self._updates = 0
        self._draining: list[PendingTransition] = []
        self._drained: dict[str, str] = {}  # ticket to name: the transitions for which this engine stays drained
        self._held: PendingTransition | None = None  # between its two phases
        self._handlers: dict[type, Callable[[Any], Future[bytes]]] = {
            commands.Sleep: self._sleep,
            commands.WakeUp: self._wake_up,
            commands.UpdateWeights: self._update_weights,
            **dict.fromkeys((commands.UpdateAdapter, commands.RemoveAdapter), self._change_adapter),
            commands.Drain: self._drain,
            commands.Decide: self._decide,
            commands.CancelDrain: self._cancel_drain,
            commands.Resume: self._resume,
            commands.Checksums: self._checksums,
            commands.Hello: self._hello,
        }
        declared = [msgspec.convert(one.result, Capabilities) for one in raise_failures(ranks.call("capabilities"))]
        self.capabilities = msgspec.structs.replace(capabilities, ranks=len(declared)).merged(declared)
        status = EngineStatus(ranks=[], engine_rank=engine_rank, capabilities=self.capabilities)
        self._state = PublishedState(ranks, engine, board, status, self._under_way)
        self.adapters = Adapters(ranks, engine, self._state, self._decided, update_timeout_s)
        self.refresh()
        if self.status.content is Content.STALE:
            self.capabilities.require_updatable("start_stale")

    # -- entry points -------------------------------------------------------------------------------------------

    def execute(self, payload: bytes) -> Future[bytes]:
        """Obey an encoded command. The future holds the encoded reply; it never holds an exception."""
        try:
            command = commands.decode_command(payload)
        except msgspec.MsgspecError as error:
            return done(error_reply(self.status.engine_rank, InvalidRequestError(f"not a command: {error}")))
        return self.obey(command)

    def obey(self, command: AnyCommand) -> Future[bytes]:
        try:
            return self._handlers[type(command)](command)
        except Exception as error:
            return done(self._error_reply(type(command).__name__, error))

    def refusal(self) -> RLMemoryError | None:
        """The reason why the engine admits no requests now; `None` if it admits them."""
        return self._state.refusal()

    def require_free(self) -> None:
        """Check that no transition is between its two phases: the ranks must not change then.

        Raises:
            StateConflictError: a transition waits for its second phase.
        """
        if self._held is not None:
            raise StateConflictError(f"{self._held.name} waits for the decision of its second phase")

    @property
    def status(self) -> EngineStatus:
        """The published state of the engine."""
        return self._state.status

    def refresh(self) -> None:
        """Ask all ranks for their state, and publish it."""
        self._state.refresh()

    def note_foreign_changes(
        self,
        weight_version: str | None = None,
        *,
        paused: bool = False,
        contents: Sequence[WeightsStatus] | None = None,
    ) -> None:
        """Publish changes that the engine's own calls have made, and schedule again if the admission rule holds.

        All data-parallel engines call this at the same time, so an engine that waited for a peer continues too.

        Args:
            weight_version: The version that the caller gave the new weights, if any.
            paused: The engine is paused by its own API. As on an engine without the plugin, such a pause keeps requests
                while the engine's own call updates the weights.
            contents: The state of each rank's weights, if known. The ranks are asked otherwise.
        """
        if weight_version:  # the engine checks neither its length nor its characters
            self._state.note(weight_version=weight_version[:LONGEST_VERSION].encode(errors="replace").decode())
        was_closed = self.refusal() is not None
        self._state.refresh_content(contents)
        self._resume_if_admitting(lift_pause=False)
        kept = paused and self.status.content is Content.UPDATING
        if not was_closed and self.refusal() is not None and not kept:
            self._engine.drain(PauseMode.ABORT)  # running requests would continue with a mixture of weights

    # -- commands -------------------------------------------------------------------------------------------

    def _sleep(self, command: commands.Sleep) -> Future[bytes]:
        level, tags = command.level, command.tags
        if level is Level.DISCARD and Tag.WEIGHTS in tags:
            self.capabilities.require_updatable("sleep(level=2) of the weights")
        self.capabilities.require_mode(command.mode)
        self.require_free()
        if command.mode in (PauseMode.KEEP, PauseMode.FREEZE):
            self._require_none_waiting(command.hold)
        keep = checked_globs(command, self._keep, self._ranks)
        if command.idle_s is not None:
            self._require_idle(command.idle_s)
        operation = PendingTransition(command.name, command.hold, command.call)

        def act() -> Any:
            self.require_free()
            if level is not Level.PAUSE and Tag.KV_CACHE in tags:
                self._engine.reset_caches(released=True)
            prepare(self._ranks, "sleep", level=level, tags=tags, keep=keep)
            return self._decided(operation, finish)

        def finish(agreed: bool) -> Any:
            if not agreed:
                return abort(self._ranks, "sleep")
            replies = commit(self._ranks, "sleep")
            if level is Level.PAUSE:
                self._state.note(paused=True)
            return operation.report(replies)

        self._state.note(idle=command.idle_s is not None)  # until it wakes, or another caller puts it to sleep
        try:
            return self._drain_then(operation, command.mode, act)
        except BaseException:
            self._state.note(idle=False)
            raise

    def _wake_up(self, command: commands.WakeUp) -> Future[bytes]:
        self.require_free()
        self._require_none_waiting(command.hold)
        operation = PendingTransition(command.name, command.hold)

        def act() -> Any:
            prepare(self._ranks, "wake", tags=command.tags)
            return self._decided(operation, finish)

        def finish(agreed: bool) -> Any:
            if not agreed:
                return abort(self._ranks, "wake")
            try:
                replies = commit(self._ranks, "wake")
            except BaseException:
                paused = self.status.paused
                self._state.note(paused=True)  # `after_wake` may have failed: the next wake calls it again
                self.refresh()
                if self.status.asleep_tags():
                    self._state.note(paused=paused)
                raise
            self.refresh()
            if not self.status.asleep_tags():
                self._state.note(paused=False)
            else:
                self._state.note(idle=False)  # a caller who wakes some tags has taken the engine over
            return operation.report(replies)

        return self._run(operation, act)

    def _update_weights(self, command: commands.UpdateWeights) -> Future[bytes]:
        self.capabilities.require_updatable("update_weights")
        self.capabilities.require_mode(command.mode, self.status.asleep_tags())
        self.require_free()
        self._require_none_waiting(command.hold)
        admission.require_weights(self.status, "an update")
        admission.require_version(self.status, command.base_version)
        operation = PendingTransition(command.name, command.hold, command.call)
        received: list[Reply[Any]] = []

        def act() -> Any:
            self.require_free()
            received[:] = call_or_undo(
                self._ranks,
                "receive_weights",
                lambda: self._ranks.call("finish_update", complete=False),
                endpoints=command.endpoints,
                token=command.token,
                timeout_s=self._update_timeout_s if command.timeout_s is None else command.timeout_s,
                frozen=command.mode is PauseMode.FREEZE and self._engine.has_requests(),
            )
            return self._decided(operation, finish)

        def finish(agreed: bool) -> Any:
            start = Moment.now()
            try:
                if agreed:  # before the content is valid: caches hold results of the old weights
                    self._engine.reset_caches(frozen=command.mode is PauseMode.FREEZE)
            except BaseException:
                self._ranks.call("finish_update", complete=False)
                raise
            raise_failures(self._ranks.call("finish_update", complete=agreed))
            if not agreed:
                return None
            self._updates += 1
            version = command.weight_version or str(self._updates)
            self._state.note(weight_version=version)
            operation.seconds.add("finish", start)
            return operation.report(received, weight_version=version, ranks=[reply.result for reply in received])

        return self._drain_then(operation, command.mode, act, for_update=True)

    def _change_adapter(self, command: commands.UpdateAdapter | commands.RemoveAdapter) -> Future[bytes]:
        self.capabilities.require_adapters()
        self.require_free()
        self._require_none_waiting(command.hold)
        operation = PendingTransition(command.name, command.hold)
        return self._run(operation, lambda: self.adapters.change(command, operation))

    def _drain(self, command: commands.Drain) -> Future[bytes]:
        self.require_free()
        operation = PendingTransition(command.operation, command.ticket, command.call)

        def act() -> Any:  # also while the engine holds another transition, which ends first
            self._drained[operation.ticket] = operation.name
            return {"drained": operation.seconds["drain"], "steps": operation.steps()}

        return self._drain_then(operation, PauseMode.WAIT, act)

    def _decide(self, command: commands.Decide) -> Future[bytes]:
        held = self._held
        if held is not None and command.ticket == held.ticket:
            self._held = None
            return self._run(PendingTransition(held.name, held.ticket), lambda: held.finish(command.commit))
        if command.ticket in self._drained and not command.commit:
            return self._run(PendingTransition(self._drained.pop(command.ticket), command.ticket), lambda: None)
        # the engine may hold the transition of another caller
        raise StateConflictError("no transition with this ticket waits for a decision")

    def _cancel_drain(self, command: commands.CancelDrain) -> Future[bytes]:
        waiting = [operation for operation in self._draining if command.call in ("", operation.call)]
        for operation in waiting:
            operation.cancelled = True
            self._draining.remove(operation)
        error: Exception = given_up()
        try:
            if waiting:
                self._state.refresh_or_close()
                if not any(operation.ticket for operation in waiting):
                    self._resume_if_admitting(lift_pause=False)
        except Exception as failure:
            error = failure
        for operation in waiting:
            operation.reply.set_result(encode_reply(self._error_reply(operation.name, error)))
        return self._reply({"cancelled": [operation.name for operation in waiting]})

    def _resume(self, command: commands.Resume) -> Future[bytes]:
        self._resume_if_admitting(lift_pause=command.lift_pause)
        return self._reply(None)

    def _checksums(self, command: commands.Checksums) -> Future[bytes]:
        self.require_free()
        replies = raise_failures(self._ranks.call("checksums"))
        if len({reply.result["layout"] for reply in replies}) > 1:  # some pipeline stages have transformed layers
            replies = raise_failures(self._ranks.call("checksums", by_engine_names=True))
        return self._reply([reply.result for reply in replies])

    def _hello(self, command: commands.Hello) -> Future[bytes]:
        return self._reply({"board": self._state.board_path, "status": self.status})

    # -- transitions --------------------------------------------------------------------------------

    def _drain_then(
        self, operation: PendingTransition, mode: PauseMode, act: Callable[[], Any], *, for_update: bool = False
    ) -> Future[bytes]:
        self._state.publish(busy=operation.name)  # first: the server looks up why the drain has ended a request
        try:
            drained = self._engine.drain(mode, for_update=for_update)
        except BaseException:
            self._state.publish(busy=self._under_way())
            raise
        self._draining.append(operation)

        def when_drained(done: Future[None]) -> None:
            if operation.cancelled:
                return
            self._draining.remove(operation)
            operation.note("drain")

            def run() -> Any:
                done.result()
                return act()

            self._run(operation, run)

        drained.add_done_callback(when_drained)
        return operation.reply

    def _run(self, operation: PendingTransition, act: Callable[[], Any]) -> Future[bytes]:
        """Run the body of a transition. Publish the state in any case, and only then send the reply."""
        self._state.publish(busy=operation.name)
        try:
            reply: Reply[Any] = Reply(rank=self.status.engine_rank, result=msgspec.to_builtins(act()))
        except Exception as error:
            reply = self._error_reply(operation.name, error)
        except BaseException:  # an interrupt of the caller, in whose process the engine runs
            self._state.refresh_or_close()
            self._resume_if_admitting(lift_pause=False)
            raise
        try:
            self._state.refresh_or_close()
            if not operation.ticket:
                if reply.error is not None and self.refusal() is None:
                    # Reply first: once the caller has the answer, peers that this client does not know may resume too.
                    operation.reply.set_result(encode_reply(reply))
                self._resume_if_admitting(lift_pause=operation.name == "wake_up")
        except Exception as error:
            reply = self._error_reply(operation.name, error)
        if not operation.reply.done():
            operation.reply.set_result(encode_reply(reply))
        if self.status.asleep_tags():
            self._engine.call_after_reply(self._state.publish_residual_memory)
        return operation.reply

    def _decided(self, operation: PendingTransition, finish: Callable[[bool], Any]) -> Any:
        """Finish at once; or, with a ticket, hold the second phase until its `Decide` comes."""
        if not operation.ticket:
            return finish(True)
        self._drained.pop(operation.ticket, None)
        operation.finish = finish
        self._held = operation
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
        """
        Raises:
            StateConflictError: another transition waits for running requests, and they must not stop for this one.
        """
        waiting = self._waiting(besides=ticket)
        if waiting:
            raise StateConflictError(
                "another call still waits for running requests: let it end, or call sleep(mode='abort')",
                waiting=waiting,
            )

    def _require_idle(self, seconds: float) -> None:
        """
        Raises:
            StateConflictError: the engine had a request in this time, or is closed by a caller.
        """
        refusal = self.refusal()
        if refusal is not None or not self._engine.is_idle(seconds):
            why = "it had requests" if refusal is None else refusal.message
            raise StateConflictError(f"the engine was not idle for {seconds:g} s: {why}", reason="not_idle")

    def _resume_if_admitting(self, *, lift_pause: bool) -> None:
        """Schedule again if the admission rule holds."""
        if self.refusal() is None:
            self._engine.resume(lift_pause=lift_pause)

    def _reply(self, result: Any) -> Future[bytes]:
        return done(Reply(rank=self.status.engine_rank, result=msgspec.to_builtins(result)))

    def _error_reply(self, name: str, error: BaseException) -> Reply[Any]:
        if not isinstance(error, RLMemoryError):
            logger.error("%s failed", name, exc_info=error)
        return error_reply(self.status.engine_rank, error)
