"""The client's side: `LLM`, `LLMEngine` and `AsyncLLM` speak to the cores' controllers and read their boards."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import msgspec

from rl_memory_plugins import admission, commands, operations
from rl_memory_plugins.board import BoardReader
from rl_memory_plugins.commands import AnyCommand, decode_reply
from rl_memory_plugins.config import RLMemoryConfig
from rl_memory_plugins.engines.vllm.core import REFUSED, with_graphs, without_scheduling
from rl_memory_plugins.engines.vllm.switch import config_of
from rl_memory_plugins.errors import EngineAsleepError, UnsupportedError
from rl_memory_plugins.hooking import Hooks
from rl_memory_plugins.operations import Operation
from rl_memory_plugins.records import EngineStatus, Reply, Report
from rl_memory_plugins.server.gate import report_refusal
from rl_memory_plugins.weights.checksums import Checksums, merge_checksums

LLM = "vllm.entrypoints.llm:LLM"
SYNC = "vllm.v1.engine.llm_engine:LLMEngine"
ASYNC = "vllm.v1.engine.async_llm:AsyncLLM"


def install(hooks: Hooks) -> None:
    for engine, make in ((SYNC, SyncFace), (ASYNC, AsyncFace)):
        for name in ("sleep", "wake_up", "is_sleeping"):
            hooks.wrap(f"{engine}.{name}", _native(make, name))
    hooks.wrap(f"{SYNC}.add_request", _gated_add)
    hooks.wrap(f"{ASYNC}.generate", _gated_stream)
    hooks.wrap(f"{ASYNC}.encode", _gated_stream)
    hooks.wrap(f"{LLM}.sleep", _llm_native("sleep"))
    hooks.wrap(f"{LLM}.wake_up", _llm_native("wake_up"))
    _add_methods(hooks.require(SYNC), SyncFace, of=lambda engine: engine)
    _add_methods(hooks.require(LLM), SyncFace, of=lambda llm: llm.llm_engine)
    _add_methods(hooks.require(ASYNC), AsyncFace, of=lambda engine: engine)
    hooks.require(LLM).is_sleeping = lambda llm: llm.llm_engine.is_sleeping()


class _Boards:
    """The status of all engines: read from their boards, or as they last told where a board is not local."""

    def __init__(self, told: list[dict[str, Any]]) -> None:
        self.complete = True
        self._readers: list[Callable[[], EngineStatus]] = []
        for engine in told:
            try:
                self._readers.append(BoardReader(engine["board"]).read)
            except OSError:
                status = msgspec.convert(engine["status"], EngineStatus)
                self._readers.append(lambda status=status: status)  # type: ignore[misc]
                self.complete = False

    def read(self) -> list[EngineStatus]:
        return [read() for read in self._readers]


class SyncFace:
    """The contract over a blocking engine (`LLM`, `LLMEngine`)."""

    def __init__(self, engine: Any, config: RLMemoryConfig) -> None:
        self._engine = weakref.proxy(engine)  # vLLM shuts its processes down when the engine's last reference goes
        self._boards: _Boards | None = None

    def _call(self, command: AnyCommand) -> list[Reply[Any]]:
        client, payload = self._engine.engine_core, commands.encode_command(command)
        core: Any = getattr(client, "engine_core", None)
        if hasattr(core, "rl_memory_call"):  # in this process
            return [decode_reply(core.rl_memory_call(payload))]
        return [decode_reply(client.call_utility("rl_memory_call", payload))]

    def _run(self, operation: Operation) -> Any:
        result = operations.run(operation, self._call)
        if self._boards is not None and not self._boards.complete:
            self._boards = None
        return result

    def status(self) -> list[EngineStatus]:
        if self._boards is None:
            self._boards = _Boards(operations.run(operations.hello(), self._call))
        return self._boards.read()

    def sleep(self, level: object = 1, mode: object = "abort", tags: object = None) -> Report:
        """Release memory; see the contract. `mode` stands second, as in vLLM's own `sleep`."""
        command = operations.sleep(level, tags, mode)
        report: Report = self._run(operations.transition(command, self.status()))
        _record_sleep(self._engine, 1, command.level)
        return report

    def wake_up(self, tags: object = None) -> bool:
        """Take memory back. Returns whether nothing sleeps any more, as vLLM's own `wake_up` does."""
        status = self.status()
        self.wake_up_with_report(with_graphs(without_scheduling(tags, status), status))
        return not admission.is_sleeping(self.status())

    def wake_up_with_report(self, tags: object = None) -> Report:
        """As `wake_up`, but returns the report."""
        status = self.status()
        command = operations.wake_up(without_scheduling(tags, status))
        report: Report = self._run(operations.transition(command, status))
        if not self.is_sleeping():
            _record_sleep(self._engine, 0, 0)
        return report

    def update_weights_from_ipc(self, endpoints: dict[str, str], token: str, **options: Any) -> Report:
        """Take weights from a trainer's sockets; blocks until they are in place. See `commands.UpdateWeights`."""
        command = commands.UpdateWeights(endpoints=endpoints, token=token, **options)
        return self._run(operations.transition(command, self.status()))  # type: ignore[no-any-return]

    def is_sleeping(self) -> bool:
        return admission.is_sleeping(self.status())

    def memory_status(self) -> list[EngineStatus]:
        """Every engine's and rank's memory by tag; never waits for a transition."""
        return self.status()

    def weight_version(self) -> str:
        return self.status()[0].weight_version

    def weight_checksums(self) -> Checksums:
        """Checksums of the weights as they are; see `weights.checksums`."""
        return merge_checksums(operations.run(operations.checksums(), self._call)[0])


class AsyncFace:
    """The contract over `AsyncLLM`; it is also the router's control plane."""

    def __init__(self, engine: Any, config: RLMemoryConfig) -> None:
        self._engine = weakref.proxy(engine)
        self._drain_timeout_s = config.drain_timeout_s
        self._boards: _Boards | None = None

    async def _call(self, command: AnyCommand) -> list[Reply[Any]]:
        client, payload = self._engine.engine_core, commands.encode_command(command)
        replies = await asyncio.gather(
            *(client._call_utility_async("rl_memory_call", payload, engine=core) for core in client.core_engines)
        )
        return [decode_reply(reply) for reply in replies]

    async def _run(self, operation: Operation) -> Any:
        try:
            return await operations.run_within(operation, self._call, self._drain_timeout_s)
        finally:
            if self._boards is not None and not self._boards.complete:
                self._boards = None

    async def status(self) -> list[EngineStatus]:
        if self._boards is None:
            self._boards = _Boards(await operations.run_async(operations.hello(), self._call))
        return self._boards.read()

    def status_now(self) -> list[EngineStatus]:
        """The status once `status` has been awaited; for code that cannot await."""
        if self._boards is None:
            raise EngineAsleepError("the server is still starting", reason="starting", retry_after_s=1)
        return self._boards.read()

    async def sleep(self, level: object = 1, mode: object = "abort", tags: object = None) -> Report:
        """Release memory; see the contract. `mode` stands second, as in vLLM's own `sleep`."""
        command = operations.sleep(level, tags, mode)
        report: Report = await self._run(operations.transition(command, await self.status()))
        _record_sleep(self._engine, 1, command.level)
        return report

    async def wake_up(self, tags: object = None) -> bool:
        status = await self.status()
        await self.wake_up_with_report(with_graphs(without_scheduling(tags, status), status))
        return not admission.is_sleeping(await self.status())

    async def wake_up_with_report(self, tags: object = None) -> Report:
        """As `wake_up`, but returns the report."""
        status = await self.status()
        command = operations.wake_up(without_scheduling(tags, status))
        report: Report = await self._run(operations.transition(command, status))
        if not await self.is_sleeping():
            _record_sleep(self._engine, 0, 0)
        return report

    async def update_weights_from_ipc(self, endpoints: dict[str, str], token: str, **options: Any) -> Report:
        """Take weights from a trainer's sockets. See `commands.UpdateWeights`."""
        return await self.update_weights(commands.UpdateWeights(endpoints=endpoints, token=token, **options))

    async def update_weights(self, command: commands.UpdateWeights) -> Report:
        return await self._run(operations.transition(command, await self.status()))  # type: ignore[no-any-return]

    async def is_sleeping(self) -> bool:
        return admission.is_sleeping(await self.status())

    async def memory_status(self) -> list[EngineStatus]:
        return await self.status()

    async def weight_version(self) -> str:
        return (await self.status())[0].weight_version

    async def weight_checksums(self) -> Checksums:
        return merge_checksums((await operations.run_async(operations.checksums(), self._call))[0])


def _record_sleep(engine: Any, asleep: int, level: int) -> None:
    """Keep vLLM's own sleep metrics right."""
    if engine.logger_manager is not None:
        engine.logger_manager.record_sleep_state(asleep, level)


def face_of(engine: Any, make: type[SyncFace] | type[AsyncFace]) -> Any:
    """The engine's face, made at first use; `None` if the engine is not enabled."""
    face = engine.__dict__.get("rl_memory")
    if face is None:
        config = config_of(engine.vllm_config)
        if config is None:
            return None
        face = engine.rl_memory = make(engine, config)
    return face


def _native(make: Any, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The engine's own method, led to the face where one is enabled."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            face = face_of(self, make)
            return (original if face is None else getattr(type(face), name))(
                self if face is None else face, *args, **kwargs
            )

        return method

    return wrap


def _llm_native(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`LLM`'s own method; with the plugin it takes `tags` too, and returns the report."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            enabled = face_of(self.llm_engine, SyncFace) is not None
            return getattr(self.llm_engine, name)(*args, **kwargs) if enabled else original(self, *args, **kwargs)

        return method

    return wrap


_METHODS = ("memory_status", "wake_up_with_report", "update_weights_from_ipc", "weight_version", "weight_checksums")


def _add_methods(owner: type, make: Any, of: Callable[[Any], Any]) -> None:
    for name in _METHODS:

        def method(self: Any, *args: Any, _name: str = name, **kwargs: Any) -> Any:
            face = face_of(of(self), make)
            if face is None:
                raise UnsupportedError("this engine was started without rl_memory")
            return getattr(face, _name)(*args, **kwargs)

        method.__name__ = name
        method.__doc__ = getattr(make, name).__doc__
        setattr(owner, name, method)


def _gated_add(original: Callable[..., Any]) -> Callable[..., Any]:
    def add_request(self: Any, *args: Any, **kwargs: Any) -> Any:
        face = face_of(self, SyncFace)
        if face is not None:
            _raise_if_closed(face.status())
        return original(self, *args, **kwargs)

    return add_request


def _gated_stream(original: Callable[..., Any]) -> Callable[..., Any]:
    """`generate` and `encode`: refused before anything is queued; no cost for each token."""

    def stream(self: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        face = face_of(self, AsyncFace)
        if face is None:
            return original(self, *args, **kwargs)  # type: ignore[no-any-return]
        return _checked_stream(face, original(self, *args, **kwargs))

    return stream


async def _checked_stream(face: AsyncFace, outputs: AsyncGenerator[Any, None]) -> AsyncIterator[Any]:
    _raise_if_closed(await face.status())
    async with contextlib.aclosing(outputs):  # a caller that goes away ends the request now
        async for output in outputs:
            reason = _stop_reason(output)
            if reason.startswith(REFUSED):  # the engine closed on the way
                error = EngineAsleepError(
                    "the engine closed before the request arrived",
                    reason=reason.removeprefix(REFUSED),
                    retry_after_s=admission.RETRY_AFTER_SECONDS,
                )
                report_refusal(error)
                raise error
            yield output


def _stop_reason(output: Any) -> str:
    """Why a finished completion stopped, where that is a string; a pooling request's output has none."""
    completions = output.outputs if output.finished else None
    reason = completions[0].stop_reason if isinstance(completions, list) and completions else None
    return reason if isinstance(reason, str) else ""


def _raise_if_closed(status: list[EngineStatus]) -> None:
    refusal = admission.first_refusal(status)
    if refusal is not None:
        report_refusal(refusal)
        raise refusal
