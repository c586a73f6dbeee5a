"""The client's side of every operation on one or several engines, without I/O.

An operation is a generator. It yields a command for all engines and receives their replies. `run` drives it over a
blocking transport, `run_async` over an asyncio transport; both transports share the rules.

A single engine needs one round, and its controller keeps the order. Data-parallel engines agree first: each holds the
transition after the first phase, and a second round commits or undoes on all engines. They schedule again once all of
them admit requests. An engine holds one transition at a time, and therefore the transitions of one client take turns. A
transition waits for running requests before its turn, and therefore an abort can overtake it.
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
from rl_memory_plugins.keep import parse_keep
from rl_memory_plugins.records import LONGEST_ADAPTER, LONGEST_VERSION, EngineStatus, Reply, Report, StepTime
from rl_memory_plugins.tags import Level, PauseMode, Tag, parse_level, parse_mode, parse_tags
from rl_memory_plugins.timing import LONGEST_S
from rl_memory_plugins.weights import addresses

_running: set[asyncio.Task[Any]] = set()  # strong references: the event loop holds its tasks only weakly

Operation = Generator[AnyCommand, list[Reply[Any]], Any]
Transition = commands.Transition


def sleep(level: object = 1, tags: object = None, mode: object = "abort", keep: object = None) -> commands.Sleep:
    """Build the command from a caller's values.

    Raises:
        InvalidRequestError: a value is not allowed; the details name the field and list what is allowed.
    """
    checked = parse_level(level), parse_tags(tags), parse_mode(mode), parse_keep(keep)  # type: ignore[arg-type]
    command = commands.Sleep(*checked)
    releases_kv_cache = command.level is not Level.PAUSE and Tag.KV_CACHE in command.tags
    if command.mode is PauseMode.FREEZE and releases_kv_cache:
        raise InvalidRequestError(
            "mode 'freeze' leaves running requests their KV cache, but this sleep releases the KV cache: "
            "name other tags, or use mode='keep'",
            field="mode",
            got=command.mode.value,
            allowed=[mode.value for mode in PauseMode if mode is not PauseMode.FREEZE],
        )
    return command


def sleep_if_idle(seconds: float) -> commands.Sleep:
    """Build the command by which a server puts an engine to sleep that had no request for so long."""
    return commands.Sleep(idle_s=seconds)


def wake_up(tags: object = None) -> commands.WakeUp:
    """Build the command from a caller's values; raises as `sleep` does."""
    return commands.WakeUp(parse_tags(tags))  # type: ignore[arg-type]


def update_weights(
    endpoints: object = None,
    token: object = None,
    weight_version: object = None,
    mode: object = "keep",
    timeout_s: object = None,
    base_version: object = None,
) -> commands.UpdateWeights:
    """Build the command; see `commands.UpdateWeights`.

    Raises:
        InvalidRequestError: a value has the wrong type or is no valid text, endpoints or token are empty, the version
            is too long, or the time is not within 0 and `LONGEST_S`.
    """
    given = {
        "endpoints": endpoints,
        "token": token,
        "weight_version": weight_version,
        "mode": parse_mode(mode),
        "timeout_s": timeout_s,
        "base_version": base_version,
    }
    command: commands.UpdateWeights = _checked(given, commands.UpdateWeights, "weight update")
    _require_version("weight update", "weight_version", command.weight_version)
    return command


def update_adapter(
    name: object = None,
    config: object = None,
    endpoints: object = None,
    token: object = None,
    adapter_version: object = None,
    timeout_s: object = None,
    base_version: object = None,
) -> commands.UpdateAdapter:
    """Build the command; see `commands.UpdateAdapter`. Raises as `update_weights` does."""
    given = {
        "adapter": name,
        "config": config,
        "endpoints": endpoints,
        "token": token,
        "adapter_version": adapter_version,
        "timeout_s": timeout_s,
        "base_version": base_version,
    }
    command: commands.UpdateAdapter = _checked(given, commands.UpdateAdapter, "adapter update")
    _require_name("adapter update", command.adapter)
    _require_version("adapter update", "adapter_version", command.adapter_version, LONGEST_ADAPTER)
    return command


def remove_adapter(name: object = None) -> commands.RemoveAdapter:
    """Build the command. Raises as `update_weights` does."""
    command: commands.RemoveAdapter = _checked({"adapter": name}, commands.RemoveAdapter, "removal of an adapter")
    _require_name("removal of an adapter", command.adapter)
    return command


def _checked(given: dict[str, Any], kind: Any, what: str) -> Any:
    """Build a command of this kind, and check the fields that several kinds have."""
    try:
        command = msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        problem = str(error).replace("$.adapter`", "$.name`")  # the callers' name of the field
        raise InvalidRequestError(f"bad {what}: {problem}") from None
    if not getattr(command, "endpoints", "none needed") or not getattr(command, "token", "none needed"):
        raise InvalidRequestError(f"bad {what}: endpoints and token must not be empty")
    addresses.check(getattr(command, "endpoints", {}))
    timeout_s = getattr(command, "timeout_s", None)
    if timeout_s is not None and not 0 < timeout_s <= LONGEST_S:
        raise InvalidRequestError(
            f"bad {what}: timeout_s must be positive, and at most {LONGEST_S:g}", field="timeout_s"
        )
    try:
        commands.encode_command(command)
    except (UnicodeEncodeError, TypeError, OverflowError) as error:
        raise InvalidRequestError(f"bad {what}: {error}") from None
    return command


def _require_version(what: str, field: str, version: str | None, longest: int = LONGEST_VERSION) -> None:
    if len(version or "") > longest:
        raise InvalidRequestError(f"bad {what}: {field} has more than {longest} characters", field=field)


def _require_name(what: str, name: str) -> None:
    if not 0 < len(name) <= LONGEST_ADAPTER:
        raise InvalidRequestError(f"bad {what}: a name has 1 to {LONGEST_ADAPTER} characters", field="name")


def refuse_during_update(engines: Iterable[EngineStatus]) -> None:
    """
    Raises:
        StateConflictError: an update is running. The engines cannot answer a command before it ends.
    """
    for engine in engines:
        if engine.busy in (commands.UpdateWeights.name, commands.UpdateAdapter.name):
            what = "a weight update" if engine.busy == commands.UpdateWeights.name else "an update of an adapter"
            raise StateConflictError(f"{what} is running; retry when it has ended", busy=engine.busy)


def transition(command: Transition, engines: list[EngineStatus]) -> Operation:
    """Run one transition on all engines.

    Raises:
        RLMemoryError: the first failing engine's error; all engines have undone what they could.
    """
    if len(engines) == 1:
        return _merge(raise_engine_failures((yield command)))
    ticket, waited = uuid.uuid4().hex, []
    try:
        if getattr(command, "mode", None) is PauseMode.WAIT:
            waited = raise_engine_failures((yield commands.Drain(command.name, ticket)))
        raise_engine_failures((yield msgspec.structs.replace(command, hold=ticket)))
    except Exception:  # an engine refused, or the transport failed; other engines may hold the transition
        # An engine that holds no transition with this ticket answers 409, and nothing has to be undone there.
        yield commands.Decide(ticket, commit=False)
        raise
    report = _merge(raise_engine_failures((yield commands.Decide(ticket, commit=True))))
    if waited:
        drained_s = max(reply.result["drained"] for reply in waited)
        report.seconds["drain"] += drained_s
        report.seconds["total"] += drained_s
        report.steps[:0] = _steps(waited)
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
    return Report(changes=changes, seconds=seconds, details=details, steps=_steps(replies))


def _steps(replies: list[Reply[Any]]) -> list[StepTime]:
    """When the steps of all engines have run."""
    return [
        msgspec.structs.replace(step, engine=reply.rank)
        for reply in replies
        for step in msgspec.convert(reply.result.get("steps", ()), list[StepTime])
    ]


def run(operation: Operation, call: Callable[[AnyCommand], list[Reply[Any]]]) -> Any:
    """Drive an operation over a blocking transport; see `run_async`."""

    async def answer(command: AnyCommand) -> list[Reply[Any]]:
        return call(command)

    try:
        run_async(operation, answer).send(None)  # `answer` never suspends, so this runs to the end
    except StopIteration as end:
        return end.value
    raise AssertionError("the operation was suspended")


async def run_async(operation: Operation, call: Callable[[AnyCommand], Awaitable[list[Reply[Any]]]]) -> Any:
    """Drive an operation over an asyncio transport. The operation gets the transport's errors, to undo its work."""
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
    """Drive an operation to its end, even if the caller is cancelled.

    Args:
        drain_timeout_s: How long a transition waits for running requests. Then all engines give the transition up.
        turns: The engines hold one transition at a time of the operations that share this lock.

    Raises:
        DrainTimeoutError: the requests did not finish in time; admission is open again.
    """

    async def in_turn() -> Any:
        async with AsyncExitStack() as turn:

            async def ask(command: AnyCommand) -> list[Reply[Any]]:
                if isinstance(command, Transition) and command.hold:
                    await turn.enter_async_context(turns)
                if not isinstance(command, commands.Sleep | commands.UpdateWeights | commands.Drain):
                    return await call(command)  # waits for no running requests itself
                command = msgspec.structs.replace(command, call=uuid.uuid4().hex)
                answering = asyncio.ensure_future(call(command))
                done, _ = await asyncio.wait([answering], timeout=drain_timeout_s)
                if not done:
                    await call(commands.CancelDrain(command.call))
                return await answering

            return await run_async(operation, ask)

    task = asyncio.ensure_future(in_turn())
    _running.add(task)
    task.add_done_callback(_running.discard)
    return await asyncio.shield(task)
