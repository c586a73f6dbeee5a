"""The hooks of the tokenizer's process: calls to all schedulers, methods of `Engine`, and SGLang's own calls."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager
from http import HTTPStatus
from typing import Any

from rl_memory_plugins import commands, operations
from rl_memory_plugins.admission import NOT_ADMITTED, RETRY_AFTER_SECONDS, first_refusal
from rl_memory_plugins.commands import AnyCommand, decode_reply
from rl_memory_plugins.config import RLMemoryConfig
from rl_memory_plugins.engine_api import AsyncioApi
from rl_memory_plugins.engines.enabled import engine_method, on_enabled, state_of
from rl_memory_plugins.engines.sglang import served_adapters
from rl_memory_plugins.engines.sglang.native_calls import FROM_DISK, WRITES, native_level
from rl_memory_plugins.engines.sglang.options import config_of
from rl_memory_plugins.engines.sglang.scheduler import finish_reason_of, has_attention_dp
from rl_memory_plugins.errors import EngineAsleepError, EngineFaultError, StateConflictError
from rl_memory_plugins.hooking import Hooks
from rl_memory_plugins.operations import Operation, Transition
from rl_memory_plugins.records import Reply, Report
from rl_memory_plugins.server.gate import refuse_if_closed, report_refusal

TOKENIZER = "sglang.srt.managers.tokenizer_manager:TokenizerManager"
ENGINE = "sglang.srt.entrypoints.engine:Engine"
SESSION = "_weight_update_session_call"  # begins or ends a session; new in 0.5.21
RESOLVE = "_validate_and_resolve_lora"  # finds the id of the adapter that a request names
#: Other calls for which the schedulers wait for peers, and answer nothing meanwhile.
JOINS = (
    "init_weights_update_group",
    "init_weights_send_group_for_remote_instance",
    "send_weights_to_remote_instance",
)
LOOK_S = 1.0  # between two looks for a dead scheduler, while a call waits for its answer


def install(hooks: Hooks) -> None:
    hooks.wrap(f"{TOKENIZER}.init_request_dispatcher", _add_api)
    hooks.wrap(f"{TOKENIZER}.generate_request", _reporting_refusals)
    if hasattr(hooks.require(TOKENIZER), RESOLVE):
        hooks.wrap(f"{TOKENIZER}.{RESOLVE}", _with_present_adapters)
    hooks.wrap(f"{TOKENIZER}.release_memory_occupation", _native_release)
    hooks.wrap(f"{TOKENIZER}.resume_memory_occupation", _native_resume)
    for name in WRITES:
        hooks.wrap(f"{TOKENIZER}.{name}", _from_disk if name == FROM_DISK else _beside_kept_requests)
    if hasattr(hooks.require(TOKENIZER), SESSION):
        hooks.wrap(f"{TOKENIZER}.{SESSION}", _beside_kept_requests)
    for name in JOINS:
        hooks.wrap(f"{TOKENIZER}.{name}", _joining)
    if hasattr(hooks.require(TOKENIZER), "is_ready"):
        hooks.wrap(f"{TOKENIZER}.is_ready", _native_is_ready)
    engine = hooks.require(ENGINE)
    added_later = (name for name in ("rerank", "score", "async_score") if hasattr(engine, name))
    for name in ("generate", "encode", "async_generate", "async_encode", *added_later):
        hooks.wrap(f"{ENGINE}.{name}", _gated_async if name.startswith("async_") else _gated)
    hooks.wrap(f"{ENGINE}.update_weights_from_ipc", _update_weights_from_ipc)
    hooks.require("sglang.srt.managers.io_struct:hook_custom_types")
    reads = ("is_sleeping", "memory_status", "timeline", "weight_version", "weight_checksums")
    updates = ("update_weights_from_checkpoint", "update_adapter_from_ipc", "remove_adapter")
    for name in ("sleep", "wake_up", *reads, *updates):
        setattr(engine, name, _method(name))


class SglangApi(AsyncioApi):
    """The contract over a `TokenizerManager`. Its coroutines run on that manager's event loop."""

    def __init__(self, tokenizer: Any, config: RLMemoryConfig) -> None:
        super().__init__(config.drain_timeout_s, config)
        self.tokenizer = tokenizer
        self.server_args = tokenizer.server_args
        self.native_updates = asyncio.Lock()  # for updates that bypass SGLang's own lock
        self._native_calls = 0  # of SGLang's own calls that keep the schedulers from answering
        self._calls: dict[str, dict[int, asyncio.Future[Reply[Any]]]] = {}  # by request: the reply of each engine

    # -- transport --------------------------------------------------------------------------------------------

    async def _call(self, command: AnyCommand) -> list[Reply[Any]]:
        from rl_memory_plugins.engines.sglang.messages import RLMemoryReqInput

        self.tokenizer.auto_create_handle_loop()
        to_schedulers = self.tokenizer.release_memory_occupation_communicator
        engines = 1 if has_attention_dp(self.server_args) else to_schedulers._fan_out
        rid = uuid.uuid4().hex
        loop = asyncio.get_running_loop()
        replies = self._calls[rid] = {rank: loop.create_future() for rank in range(engines)}
        answering = asyncio.gather(*replies.values())
        try:
            to_schedulers._send(RLMemoryReqInput(rid=rid, payload=commands.encode_command(command)))
            while not (await asyncio.wait([answering], timeout=LOOK_S))[0]:
                if not self.lives():  # with data parallelism SGLang goes on without it
                    raise EngineFaultError("a scheduler of SGLang has died: restart the server")
            return answering.result()
        finally:
            answering.cancel()
            del self._calls[rid]

    def on_reply(self, output: Any) -> None:
        reply = decode_reply(output.payload)
        answer = self._calls.get(output.rid, {}).get(reply.rank)
        if answer is not None and not answer.done():  # else the caller is gone
            answer.set_result(reply)

    # -- SGLang's own calls -----------------------------------------------------------------------------------

    def transition(self, command: Transition) -> Operation:
        report: Report = yield from super().transition(command)
        if isinstance(command, commands.UpdateWeights):
            self.tokenizer._update_weight_version_if_provided((yield from self.weight_version()))
        self.serve_adapters()
        return report

    def serve_adapters(self) -> None:
        """Serve the adapters of the status by their names."""
        engines = self.status_now()
        if engines:
            served_adapters.serve(self.tokenizer, engines[0].adapters)

    @contextmanager
    def native_call(self) -> Iterator[None]:
        """The body makes a call of SGLang's own, during which the schedulers may answer nothing."""
        self._native_calls += 1
        try:
            yield
        finally:
            self._native_calls -= 1

    @property
    def may_be_stale(self) -> bool:
        """Whether the engine has started closed, and no call has asked for its status yet."""
        return self.options is not None and self.options.start_stale and not self.status_now()

    def is_busy(self) -> bool:
        """Whether the schedulers may answer nothing now, although they live."""
        return self._native_calls > 0 or any(engine.busy for engine in self.status_now())

    def lives(self) -> bool:
        """Whether the schedulers on this host that publish the status live."""
        return self._boards is None or self._boards.writers_live()

    def is_held(self) -> bool:
        """Whether SGLang's own pause holds back the requests that come now."""
        return bool(self.tokenizer.is_pause)

    def native_release(self, tags: list[str] | None) -> Operation:
        """SGLang's own release, for an engine whose requests have ended or are paused.

        Raises:
            StateConflictError: requests are running.
        """
        running = [rid for rid in self.tokenizer.rid_to_state if not _is_health_check(rid)]
        if running and not self.tokenizer.is_pause:
            raise StateConflictError(
                f"{len(running)} requests are running: let them end, abort them, or call pause_generation() first",
                running=len(running),
            )
        return (yield from self.sleep(native_level(self.server_args), tags, "keep"))


def api_of(tokenizer: Any) -> SglangApi | None:
    """The `SglangApi` of a `TokenizerManager`; `None` if its engine is not enabled."""
    return state_of(tokenizer)  # type: ignore[no-any-return]


def _is_health_check(rid: Any) -> bool:
    from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX

    return isinstance(rid, str) and rid.startswith(HEALTH_CHECK_RID_PREFIX)


# -- hooks on the tokenizer manager -------------------------------------------------------------------------


@on_enabled(lambda tokenizer: config_of(tokenizer.server_args))
def _add_api(config: RLMemoryConfig, original: Callable[..., Any], tokenizer: Any) -> Any:
    from sglang.utils import TypeBasedDispatcher

    from rl_memory_plugins.engines.sglang.messages import RLMemoryReqOutput

    result = original(tokenizer)
    tokenizer.rl_memory = api = SglangApi(tokenizer, config)
    tokenizer._result_dispatcher += TypeBasedDispatcher([(RLMemoryReqOutput, api.on_reply)])
    return result


@on_enabled()
def _reporting_refusals(
    api: SglangApi, original: Callable[..., Any], tokenizer: Any, obj: Any, *args: Any, **kwargs: Any
) -> Any:
    """Report refusals of the schedulers to the gate, and answer requests that SGLang would hold back in vain.

    These are health checks of a paused engine, and requests to an engine that is paused and closed.

    SGLang holds back all requests while paused, health checks too, and then calls itself unhealthy. A request to a
    closed engine would wait for a wake and for the end of the pause. While the weights are only being updated, requests
    wait as in SGLang alone, because the caller has paused the engine for that. So do requests that already wait when
    the engine closes.
    """
    if tokenizer.is_pause:
        if _is_health_check(obj.rid):
            return _ask_schedulers(api)
        refusal = first_refusal(api.status_now(), held=True)
        if refusal is not None:
            return _refuse(obj, refusal)
    return _reported(api, original(tokenizer, obj, *args, **kwargs))


@on_enabled()
async def _with_present_adapters(api: SglangApi, original: Callable[..., Any], tokenizer: Any, obj: Any) -> None:
    """Have a request use the present version of its adapter, and report the version for the header of the answer."""
    api.serve_adapters()
    await original(tokenizer, obj)
    served_adapters.report_version(obj, api.status_now())


async def _reported(api: SglangApi, outputs: AsyncGenerator[Any, None]) -> AsyncIterator[Any]:
    """The outputs of a request. If a scheduler refuses it, because the engine has closed since, the gate knows."""
    try:
        async with aclosing(outputs):  # a caller that goes away ends the request now
            async for output in outputs:
                refusal = _refusal_in(api, output)
                if refusal is not None:
                    report_refusal(refusal)
                yield output
    except Exception as error:
        refusal = _late_refusal(api, error)
        if refusal is not None:
            report_refusal(refusal)
        raise


async def _refuse(obj: Any, refusal: EngineAsleepError) -> AsyncIterator[Any]:
    """Refuse a request as SGLang does if a scheduler refuses it: by an exception, or by the only output of a stream.

    The server has sent the head of a stream's answer, and an exception would break the connection.
    """
    from fastapi import HTTPException

    report_refusal(refusal)
    if not getattr(obj, "stream", False):
        raise HTTPException(status_code=refusal.status, detail=refusal.message)
    meta_info = {"id": obj.rid, "finish_reason": finish_reason_of(refusal), "completion_tokens": 0}
    yield {"text": "", "output_ids": [], "meta_info": meta_info}


async def _ask_schedulers(api: SglangApi) -> AsyncIterator[Any]:
    """Yield a reply of the schedulers in place of a health check's outputs: any reply shows that they live."""
    yield await api.run(operations.hello())


@on_enabled()
async def _native_release(api: SglangApi, original: Any, tokenizer: Any, obj: Any, request: Any = None) -> None:
    await api.run(api.native_release(obj.tags or None))


@on_enabled()
async def _native_resume(api: SglangApi, original: Any, tokenizer: Any, obj: Any, request: Any = None) -> None:
    await api.run(api.wake_up(obj.tags or None))


class _Paused:
    """A view of a tokenizer manager that looks paused: SGLang's own updates then do not wait for running requests."""

    is_pause = True

    def __init__(self, tokenizer: Any) -> None:
        self.__dict__["_tokenizer"] = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._tokenizer, name, value)


@on_enabled()
async def _beside_kept_requests(
    api: SglangApi, original: Callable[..., Any], tokenizer: Any, *args: Any, **kwargs: Any
) -> Any:
    """Let SGLang's own updates run on a closed engine. They would wait for kept requests, which end after a wake.

    Updates still wait for each other: SGLang mixes up the answers of two concurrent updates from disk and ends the
    server.
    """
    with api.native_call():
        if first_refusal(api.status_now()) is None:
            return await original(tokenizer, *args, **kwargs)
        async with api.native_updates:
            return await original(_Paused(tokenizer), *args, **kwargs)


@on_enabled()
async def _joining(api: SglangApi, original: Callable[..., Any], tokenizer: Any, *args: Any, **kwargs: Any) -> Any:
    with api.native_call():
        return await original(tokenizer, *args, **kwargs)


@on_enabled()
def _native_is_ready(api: SglangApi, original: Callable[..., bool], tokenizer: Any) -> bool:
    """Whether the server takes new requests: routers ask for it by `/ready`."""
    return original(tokenizer) and first_refusal(api.status_now()) is None


@on_enabled()
async def _from_disk(
    api: SglangApi, original: Callable[..., Any], tokenizer: Any, obj: Any, *args: Any, **kwargs: Any
) -> Any:
    """Show the version of loaded weights that the caller has not named, as SGLang shows one that the caller names."""
    former = await api.run(api.weight_version())
    success, message, *others = await _beside_kept_requests(original)(tokenizer, obj, *args, **kwargs)
    version = await api.run(api.weight_version())
    if success and obj.weight_version is None and version != former:
        tokenizer._update_weight_version_if_provided(version)
        message += f" Weight version updated to {version}."
    return success, message, *others


# -- hooks on Engine ----------------------------------------------------------------------------------------


def _engine_api(engine: Any) -> Any:
    return api_of(engine.tokenizer_manager)


def _method(operation: str) -> Callable[..., Any]:
    """A method of `Engine` that runs an operation on the event loop of the tokenizer manager."""
    return engine_method(
        operation, SglangApi, _engine_api, lambda engine, api, run: engine.loop.run_until_complete(api.run(run))
    )


def _update_weights_from_ipc(original: Callable[..., Any]) -> Callable[..., Any]:
    """Serve two methods of this name: with a token, `update_weights_from_ipc(endpoints, token)`; else SGLang's own."""

    def update_weights_from_ipc(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_ours = "token" in kwargs or (len(args) > 1 and isinstance(args[1], str))
        return (ours if is_ours else original)(self, *args, **kwargs)

    ours = _method("update_weights_from_ipc")
    return update_weights_from_ipc


@on_enabled(_engine_api)
def _gated(api: SglangApi, original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse calls that run the model while the engine is closed."""
    if api.may_be_stale:
        engine.loop.run_until_complete(api.run(api.status()))
    refuse_if_closed(api.status_now())
    with _typed_refusals(api):
        outputs = original(engine, *args, **kwargs)
    return _checked_here(api, outputs) if isinstance(outputs, Iterator) else outputs


def _checked_here(api: SglangApi, outputs: Iterator[Any]) -> Iterator[Any]:
    with _typed_refusals(api):
        for output in outputs:
            _require_answer(api, output)
            yield output


@on_enabled(_engine_api)
async def _gated_async(api: SglangApi, original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
    if api.may_be_stale:
        await api.run(api.status())
    refuse_if_closed(api.status_now(), held=api.is_held())
    with _typed_refusals(api):
        outputs = await original(engine, *args, **kwargs)
    return _checked(api, outputs) if hasattr(outputs, "__aiter__") else outputs


async def _checked(api: SglangApi, outputs: AsyncIterator[Any]) -> AsyncIterator[Any]:
    with _typed_refusals(api):
        async for output in outputs:
            _require_answer(api, output)
            yield output


def _require_answer(api: SglangApi, output: Any) -> None:
    """Raise the refusal of a stream. SGLang begins a stream with its iteration, when the engine may have closed since
    the call."""
    refusal = _refusal_in(api, output)
    if refusal is not None:
        raise refusal


def _refusal_in(api: SglangApi, output: Any) -> EngineAsleepError | None:
    """The refusal of a scheduler, which SGLang makes an output of a stream like the others; `None` in other outputs.

    Args:
        output: Of one request, or of a batch. SGLang then knows the reason as an error, too.
    """
    if not isinstance(output, dict):
        found = (_refusal_in(api, one) for one in output) if isinstance(output, list) else ()
        return next(filter(None, found), None)
    reason = output["meta_info"].get("finish_reason") if "meta_info" in output else None
    if not isinstance(reason, dict) or reason.get("err_type") != EngineAsleepError.__name__:
        return None
    reason["status_code"] = HTTPStatus(reason["status_code"])
    return _refusal_now(api, reason["message"])


def _refusal_now(api: SglangApi, message: str) -> EngineAsleepError:
    """The refusal as the engine is now; one with the message of a scheduler if it has opened again since."""
    return first_refusal(api.status_now()) or EngineAsleepError(
        message, reason="paused", retry_after_s=RETRY_AFTER_SECONDS
    )


@contextmanager
def _typed_refusals(api: SglangApi) -> Iterator[None]:
    """Raise the typed refusal of a closed engine. SGLang reports it as an HTTP exception with the same message."""
    try:
        yield
    except Exception as error:
        refusal = _late_refusal(api, error)
        if refusal is not None:
            raise refusal from error
        raise


def _late_refusal(api: SglangApi, error: Exception) -> EngineAsleepError | None:
    """The refusal that SGLang reports as this error; `None` for other errors."""
    if getattr(error, "status_code", None) != EngineAsleepError.status:
        return None
    message = str(getattr(error, "detail", ""))
    return _refusal_now(api, message) if message.startswith(NOT_ADMITTED) else first_refusal(api.status_now())
