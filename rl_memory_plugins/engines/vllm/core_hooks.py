"""The controller's view of an engine core: its ranks and its scheduler."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from rl_memory_plugins.commands import decode_reply
from rl_memory_plugins.coordination import raise_failures
from rl_memory_plugins.engines.vllm.adapters import number_in
from rl_memory_plugins.engines.vllm.frozen import forget_prefixes, require_known_cache
from rl_memory_plugins.errors import EngineFaultError, UnsupportedError, unsupported
from rl_memory_plugins.rank import encode_call
from rl_memory_plugins.records import Reply
from rl_memory_plugins.tags import PauseMode, Tag


class VllmRanks:
    """The workers of the executor, as the ranks of the controller.

    Args:
        may_lack_plugin: Whether workers may have been started without the plugin, on other hosts. All are asked then.

    Raises:
        UnsupportedError: a host of the engine was started without the plugin.
    """

    def __init__(self, executor: Any, *, may_lack_plugin: bool = False) -> None:
        self._executor = executor
        if may_lack_plugin:
            self._require_plugin()

    def _require_plugin(self) -> None:
        try:
            self.call("content")
        except Exception as error:  # the start ends, so it does not matter that other replies are left in queues
            if "rl_memory_rank_call" not in str(error):
                raise
            raise unsupported(
                "an engine of which only some hosts have the plugin",
                "start every host with the same --rl-memory, those with --headless too",
            ) from error

    def call(self, method: str, **arguments: Any) -> list[Reply[Any]]:
        payload = encode_call(method, arguments)
        return [decode_reply(reply) for reply in self._executor.collective_rpc("rl_memory_rank_call", args=(payload,))]


class VllmEngine:
    """The scheduler of one engine core, for the controller.

    Args:
        core: vLLM's engine core.
        modes: The modes that the core can do.
    """

    def __init__(self, core: Any, modes: Sequence[PauseMode] = tuple(PauseMode)) -> None:
        self._core = core
        self._modes = modes
        self._paused_here = False
        self._paused_natively = False
        self._waits: list[Future[None]] = []
        self._since = time.monotonic()  # the latest request, or resume

    def note_request(self) -> None:
        """Note that a request comes, whose results the core may keep in its caches."""
        self._core.rl_memory_has_no_caches = False
        self._since = time.monotonic()

    def is_idle(self, seconds: float) -> bool:
        busy = self._core.scheduler.has_unfinished_requests() or self._core.is_scheduler_paused()
        return not busy and time.monotonic() - self._since >= seconds

    def drain(self, mode: PauseMode, *, for_update: bool = False) -> Future[None]:
        if mode not in self._modes:
            if self._core.scheduler.has_unfinished_requests():
                able = [one.value for one in self._modes]
                raise UnsupportedError(
                    f"this engine cannot {mode.value} for requests: use {' or '.join(able)}", modes=able
                )
            mode = PauseMode.ABORT  # there is none to be aborted
        if mode is PauseMode.FREEZE:
            require_known_cache(self._core)
        if not self._paused_here:
            self._paused_natively = self._core.is_scheduler_paused()
        self._paused_here = True
        if mode is PauseMode.WAIT:
            return self._when_idle()
        if mode is PauseMode.FREEZE:
            paused = self._pause(PauseMode.KEEP)  # vLLM's own "keep" stops requests and preempts none
            if _is_in_caller(self._core):
                _finish_steps(self._core)
            return paused
        return self._pause(mode)

    def _pause(self, mode: PauseMode) -> Future[None]:
        untold: list[Any] = []  # of what the pause aborts; an engine core in its own process tells its clients
        if mode is PauseMode.ABORT and _is_in_caller(self._core):
            untold = [request for request in self._core.scheduler.requests.values() if not request.is_finished()]
        with self._without_agreement():
            paused = self._core.pause_scheduler(mode=mode.value, clear_cache=False)
        _hand_out_aborts(self._core, untold)
        if paused is not None:
            return paused  # type: ignore[no-any-return]
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @contextlib.contextmanager
    def _without_agreement(self) -> Iterator[None]:
        """Pause without the agreement of data-parallel engines if all of them have stopped already.

        Engines of a model with experts agree on a stop. Each takes a step with an empty batch for it, unless the engine
        sleeps. If all engines have stopped and only some of them sleep, such a step would never end.
        """
        core = self._core
        if not getattr(core, "ignore_start_dp_wave", False) or core.engines_running:
            yield
            return
        core._pause_complete = lambda: True
        try:
            yield
        finally:
            del core._pause_complete

    def _when_idle(self) -> Future[None]:
        """Pause once no request runs or waits. vLLM's own "wait" would leave queued requests in the queue until the
        wake. Here the core refuses new requests, so all queued requests can end."""
        if not self._core.has_work():
            return self._pause(PauseMode.KEEP)
        idle: Future[None] = Future()
        self._waits.append(idle)

        def pause(core: Any) -> None:
            if idle not in self._waits:  # given up
                return
            self._waits.remove(idle)
            try:
                paused = self._pause(PauseMode.KEEP)
            except Exception as error:
                idle.set_exception(error)
            else:
                paused.add_done_callback(lambda done: settle(idle, done))
                _wake_loop(core)  # which would block for the next message, with a stop to be agreed on

        self._core._idle_state_callbacks.append(pause)
        return idle

    def resume(self, *, lift_pause: bool) -> None:
        self._since = time.monotonic()
        if not self._paused_here and not lift_pause:
            return  # nothing of ours is to be undone, and a pause that stands is the user's
        self._waits.clear()
        keep_paused = self._paused_natively and not lift_pause
        self._paused_here = self._paused_natively = False
        if not keep_paused and self._core.is_scheduler_paused():
            if getattr(self._core, "pending_pause", False):  # what the others have not agreed to is taken back
                self._core.pending_pause = False
                self._core.scheduler.set_pause_state(type(self._core.scheduler.pause_state).UNPAUSED)
            else:
                self._core.resume_scheduler()
            _wake_loop(self._core)

    def has_requests(self) -> bool:
        return bool(self._core.scheduler.requests)

    def reset_caches(self, *, frozen: bool = False, released: bool = False) -> None:
        if frozen and self.has_requests():
            forget_prefixes(self._core)
            self._core.reset_encoder_cache()  # an image whose tokens are half computed is encoded again
        elif reset_caches(self._core):
            has_none, self._core.rl_memory_has_no_caches = self._core.rl_memory_has_no_caches, False
            if not released:  # else it is zeros after the wake
                self._clear_kv_cache()
                self._core.rl_memory_has_no_caches = has_none
        self._drop_pooled_rows()

    def _drop_pooled_rows(self) -> None:
        """Drop the rows of token-wise pooling that workers keep between two parts of a prompt, of requests that begin
        again. vLLM's first model runner would put those of the former weights before the new ones."""
        requests = self._core.scheduler.requests.items()
        begun_again = [number for number, one in requests if one.pooling_params and one.num_computed_tokens == 0]
        if begun_again:
            raise_failures(VllmRanks(self._core.model_executor).call("drop_pooled_rows", requests=begun_again))

    def _clear_kv_cache(self) -> None:
        """On a CPU, overwrite the KV cache with zeros: vLLM's attention there multiplies what lies behind a request's
        last token by zero, and a NaN of former weights stays one."""
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            raise_failures(VllmRanks(self._core.model_executor).call("clear_kv_cache"))

    def reset_caches_after_load(self) -> None:
        """Drop what was computed before weights were loaded by a call of vLLM.

        vLLM's own pause with `clear_cache=False` leaves running requests their KV cache. With `clear_cache=True` it has
        preempted them.
        """
        self.reset_caches(frozen=self._core.is_scheduler_paused() and not self._paused_here)

    def adapters_in_use(self) -> set[int]:
        requests = self._core.scheduler.requests.values()
        return {number for request in requests if (number := number_in(request.lora_request)) is not None}

    def call_after_reply(self, act: Callable[[], None]) -> None:
        if _is_in_caller(self._core):
            act()
        else:
            self._core._idle_state_callbacks.append(lambda core: act())

    def show(self, asleep_tags: list[str], weight_version: str) -> None:
        # The data-parallel dummy batch looks at the executor, so it must know which tags are asleep.
        executor = self._core.model_executor
        executor.sleeping_tags = set(asleep_tags)
        if Tag.KV_CACHE.value in asleep_tags:
            self._core.rl_memory_has_no_caches = not self._core.scheduler.requests
        if not isinstance(getattr(type(executor), "is_sleeping", None), property):
            executor.is_sleeping = bool(asleep_tags)
        if hasattr(self._core, "_weight_version"):
            self._core._weight_version = weight_version


def worker_here(core: Any) -> Any:
    """The `VllmWorker` of a worker in the core's process; `None` if the workers have processes of their own."""
    wrapper = getattr(core.model_executor, "driver_worker", None)
    return getattr(getattr(wrapper, "worker", None), "rl_memory", None)


def _is_in_caller(core: Any) -> bool:
    """Whether the core runs in the caller's process, without a loop: it steps only when the caller calls it."""
    return not hasattr(core, "input_queue")


def _wake_loop(core: Any) -> None:
    """Make an idle loop look for work again.

    A callback that waits for the last step of a batch in flight (asynchronous scheduling) runs just before the loop
    blocks for the next message. Requests that were kept until then would not go on.
    """
    if not _is_in_caller(core):
        from vllm.v1.engine import EngineCoreRequestType

        core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))


def _hand_out_aborts(core: Any, requests: list[Any]) -> None:
    """Report aborted requests at the next step. A core in the caller's process reports none of its own aborts."""
    if not requests:
        return
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

    ended = [EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ABORT) for request in requests]
    _hand_out(core, [{0: EngineCoreOutputs(outputs=ended)}])


def _finish_steps(core: Any) -> None:
    """Finish the steps in flight of a paused core in the caller's process, whose tokens come from the former weights.

    A core in a process of its own does this by itself before a pause is complete.
    """
    outputs = []
    while getattr(core, "batch_queue", None):
        output, _ = core.step_fn()
        if output:
            outputs.append(output)
    _hand_out(core, outputs)


def _hand_out(core: Any, outputs: list[dict[int, Any]]) -> None:
    """Return these outputs from the next steps of a core in the caller's process, before it steps again."""
    step, left = core.step_fn, list(outputs)

    def hand_out() -> tuple[dict[int, Any], bool]:
        output = left.pop(0)
        if not left:
            core.step_fn = step
        return output, False

    if left:
        core.step_fn = hand_out


def _end_idle_sessions(core: Any) -> None:
    """End requests that stream their input and stand between two parts of it: they wait for the next part, or have it
    and are not scheduled yet. They hold KV cache, which vLLM frees of scheduled requests only."""
    from vllm.v1.request import RequestStatus

    def is_idle(request: Any) -> bool:
        queued = request.status is RequestStatus.WAITING and request.num_computed_tokens > 0
        return queued or request.status is RequestStatus.WAITING_FOR_STREAMING_REQ

    end_requests(core, [number for number, request in core.scheduler.requests.items() if is_idle(request)])


def end_requests(core: Any, numbers: list[str]) -> None:
    """End requests as aborted, and tell their callers."""
    if not numbers:
        return
    from vllm.v1.request import RequestStatus

    ended = core.scheduler.finish_requests(numbers, RequestStatus.FINISHED_ABORTED)
    if _is_in_caller(core):
        _hand_out_aborts(core, ended)
    else:
        core._send_abort_outputs(ended)


def reset_caches(core: Any) -> bool:
    """Drop everything that was computed from the weights. The cache of multimodal inputs stays: it does not depend on
    the weights, and clients hold its other half, so their next requests would fail without it.

    Returns: whether there may have been something.
    """
    # A reset walks all KV blocks, and some trainers call for each tensor.
    if getattr(core, "rl_memory_has_no_caches", False):
        return False
    _end_idle_sessions(core)
    if not core.reset_prefix_cache(reset_running_requests=True, reset_connector=True):
        raise EngineFaultError("vLLM could not reset its prefix cache, e.g. that of a KV connector")
    core.reset_encoder_cache()
    # A paused scheduler with kept requests says that it has none.
    core.rl_memory_has_no_caches = not core.scheduler.requests
    return True


def settle(future: Future[Any], done: Future[Any], result: Any = None) -> None:
    """Complete `future` with the error of `done`, or with `result`."""
    error = done.exception()
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
