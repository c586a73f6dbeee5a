"""The hooks of `LLM`, `LLMEngine` and `AsyncLLM`: calls to the controllers, reads of their boards, and refusals."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import Future
from typing import Any

from rl_memory_plugins import admission, commands, operations
from rl_memory_plugins.commands import AnyCommand, decode_reply
from rl_memory_plugins.config import RLMemoryConfig
from rl_memory_plugins.engine_api import AsyncioApi, EngineApi
from rl_memory_plugins.engines.vllm.core import (
    REFUSED,
    notice_loads,
    refuse_resume,
    with_graphs,
    without_scheduling,
)
from rl_memory_plugins.engines.vllm.options import config_of
from rl_memory_plugins.errors import EngineAsleepError, UnsupportedError
from rl_memory_plugins.hooking import Hooks
from rl_memory_plugins.operations import Operation, Transition
from rl_memory_plugins.records import Reply, Report
from rl_memory_plugins.server.gate import refuse_if_closed, report_refusal

LLM = "vllm.entrypoints.llm:LLM"
SYNC = "vllm.v1.engine.llm_engine:LLMEngine"
ASYNC = "vllm.v1.engine.async_llm:AsyncLLM"
OUTPUTS = "vllm.v1.engine.output_processor:OutputProcessor"
CORES = "vllm.v1.engine.core_client:MPClient"

#: The engines' own methods, and those added to them, with the operation of the engine API that each runs.
NATIVE = {"sleep": "native_sleep", "wake_up": "native_wake_up", "is_sleeping": "is_sleeping"}
METHODS = {
    "memory_status": "memory_status",
    "wake_up_with_report": "wake_up",
    "update_weights_from_ipc": "update_weights_from_ipc",
    "weight_version": "weight_version",
    "weight_checksums": "weight_checksums",
}


def install(hooks: Hooks) -> None:
    for engine, make in ((SYNC, SyncApi), (ASYNC, AsyncApi)):
        for name, operation in NATIVE.items():
            hooks.wrap(f"{engine}.{name}", _redirect_to(make, operation))
    hooks.wrap(f"{SYNC}.add_request", _gated_add)
    hooks.wrap(f"{SYNC}.step", _noticing_step)
    hooks.wrap(f"{ASYNC}.generate", _gated_stream)
    hooks.wrap(f"{ASYNC}.encode", _gated_stream)
    hooks.wrap(f"{ASYNC}.resume_generation", _native_resume)
    hooks.wrap(f"{OUTPUTS}.process_outputs", _without_aborted_pooling)
    hooks.wrap(f"{LLM}.sleep", _llm_native("sleep"))
    hooks.wrap(f"{LLM}.wake_up", _llm_native("wake_up"))
    hooks.wrap(f"{CORES}.shutdown", _ends_calls)
    _add_methods(hooks.require(SYNC), SyncApi, of=lambda engine: engine)
    _add_methods(hooks.require(LLM), SyncApi, of=lambda llm: llm.llm_engine)
    _add_methods(hooks.require(ASYNC), AsyncApi, of=lambda engine: engine)
    hooks.require(LLM).is_sleeping = lambda llm: llm.llm_engine.is_sleeping()


class VllmApi(EngineApi):
    """The contract, and vLLM's own calls of the same names."""

    def __init__(self, engine: Any, *transport: Any) -> None:
        super().__init__(*transport)
        self._engine = weakref.proxy(engine)  # vLLM ends its processes with the last reference to the engine

    def transition(self, command: Transition) -> Operation:
        report: Report = yield from super().transition(command)
        if isinstance(command, commands.Sleep):
            _record_sleep(self._engine, 1, command.level)
        elif isinstance(command, commands.WakeUp) and not (yield from self.is_sleeping()):
            _record_sleep(self._engine, 0, 0)
        return report

    def wake_up(self, tags: object = None) -> Operation:
        """As vLLM's `wake_up`, but wakes only the named tags and returns the report."""
        return (yield from super().wake_up(without_scheduling(tags, (yield from self.status()))))

    def native_sleep(self, level: object = 1, mode: object = "abort", tags: object = None) -> Operation:
        """Release memory; see the contract. `mode` stands second, as in vLLM's own `sleep`."""
        return (yield from self.sleep(level, tags, mode))

    def native_wake_up(self, tags: object = None) -> Operation:
        """Take memory back. Returns whether nothing sleeps any more, as vLLM's own `wake_up` does."""
        engines = yield from self.status()
        yield from self.wake_up(with_graphs(without_scheduling(tags, engines), engines))
        return not (yield from self.is_sleeping())


class SyncApi(VllmApi):
    """Over a blocking engine (`LLM`, `LLMEngine`)."""

    def __init__(self, engine: Any, config: RLMemoryConfig) -> None:
        super().__init__(engine)

    def run(self, operation: Operation) -> Any:
        self.notice_loads()
        return operations.run(operation, self._call)

    def notice_loads(self, weight_version: str | None = None) -> None:
        """Look for weights that the caller has loaded without a call, where the engine core is in its process.

        Args:
            weight_version: The version of these weights, if the caller names one.
        """
        if self._core_here is not None:
            notice_loads(self._core_here, weight_version)

    @property
    def _core_here(self) -> Any:
        core = getattr(self._engine.engine_core, "engine_core", None)
        return core if hasattr(core, "rl_memory_call") else None

    def _call(self, command: AnyCommand) -> list[Reply[Any]]:
        payload = commands.encode_command(command)
        if self._core_here is not None:
            return [decode_reply(self._core_here.rl_memory_call(payload))]
        return [decode_reply(self._engine.engine_core.call_utility("rl_memory_call", payload))]


class AsyncApi(VllmApi, AsyncioApi):
    """Over `AsyncLLM`."""

    def __init__(self, engine: Any, config: RLMemoryConfig) -> None:
        super().__init__(engine, config.drain_timeout_s)

    async def _call(self, command: AnyCommand) -> list[Reply[Any]]:
        client, payload = self._engine.engine_core, commands.encode_command(command)
        replies = await asyncio.gather(
            *(client._call_utility_async("rl_memory_call", payload, engine=core) for core in client.core_engines)
        )
        return [decode_reply(reply) for reply in replies]


def _ends_calls(original: Callable[..., Any]) -> Callable[..., Any]:
    """Fail calls that wait for an engine core that has died. vLLM shuts its client down and leaves them waiting."""

    def shutdown(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if config_of(self.vllm_config) is not None:
            while self.utility_results:
                _, call = self.utility_results.popitem()
                _end(call)

    return shutdown


def _end(call: Future[Any] | asyncio.Future[Any]) -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    def end() -> None:
        if not call.done():
            call.set_exception(EngineDeadError())

    if isinstance(call, asyncio.Future):
        with contextlib.suppress(RuntimeError):  # its loop is closed: nobody waits
            call.get_loop().call_soon_threadsafe(end)
    else:
        end()


def _record_sleep(engine: Any, asleep: int, level: int) -> None:
    """Keep vLLM's own sleep metrics right."""
    if engine.logger_manager is not None:
        engine.logger_manager.record_sleep_state(asleep, level)


def api_of(engine: Any, make: type[SyncApi] | type[AsyncApi]) -> Any:
    """The engine's API, made at first use; `None` if the engine is not enabled."""
    api = engine.__dict__.get("rl_memory")
    if api is None:
        config = config_of(engine.vllm_config)
        if config is None:
            return None
        api = engine.rl_memory = make(engine, config)
    return api


def _redirect_to(make: Any, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Redirect a method of the engine to an operation of its API, if the engine is enabled."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            api = api_of(self, make)
            if api is None:
                return original(self, *args, **kwargs)
            return api.run(getattr(api, name)(*args, **kwargs))

        return method

    return wrap


def _llm_native(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Redirect a method of `LLM`. On an enabled engine it also takes `tags` and returns the report."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            enabled = api_of(self.llm_engine, SyncApi) is not None
            return getattr(self.llm_engine, name)(*args, **kwargs) if enabled else original(self, *args, **kwargs)

        return method

    return wrap


def _add_methods(owner: type, make: Any, of: Callable[[Any], Any]) -> None:
    for name, operation in METHODS.items():

        def method(self: Any, *args: Any, _operation: str = operation, **kwargs: Any) -> Any:
            api = api_of(of(self), make)
            if api is None:
                raise UnsupportedError("this engine was started without rl_memory")
            return api.run(getattr(api, _operation)(*args, **kwargs))

        method.__name__ = name
        method.__doc__ = getattr(make, operation).__doc__
        setattr(owner, name, method)


def _native_resume(original: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse to resume while any engine is closed: engines that step together would wait for it."""

    async def resume_generation(self: Any) -> None:
        api = api_of(self, AsyncApi)
        if api is not None:
            refuse_resume(admission.first_refusal(await api.run(api.status())))
        await original(self)

    return resume_generation


def _gated_add(original: Callable[..., Any]) -> Callable[..., Any]:
    def add_request(self: Any, *args: Any, **kwargs: Any) -> Any:
        api = api_of(self, SyncApi)
        if api is not None:
            try:
                refuse_if_closed(api.run(api.status()))
            except EngineAsleepError:
                if _has_images(self):  # this side counts those of the request among what the core has
                    self.reset_mm_cache()
                raise
        return original(self, *args, **kwargs)

    return add_request


def _noticing_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """A request that runs must not go on with keys and values of former weights."""

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        api = api_of(self, SyncApi)
        if api is not None:
            api.notice_loads()
        return original(self, *args, **kwargs)

    return step


def _has_images(engine: Any) -> bool:
    """Whether requests may hold images, audio or video.

    vLLM sends each of these inputs to the core once, and counts it as sent before it adds the request. A refusal in
    between must not make the two halves of that cache disagree.
    """
    return bool(engine.vllm_config.model_config.is_multimodal_model)


def _gated_stream(original: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse `generate` and `encode` before anything is queued. The check costs nothing per token."""

    def stream(self: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        api = api_of(self, AsyncApi)
        if api is None:
            return original(self, *args, **kwargs)  # type: ignore[no-any-return]
        outputs = original(self, *args, **kwargs)
        prompt = args[0] if args else kwargs.get("prompt")
        if isinstance(prompt, AsyncGenerator):
            outputs = _ending_when_aborted(outputs)
        return _checked_stream(api, outputs, sent_on=_has_images(self))

    return stream


async def _ending_when_aborted(outputs: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    """End a request that streams its input once the core has aborted it. vLLM would go on with it and compute later
    input without the input before."""
    async with contextlib.aclosing(outputs):
        async for output in outputs:
            output.finished = output.finished or any(one.finish_reason == "abort" for one in output.outputs)
            yield output
            if output.finished:
                return


async def _checked_stream(
    api: AsyncApi, outputs: AsyncGenerator[Any, None], *, sent_on: bool = False
) -> AsyncIterator[Any]:
    """Refuse the request if the engine is closed, or has closed before the request had an answer.

    Args:
        sent_on: Let the core refuse the request; see `_has_images`.
    """
    if not sent_on:
        refuse_if_closed(api.status_now() or await api.status_at_first())
    try:
        async with contextlib.aclosing(outputs):  # a caller that goes away ends the request now
            async for output in outputs:
                reason = _refused(output)
                if reason:  # the engine closed on the way
                    raise _Unanswered(reason)
                yield output
    except Exception as error:
        unanswered = error if isinstance(error, _Unanswered) else error.__cause__
        if not isinstance(unanswered, _Unanswered):
            raise
        reason = unanswered.reason or await _reason(api)
    else:
        return
    refusal = EngineAsleepError(
        "the engine closed before the request had an answer",
        reason=reason,
        retry_after_s=admission.RETRY_AFTER_SECONDS,
    )
    report_refusal(refusal)
    raise refusal


async def _reason(api: AsyncApi) -> str:
    """Why the engine is closed; `paused` if it has opened again since it ended the request."""
    refusal = admission.first_refusal(api.status_now() or await api.run(api.status()))
    return "paused" if refusal is None else str(refusal.details["reason"])


class _Unanswered(Exception):
    """The engine ended a request without an answer.

    Args:
        stop_reason: The stop reason of the core; empty if the core has not refused the request.
    """

    def __init__(self, stop_reason: str) -> None:
        super().__init__("the engine closed before the request had an answer")
        self.reason = stop_reason.removeprefix(REFUSED)


def _without_aborted_pooling(original: Callable[..., Any]) -> Callable[..., Any]:
    """Handle aborted pooling requests. vLLM would treat them as generation requests, fail, and end the server."""

    def process_outputs(self: Any, engine_core_outputs: list[Any], *args: Any, **kwargs: Any) -> Any:
        ended = [output for output in engine_core_outputs if _is_aborted_pooling(self, output)]
        if not ended:
            return original(self, engine_core_outputs, *args, **kwargs)
        queues = {output.request_id: self.request_states[output.request_id].queue for output in ended}
        self.abort_requests(queues.keys(), internal=True)
        for output in ended:
            queue = queues[output.request_id]
            if queue is not None:  # replaces the empty answer of vLLM's abort
                queue.put(_Unanswered(output.stop_reason if isinstance(output.stop_reason, str) else ""))
        rest = [output for output in engine_core_outputs if output.request_id not in queues]
        return original(self, rest, *args, **kwargs)

    return process_outputs


def _is_aborted_pooling(processor: Any, output: Any) -> bool:
    if output.finish_reason is None or output.pooling_output is not None:
        return False
    from vllm.v1.engine import FinishReason

    state = processor.request_states.get(output.request_id)
    return state is not None and state.detokenizer is None and output.finish_reason is FinishReason.ABORT


def _refused(output: Any) -> str:
    """Why the engine refused the request or one of its completions; empty if it did not."""
    completions = output.outputs if isinstance(output.outputs, list) else ()  # a pooling request's output has none
    reasons = (completion.stop_reason for completion in completions)
    return next((reason for reason in reasons if isinstance(reason, str) and reason.startswith(REFUSED)), "")
