"""The hooks of `LLM`, `LLMEngine` and `AsyncLLM`: calls to the controllers, reads of their boards, and refusals."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any

from rl_memory_plugins import admission, commands, operations
from rl_memory_plugins.commands import AnyCommand, decode_reply
from rl_memory_plugins.config import RLMemoryConfig
from rl_memory_plugins.engine_api import AsyncioApi, EngineApi
from rl_memory_plugins.engines.enabled import Make, engine_method, on_enabled
from rl_memory_plugins.engines.vllm import metrics
from rl_memory_plugins.engines.vllm.core import (
    REFUSED,
    is_busy,
    notice_loads,
    refuse_resume,
    with_graphs,
    without_scheduling,
)
from rl_memory_plugins.engines.vllm.options import config_of
from rl_memory_plugins.engines.vllm.served_adapters import request_for, with_present_versions
from rl_memory_plugins.errors import EngineAsleepError, RLMemoryError
from rl_memory_plugins.hooking import Hooks
from rl_memory_plugins.operations import Operation, Transition
from rl_memory_plugins.records import Reply
from rl_memory_plugins.server.gate import refuse_if_closed, report_refusal

LLM = "vllm.entrypoints.llm:LLM"
SYNC = "vllm.v1.engine.llm_engine:LLMEngine"
ASYNC = "vllm.v1.engine.async_llm:AsyncLLM"
OUTPUTS = "vllm.v1.engine.output_processor:OutputProcessor"
CORES = "vllm.v1.engine.core_client:MPClient"

_LOOK_S = 0.01  # between two looks at what another thread does

#: By the name of a method: the operation of the engine API that runs in its place, or that an added method runs.
REPLACED = {"sleep": "native_sleep", "wake_up": "native_wake_up"}
ADDED = {
    "memory_status": "memory_status",
    "timeline": "timeline",
    "wake_up_with_report": "wake_up",
    "update_weights_from_ipc": "update_weights_from_ipc",
    "update_weights_from_checkpoint": "update_weights_from_checkpoint",
    "weight_version": "weight_version",
    "weight_checksums": "weight_checksums",
    "update_adapter_from_ipc": "update_adapter_from_ipc",
    "remove_adapter": "remove_adapter",
    "lora_request": "lora_request",
}


def install(hooks: Hooks) -> None:
    for path, api, get in ((SYNC, SyncApi, _sync_api), (LLM, SyncApi, _llm_api), (ASYNC, AsyncApi, _async_api)):
        for name, operation in REPLACED.items():
            hooks.wrap(f"{path}.{name}", _running(operation, get))
        for name, operation in ADDED.items():
            setattr(hooks.require(path), name, engine_method(operation, api, get))
    hooks.wrap(f"{SYNC}.is_sleeping", _running("is_sleeping", _sync_api))
    hooks.wrap(f"{ASYNC}.is_sleeping", _running("is_sleeping", _async_api))
    hooks.require(LLM).is_sleeping = lambda llm: llm.llm_engine.is_sleeping()
    hooks.wrap(f"{SYNC}.add_request", _gated_add)
    hooks.wrap(f"{SYNC}.step", _noticing_step)
    hooks.wrap(f"{ASYNC}.generate", _gated_stream)
    hooks.wrap(f"{ASYNC}.encode", _gated_stream)
    hooks.wrap(f"{ASYNC}.pause_generation", _native_pause)
    hooks.wrap(f"{ASYNC}.resume_generation", _native_resume)
    hooks.wrap(f"{OUTPUTS}.process_outputs", _without_aborted_pooling)
    hooks.wrap(f"{CORES}.shutdown", _ending_calls)


class VllmApi(EngineApi):
    """The contract, and vLLM's own calls of the same names."""

    def __init__(self, engine: Any, *transport: Any) -> None:
        super().__init__(*transport)
        self._engine = weakref.proxy(engine)  # vLLM ends its processes with the last reference to the engine

    def transition(self, command: Transition) -> Operation:
        try:
            with self._measured(command):
                return (yield from super().transition(command))
        finally:
            self.record_sleep_state()

    def _measured(self, command: Transition) -> AbstractContextManager[None]:
        """vLLM measures the operations of its servers, and not those of `LLM`."""
        return contextlib.nullcontext()

    def record_sleep_state(self) -> None:
        """Show the state in vLLM's own metrics, if it is known."""
        engines, loggers = self.status_now(), self._engine.logger_manager
        if engines and loggers is not None:
            loggers.record_sleep_state(*metrics.sleep_state(engines))

    def wake_up(self, tags: object = None) -> Operation:
        """As vLLM's `wake_up`, but wakes only the named tags and returns the report."""
        return (yield from super().wake_up(without_scheduling(tags, (yield from self.status()))))

    def native_sleep(
        self, level: object = 1, mode: object = "abort", tags: object = None, keep: object = None
    ) -> Operation:
        """Release memory; see the contract. `mode` stands second, as in vLLM's own `sleep`."""
        return (yield from self.sleep(level, tags, mode, keep))

    def native_wake_up(self, tags: object = None) -> Operation:
        """Take memory back. Returns whether nothing sleeps any more, as vLLM's own `wake_up` does."""
        yield from self.wake_as_engine(tags)
        return not (yield from self.is_sleeping())

    def lora_request(self, name: str) -> Operation:
        """The `LoRARequest` of the present version of an adapter, for calls like `generate`.

        Raises:
            InvalidRequestError: `update_adapter_from_ipc` has added no adapter of this name.
        """
        return request_for(name, (yield from self.status())[0].adapters)

    def wake_as_engine(self, tags: object = None) -> Operation:
        """Wake the CUDA graphs too if the tags would leave nothing else asleep."""
        return (yield from self.wake_up(with_graphs(tags, (yield from self.status()))))


class SyncApi(VllmApi):
    """Over a blocking engine (`LLM`, `LLMEngine`)."""

    def __init__(self, engine: Any, config: RLMemoryConfig) -> None:
        super().__init__(engine)
        self._one_thread = threading.RLock()  # a core in this process obeys in the thread of its caller

    def run(self, operation: Operation) -> Any:
        self.notice_loads()
        return operations.run(operation, self._call)

    def notice_loads(self, weight_version: str | None = None) -> None:
        """Look for weights that the caller has loaded without a call, where the engine core is in its process.

        Args:
            weight_version: The version of these weights, if the caller names one.
        """
        core = self._core_here
        if core is None:
            return
        while not self._one_thread.acquire(timeout=_LOOK_S):  # another thread calls, perhaps only to read
            if is_busy(core):  # its operation looks at its end, and may wait for requests that this thread runs
                return
        try:
            notice_loads(core, weight_version)
        finally:
            self._one_thread.release()

    @property
    def _core_here(self) -> Any:
        core = getattr(self._engine.engine_core, "engine_core", None)
        return core if hasattr(core, "rl_memory_call") else None

    def _call(self, command: AnyCommand) -> list[Reply[Any]]:
        payload = commands.encode_command(command)
        core = self._core_here
        if core is not None:
            with self._one_thread:
                return [decode_reply(core.rl_memory_call(payload))]
        return [decode_reply(self._engine.engine_core.call_utility("rl_memory_call", payload))]


class AsyncApi(VllmApi, AsyncioApi):
    """Over `AsyncLLM`."""

    def __init__(self, engine: Any, config: RLMemoryConfig) -> None:
        super().__init__(engine, config.drain_timeout_s, config)
        self._pauses: set[asyncio.Future[None]] = set()  # vLLM's own pauses that are under way

    def _measured(self, command: Transition) -> AbstractContextManager[None]:
        return metrics.measured(command)

    @contextlib.contextmanager
    def pausing(self) -> Iterator[None]:
        """The body pauses the engines by vLLM's own call."""
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pauses.add(ended)
        try:
            yield
        finally:
            self._pauses.discard(ended)
            ended.set_result(None)

    async def pauses_ended(self) -> bool:
        """Wait until none of vLLM's own pauses is under way, if the engines step together.

        They agree on a pause in one step, and resume in an all-reduce. An engine that has agreed to a pause already
        would wait in this all-reduce for another engine that has not.

        Returns: whether it has waited. If not, no other task has run since it found none.
        """
        engines = await self.run(self.status())
        found = bool(self._pauses) and engines[0].capabilities.steps_with_peers
        if found:
            await asyncio.wait(self._pauses)
        return found

    async def _call(self, command: AnyCommand) -> list[Reply[Any]]:
        client, payload = self._engine.engine_core, commands.encode_command(command)
        replies = await asyncio.gather(
            *(client._call_utility_async("rl_memory_call", payload, engine=core) for core in client.core_engines)
        )
        return [decode_reply(reply) for reply in replies]


@on_enabled(lambda client: config_of(client.vllm_config))
def _ending_calls(
    config: RLMemoryConfig, original: Callable[..., None], client: Any, *args: Any, **kwargs: Any
) -> None:
    """Fail calls that wait for an engine core that has died. vLLM shuts its client down and leaves them waiting."""
    original(client, *args, **kwargs)
    while client.utility_results:
        _, call = client.utility_results.popitem()
        _end(call)


def _end(call: Future[Any] | asyncio.Future[Any]) -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    def end() -> None:
        if not call.done():
            call.set_exception(EngineDeadError())

    if isinstance(call, asyncio.Future):
        with contextlib.suppress(RuntimeError):  # the loop of the call is closed: nobody waits
            call.get_loop().call_soon_threadsafe(end)
    else:
        end()


def api_of(engine: Any, make: type[SyncApi] | type[AsyncApi]) -> Any:
    """The engine's API, made at first use; `None` if the engine is not enabled."""
    if "rl_memory" not in vars(engine):
        config = config_of(engine.vllm_config)
        if config is None:  # an engine that is not enabled gets nothing of this package
            return None
        engine.rl_memory = make(engine, config)
    return engine.rl_memory


_sync_api = functools.partial(api_of, make=SyncApi)
_async_api = functools.partial(api_of, make=AsyncApi)


def _llm_api(llm: Any) -> Any:
    return _sync_api(llm.llm_engine)


def _running(operation: str, get: Callable[[Any], Any]) -> Make:
    """Run an operation of the engine's API in place of a method. The method of `LLM` then takes `tags` too."""

    @on_enabled(get)
    def run(api: Any, original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
        return api.run(getattr(api, operation)(*args, **kwargs))

    return run


@on_enabled(_async_api)
async def _native_pause(api: AsyncApi, original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> None:
    with api.pausing():
        await original(engine, *args, **kwargs)


@on_enabled(_async_api)
async def _native_resume(api: AsyncApi, original: Callable[..., Any], engine: Any) -> None:
    """Refuse to resume while any engine is closed: engines that step together would wait for it."""
    found = True
    while found:  # another pause may begin meanwhile
        refuse_resume(admission.first_refusal(await api.run(api.status())))
        found = await api.pauses_ended()
    await original(engine)


@on_enabled(_sync_api)
def _gated_add(api: SyncApi, original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
    engines = api.run(api.status())
    try:
        refuse_if_closed(engines)
        args, kwargs = with_present_versions(engines, args, kwargs)
    except RLMemoryError:
        if _has_images(engine):  # this side counts the images of the request among what the core has
            engine.reset_mm_cache()
        raise
    return original(engine, *args, **kwargs)


@on_enabled(_sync_api)
def _noticing_step(api: SyncApi, original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
    """A request that runs must not go on with keys and values of former weights."""
    api.notice_loads()
    return original(engine, *args, **kwargs)


def _has_images(engine: Any) -> bool:
    """Whether requests may hold images, audio or video.

    vLLM sends each of these inputs to the core once, and counts an input as sent before it adds the request. A refusal
    in between must not make the two halves of that cache disagree.
    """
    return bool(engine.vllm_config.model_config.is_multimodal_model)


@on_enabled(_async_api)
def _gated_stream(
    api: AsyncApi, original: Callable[..., AsyncGenerator[Any, None]], engine: Any, *args: Any, **kwargs: Any
) -> AsyncIterator[Any]:
    """Refuse `generate` and `encode` before anything is queued. The check costs nothing per token."""
    args, kwargs = with_present_versions(api.status_now(), args, kwargs)
    outputs = original(engine, *args, **kwargs)
    if isinstance(args[0] if args else kwargs.get("prompt"), AsyncGenerator):
        outputs = _ending_when_aborted(outputs)
    return _checked_stream(api, outputs, core_refuses=_has_images(engine))


async def _ending_when_aborted(outputs: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    """End a request that streams its input when the core aborts the request. vLLM would go on and compute later input
    without the earlier input."""
    async with contextlib.aclosing(outputs):
        async for output in outputs:
            output.finished = output.finished or any(part.finish_reason == "abort" for part in output.outputs)
            yield output
            if output.finished:
                return


async def _checked_stream(
    api: AsyncApi, outputs: AsyncGenerator[Any, None], *, core_refuses: bool = False
) -> AsyncIterator[Any]:
    """Refuse the request if the engine is closed, or has closed before the request had an answer.

    Args:
        core_refuses: Leave the first of the two refusals to the core; see `_has_images`.
    """
    if not core_refuses:
        refuse_if_closed(api.status_now() or await api.status_at_first())
    try:
        async with contextlib.aclosing(outputs):  # a caller that goes away ends the request now
            async for output in outputs:
                reason = _refused(output)
                if reason:  # the engine closed meanwhile
                    raise _Unanswered(reason)
                yield output
    except Exception as error:
        unanswered = error if isinstance(error, _Unanswered) else error.__cause__
        if not isinstance(unanswered, _Unanswered):
            raise
        refusal = EngineAsleepError(
            "the engine closed before the request had an answer",
            reason=unanswered.reason or await _reason(api),
            retry_after_s=admission.RETRY_AFTER_SECONDS,
        )
        report_refusal(refusal)
        raise refusal from None


async def _reason(api: AsyncApi) -> str:
    """Why the engine is closed; `paused` if it has opened again since it ended the request."""
    refusal = admission.first_refusal(api.status_now() or await api.run(api.status()))
    return "paused" if refusal is None else str(refusal.details["reason"])


class _Unanswered(Exception):
    """The engine ended a request without an answer.

    Args:
        stop_reason: The stop reason that the core gave; empty if the core has not refused the request.
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
    if output.pooling_output is not None or str(output.finish_reason) != "abort":
        return False
    state = processor.request_states.get(output.request_id)
    return state is not None and state.detokenizer is None


def _refused(output: Any) -> str:
    """Why the engine refused the request or one of its completions; empty if it did not."""
    completions = output.outputs if isinstance(output.outputs, list) else ()  # a pooling request's output has none
    reasons = (completion.stop_reason for completion in completions)
    return next((reason for reason in reasons if isinstance(reason, str) and reason.startswith(REFUSED)), "")
