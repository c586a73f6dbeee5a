"""The client's side of every operation, over one or many engines, free of I/O.

Each operation is a generator that yields a command for all engines and is sent their replies. Two drivers run
it: `run` over a blocking transport and `run_async` over an asyncio one, so that the rules are written once.

With data parallelism the engines agree first: they are told to hold after their first phase, and a second
round commits everywhere or undoes everywhere. They schedule again when all of them admit requests, none before.
Only one transition at a time can be held, so those of one client take turns; what waits for running requests does
so before its turn, so that an abort can overtake it. A single engine needs one round, and its controller keeps the
order.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Generator, Iterable
from contextlib import AsyncExitStack
from typing import Any

import msgspec

from rl_memory_plugins import commands
from rl_memory_plugins.commands import AnyCommand
from rl_memory_plugins.coordination import raise_engine_failures
from rl_memory_plugins.errors import InvalidRequestError, StateConflictError
from rl_memory_plugins.records import LONGEST_VERSION, EngineStatus, Reply, Report
from rl_memory_plugins.tags import PauseMode, parse_level, parse_mode, parse_tags
from rl_memory_plugins.timing import LONGEST_S

_begun: set[asyncio.Task[Any]] = set()  # operations that run; the event loop itself holds its tasks only weakly

Operation = Generator[AnyCommand, list[Reply[Any]], Any]
Transition = commands.Sleep | commands.WakeUp | commands.UpdateWeights


def sleep(level: object = 1, tags: object = None, mode: object = "abort") -> commands.Sleep:
    """Build the command from a caller's values.

    Raises:
        InvalidRequestError: a value is not allowed; the details name the field and list what is allowed.
    """
    return commands.Sleep(parse_level(level), parse_tags(tags), parse_mode(mode))  # type: ignore[arg-type]


def wake_up(tags: object = None) -> commands.WakeUp:
    """Build the command from a caller's values; raises as `sleep` does."""
    return commands.WakeUp(parse_tags(tags))  # type: ignore[arg-type]


def update_weights(
    endpoints: object = None,
    token: object = None,
    weight_version: object = None,
    mode: object = "keep",
    timeout_s: object = None,
) -> commands.UpdateWeights:
    """Build the command; see `commands.UpdateWeights`.

    Raises:
        InvalidRequestError: a value of the wrong type or that is no text, no endpoints, no token, a name that is too
            long, or a time that is not within 0 and `LONGEST_S`.
    """
    given = {
        "endpoints": endpoints,
        "token": token,
        "weight_version": weight_version,
        "mode": parse_mode(mode),
        "timeout_s": timeout_s,
    }
    try:
        command = msgspec.convert(given, commands.UpdateWeights)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"bad weight update: {error}") from None
    if not command.endpoints or not command.token:
        raise InvalidRequestError("bad weight update: endpoints and token must not be empty")
    if command.timeout_s is not None and not 0 < command.timeout_s <= LONGEST_S:
        raise InvalidRequestError(
            f"bad weight update: timeout_s must be positive, and at most {LONGEST_S:g}", field="timeout_s"
        )
    if len(command.weight_version or "") > LONGEST_VERSION:
        raise InvalidRequestError(
            f"bad weight update: weight_version has more than {LONGEST_VERSION} characters", field="weight_version"
        )
    try:
        commands.encode_command(command)
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"bad weight update: {error}") from None
    return command


def name_of(command: Transition) -> str:
    """What `EngineStatus.busy` says while the command is under way."""
    names = {commands.Sleep: "sleep", commands.WakeUp: "wake_up", commands.UpdateWeights: "update_weights"}
    return names[type(command)]


def refuse_during_update(engines: Iterable[EngineStatus]) -> None:
    """
    Raises:
        StateConflictError: an update is running; the engines could not even be asked before it ends.
    """
    if any(engine.busy == "update_weights" for engine in engines):
        raise StateConflictError("a weight update is running; retry when it has ended", busy="update_weights")


def transition(command: Transition, engines: list[EngineStatus]) -> Operation:
    """Run one transition on all engines.

    Raises:
        RLMemoryError: the first failing engine's error; all engines have undone what they could.
    """
    if len(engines) == 1:
        return _merge(raise_engine_failures((yield command)))
    ticket, drained_s = uuid.uuid4().hex, 0.0
    try:
        if not isinstance(command, commands.WakeUp) and command.mode is PauseMode.WAIT:
            waited = raise_engine_failures((yield commands.Drain(name_of(command), ticket)))
            drained_s = max(reply.result["drained"] for reply in waited)
        raise_engine_failures((yield msgspec.structs.replace(command, hold=ticket)))
    except Exception:  # a refusal, or the way to an engine broke off; another may hold the operation
        # An engine that refused holds nothing of ours and answers 409 here, which is as good as an undo.
        yield commands.Decide(ticket, commit=False)
        raise
    report = _merge(raise_engine_failures((yield commands.Decide(ticket, commit=True))))
    if drained_s:
        report.seconds["drain"] += drained_s
        report.seconds["total"] += drained_s
    return report


def resume(*, lift_pause: bool) -> Operation:
    """Have all engines schedule again, after a transition of several of them."""
    raise_engine_failures((yield commands.Resume(lift_pause)))


def checksums() -> Operation:
    """Per engine, the list of its ranks' checksum records."""
    replies = raise_engine_failures((yield commands.Checksums()))
    return [reply.result for reply in sorted(replies, key=lambda reply: reply.rank)]


def hello() -> Operation:
    """Per engine, the path of its status board."""
    replies = raise_engine_failures((yield commands.Hello()))
    return [reply.result for reply in replies]


def _merge(replies: list[Reply[Any]]) -> Report:
    reports = [msgspec.convert(reply.result, Report) for reply in replies]
    seconds: dict[str, float] = {}
    for report in reports:
        for step, value in report.seconds.items():
            seconds[step] = max(seconds.get(step, 0.0), value)
    changes = [change for report in reports for change in report.changes]
    details = reports[0].details if len(reports) == 1 else {"engines": [report.details for report in reports]}
    return Report(changes=changes, seconds=seconds, details=details)


def run(operation: Operation, call: Callable[[AnyCommand], list[Reply[Any]]]) -> Any:
    """Drive an operation over a transport that blocks. It is told of errors of the transport, to undo what it began."""
    try:
        command = next(operation)
        while True:
            try:
                replies = call(command)
            except Exception as error:
                command = operation.throw(error)
            else:
                command = operation.send(replies)
    except StopIteration as end:
        return end.value


async def run_async(operation: Operation, call: Callable[[AnyCommand], Awaitable[list[Reply[Any]]]]) -> Any:
    """Drive an operation over an asyncio transport; see `run`."""
    try:
        command = next(operation)
        while True:
            try:
                replies = await call(command)
            except Exception as error:
                command = operation.throw(error)
            else:
                command = operation.send(replies)
    except StopIteration as end:
        return end.value


async def run_within(
    operation: Operation,
    call: Callable[[AnyCommand], Awaitable[list[Reply[Any]]]],
    drain_timeout_s: float,
    turns: asyncio.Lock,
) -> Any:
    """Drive an operation; of those that share `turns`, one at a time is held by the engines.

    If running requests keep a transition waiting for too long, it is given up on all engines. One that has drained is
    not affected: it runs to its end, also if the caller is cancelled.

    Raises:
        DrainTimeoutError: the requests did not finish in time; admission is open again.
    """

    async def in_turn() -> Any:
        async with AsyncExitStack() as turn:

            async def ask(command: AnyCommand) -> list[Reply[Any]]:
                if isinstance(command, Transition) and command.hold:
                    await turn.enter_async_context(turns)
                # A question may wait for others' transitions, and ends none.
                if not isinstance(command, commands.Sleep | commands.UpdateWeights | commands.Drain):
                    return await call(command)
                command = msgspec.structs.replace(command, call=uuid.uuid4().hex)
                answering = asyncio.ensure_future(call(command))
                done, _ = await asyncio.wait([answering], timeout=drain_timeout_s)
                if not done:
                    await call(commands.CancelDrain(command.call))
                return await answering

            return await run_async(operation, ask)

    task = asyncio.ensure_future(in_turn())
    _begun.add(task)
    task.add_done_callback(_begun.discard)
    return await asyncio.shield(task)
