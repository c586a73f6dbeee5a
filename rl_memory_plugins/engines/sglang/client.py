"""The tokenizer's process: calls to all schedulers, `Engine`'s methods, and SGLang's own calls led to them."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import msgspec

from rl_memory_plugins import admission, commands, operations
from rl_memory_plugins.board import BoardReader
from rl_memory_plugins.commands import AnyCommand, decode_reply
from rl_memory_plugins.config import RLMemoryConfig
from rl_memory_plugins.engines.sglang.native import native_level
from rl_memory_plugins.engines.sglang.scheduler import has_attention_dp
from rl_memory_plugins.engines.sglang.switch import config_of
from rl_memory_plugins.errors import EngineAsleepError, StateConflictError, UnsupportedError
from rl_memory_plugins.hooking import Hooks
from rl_memory_plugins.operations import Operation
from rl_memory_plugins.records import EngineStatus, Reply, Report
from rl_memory_plugins.weights.checksums import merge_checksums

TOKENIZER = "sglang.srt.managers.tokenizer_manager:TokenizerManager"
ENGINE = "sglang.srt.entrypoints.engine:Engine"


def install(hooks: Hooks) -> None:
    hooks.wrap(f"{TOKENIZER}.init_request_dispatcher", _add_face)
    hooks.wrap(f"{TOKENIZER}.release_memory_occupation", _native_release)
    hooks.wrap(f"{TOKENIZER}.resume_memory_occupation", _native_resume)
    for name in ("generate", "encode"):
        hooks.wrap(f"{ENGINE}.{name}", _gated)
    for name in ("async_generate", "async_encode"):
        hooks.wrap(f"{ENGINE}.{name}", _gated_async)
    hooks.wrap(f"{ENGINE}.update_weights_from_ipc", _update_weights_from_ipc)
    engine = hooks.require(ENGINE)
    for name in ("sleep", "wake_up", "is_sleeping", "memory_status", "weight_version", "weight_checksums"):
        setattr(engine, name, _engine_method(name))


class _Call:
    """One request under way. Every engine answers once."""

    def __init__(self, engines: int) -> None:
        self.engines = engines
        self.replies: dict[int, Reply[Any]] = {}
        self.done: asyncio.Future[list[Reply[Any]]] = asyncio.get_running_loop().create_future()

    def add(self, reply: Reply[Any]) -> None:
        self.replies[reply.rank] = reply
        if len(self.replies) == self.engines and not self.done.done():
            self.done.set_result([self.replies[rank] for rank in sorted(self.replies)])


class AsyncFace:
    """The contract over a `TokenizerManager`; its coroutines run on the loop that manager runs on."""

    def __init__(self, tokenizer: Any, config: RLMemoryConfig) -> None:
        self._tokenizer = tokenizer
        self._drain_timeout_s = config.drain_timeout_s
        self.update_timeout_s = config.update_timeout_s
        self._calls: dict[str, _Call] = {}
        self._boards: list[BoardReader] | None = None

    # -- transport --------------------------------------------------------------------------------------------

    async def _call(self, command: AnyCommand) -> list[Reply[Any]]:
        from rl_memory_plugins.engines.sglang.messages import RLMemoryReqInput

        self._tokenizer.auto_create_handle_loop()
        to_schedulers = self._tokenizer.release_memory_occupation_communicator
        engines = 1 if has_attention_dp(self._tokenizer.server_args) else to_schedulers._fan_out
        rid = uuid.uuid4().hex
        call = self._calls[rid] = _Call(engines)
        try:
            to_schedulers._send(RLMemoryReqInput(rid=rid, payload=commands.encode_command(command)))
            return await call.done
        finally:
            del self._calls[rid]

    def on_reply(self, output: Any) -> None:
        call = self._calls.get(output.rid)
        if call is not None:  # else nobody waits for it any more
            call.add(decode_reply(output.payload))

    async def _run(self, operation: Operation) -> Any:
        return await operations.run_within(operation, self._call, self._drain_timeout_s)

    # -- the contract -----------------------------------------------------------------------------------------

    async def status(self) -> list[EngineStatus]:
        if self._boards is None:
            told = await operations.run_async(operations.hello(), self._call)
            self._boards = [BoardReader(engine["board"]) for engine in told]
        return self.status_now()

    def status_now(self) -> list[EngineStatus]:
        """The status, for code that cannot await; empty as long as nobody has awaited `status`.

        Until then nobody has asked for a transition either, and the schedulers refuse what they must.
        """
        return [board.read() for board in self._boards or ()]

    async def sleep(self, level: object = 1, tags: object = None, mode: object = "abort") -> Report:
        """Release memory; see the contract."""
        return await self._run(operations.transition(operations.sleep(level, tags, mode), await self.status()))  # type: ignore[no-any-return]

    async def wake_up(self, tags: object = None) -> Report:
        """Take memory back; see the contract."""
        return await self._run(operations.transition(operations.wake_up(tags), await self.status()))  # type: ignore[no-any-return]

    async def update_weights(self, command: commands.UpdateWeights) -> Report:
        """Take weights from a trainer's sockets."""
        report: Report = await self._run(operations.transition(command, await self.status()))
        self._tokenizer._update_weight_version_if_provided(await self.weight_version())
        return report

    async def is_sleeping(self) -> bool:
        return admission.is_sleeping(await self.status())

    async def memory_status(self) -> list[EngineStatus]:
        """Every engine's and rank's memory by tag; never waits for a transition."""
        return await self.status()

    async def weight_version(self) -> str:
        return (await self.status())[0].weight_version

    async def weight_checksums(self) -> dict[str, Any]:
        """Checksums of the weights as they are; see `weights.checksums`."""
        engines = await operations.run_async(operations.checksums(), self._call)
        return msgspec.to_builtins(merge_checksums(engines[0]))  # type: ignore[no-any-return]

    async def checksums(self) -> dict[str, Any]:
        return await self.weight_checksums()

    # -- SGLang's own calls -----------------------------------------------------------------------------------

    async def native_release(self, tags: list[str] | None) -> None:
        """SGLang's own release. It is for an engine without requests, or whose requests are paused.

        Raises:
            StateConflictError: requests are running.
        """
        running = [rid for rid in self._tokenizer.rid_to_state if not _is_health_check(rid)]
        if running and not self._tokenizer.is_pause:
            raise StateConflictError(
                f"{len(running)} requests are running: abort them, let them end, or pause_generation() first",
                running=len(running),
            )
        await self.sleep(native_level(self._tokenizer.server_args), tags, "keep")

    def raise_if_closed(self, engines: list[EngineStatus]) -> None:
        error = admission.first_refusal(engines)
        if error is not None:
            raise error


def face_of(tokenizer: Any) -> AsyncFace | None:
    """The face of a `TokenizerManager`; `None` if its engine is not enabled."""
    return getattr(tokenizer, "rl_memory", None)


def _is_health_check(rid: str) -> bool:
    from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX

    return rid.startswith(HEALTH_CHECK_RID_PREFIX)


# -- hooks on the tokenizer manager -------------------------------------------------------------------------


def _add_face(original: Callable[..., Any]) -> Callable[..., Any]:
    def init_request_dispatcher(self: Any) -> Any:
        result = original(self)
        config = config_of(self.server_args)
        if config is not None:
            from sglang.utils import TypeBasedDispatcher

            from rl_memory_plugins.engines.sglang.messages import RLMemoryReqOutput

            self.rl_memory = AsyncFace(self, config)
            self._result_dispatcher += TypeBasedDispatcher([(RLMemoryReqOutput, self.rl_memory.on_reply)])
        return result

    return init_request_dispatcher


def _native_release(original: Callable[..., Any]) -> Callable[..., Any]:
    async def release_memory_occupation(self: Any, obj: Any, request: Any = None) -> Any:
        face = face_of(self)
        if face is None:
            return await original(self, obj, request)
        return await face.native_release(obj.tags or None)

    return release_memory_occupation


def _native_resume(original: Callable[..., Any]) -> Callable[..., Any]:
    async def resume_memory_occupation(self: Any, obj: Any, request: Any = None) -> Any:
        face = face_of(self)
        if face is None:
            return await original(self, obj, request)
        await face.wake_up(obj.tags or None)
        return None

    return resume_memory_occupation


# -- hooks on Engine ----------------------------------------------------------------------------------------


def _required_face(engine: Any) -> AsyncFace:
    face = face_of(engine.tokenizer_manager)
    if face is None:
        raise UnsupportedError("this engine was started without rl_memory")
    return face


def _engine_method(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.loop.run_until_complete(getattr(_required_face(self), name)(*args, **kwargs))

    method.__name__ = name
    method.__doc__ = getattr(AsyncFace, name).__doc__
    return method


def _update_weights_from_ipc(original: Callable[..., Any]) -> Callable[..., Any]:
    """SGLang's own method has this name too. Ours has a token: `update_weights_from_ipc(endpoints, token)`."""

    def update_weights_from_ipc(self: Any, *args: Any, **kwargs: Any) -> Any:
        ours = "token" in kwargs or (len(args) > 1 and isinstance(args[1], str))
        if not ours:
            return original(self, *args, **kwargs)
        options = {**dict(zip(("endpoints", "token"), args, strict=False)), **kwargs}
        face = _required_face(self)
        options.setdefault("timeout_s", face.update_timeout_s)
        return self.loop.run_until_complete(face.update_weights(commands.UpdateWeights(**options)))

    return update_weights_from_ipc


def _gated(original: Callable[..., Any]) -> Callable[..., Any]:
    """`generate` and `encode`: refused at once while closed."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        face = face_of(self.tokenizer_manager)
        if face is None:
            return original(self, *args, **kwargs)
        face.raise_if_closed(face.status_now())
        try:
            return original(self, *args, **kwargs)
        except Exception as error:
            _raise_refusal(face, error)
            raise

    return call


def _gated_async(original: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Any]:
    async def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        face = face_of(self.tokenizer_manager)
        if face is None:
            return await original(self, *args, **kwargs)
        face.raise_if_closed(face.status_now())
        try:
            outputs = await original(self, *args, **kwargs)
        except Exception as error:
            _raise_refusal(face, error)
            raise
        return _checked(face, outputs) if hasattr(outputs, "__aiter__") else outputs

    return call


async def _checked(face: AsyncFace, outputs: AsyncIterator[Any]) -> AsyncIterator[Any]:
    try:
        async for output in outputs:
            yield output
    except Exception as error:
        _raise_refusal(face, error)
        raise


def _raise_refusal(face: AsyncFace, error: Exception) -> None:
    """SGLang reports a request that arrived at a closed scheduler by an HTTP exception with our words in it."""
    if getattr(error, "status_code", None) == EngineAsleepError.status:
        refusal = admission.first_refusal(face.status_now())
        if refusal is not None:
            raise refusal from error
