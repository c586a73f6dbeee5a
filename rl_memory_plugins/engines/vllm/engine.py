"""One engine core's ranks and scheduler, as the controller sees them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from rl_memory_plugins.commands import decode_reply
from rl_memory_plugins.errors import EngineFaultError, UnsupportedError
from rl_memory_plugins.rank import encode_call
from rl_memory_plugins.records import Reply
from rl_memory_plugins.tags import PauseMode


class VllmRanks:
    """The executor's workers as the controller's ranks."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor

    def call(self, method: str, **arguments: Any) -> list[Reply[Any]]:
        payload = encode_call(method, arguments)
        return [decode_reply(reply) for reply in self._executor.collective_rpc("rl_memory_rank_call", args=(payload,))]


class VllmEngine:
    """The scheduler of one engine core, for the controller.

    Args:
        core: vLLM's.
        modes: The modes that it can do.
    """

    def __init__(self, core: Any, modes: Sequence[PauseMode] = tuple(PauseMode)) -> None:
        self._core = core
        self._modes = modes
        self._paused_here = False
        self._paused_natively = False
        self._waits: list[Future[None]] = []

    def drain(self, mode: PauseMode) -> Future[None]:
        if mode not in self._modes:
            if self._core.scheduler.has_unfinished_requests():
                able = [one.value for one in self._modes]
                raise UnsupportedError(
                    f"this engine cannot {mode.value} for requests: use {' or '.join(able)}", modes=able
                )
            mode = PauseMode.ABORT  # there is none to be aborted
        if not self._paused_here:
            self._paused_natively = self._core.is_scheduler_paused()
        self._paused_here = True
        return self._when_idle() if mode is PauseMode.WAIT else self._pause(mode)

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
        """Data-parallel engines of one mixture-of-experts model stop by agreement, for which each takes a step with an
        empty batch unless it sleeps. Where all have stopped already, but not all sleep, such a step never ended."""
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
        """Pause once nothing runs. vLLM's own "wait" would leave requests that it has not begun in its queue, until
        the next wake; here nothing new arrives, since the core refuses it, so all that is queued can end."""
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

    def reset_caches(self) -> None:
        reset_caches(self._core)

    def afterwards(self, act: Callable[[], None]) -> None:
        if _is_in_caller(self._core):
            act()
        else:
            self._core._idle_state_callbacks.append(lambda core: act())

    def show(self, asleep_tags: list[str], weight_version: str) -> None:
        # The data-parallel dummy batch looks at the executor, so it must know which tags are asleep.
        executor = self._core.model_executor
        executor.sleeping_tags = set(asleep_tags)
        if not isinstance(getattr(type(executor), "is_sleeping", None), property):
            executor.is_sleeping = bool(asleep_tags)
        if hasattr(self._core, "_weight_version"):
            self._core._weight_version = weight_version


def worker_here(core: Any) -> Any:
    """The `VllmWorker` of the worker that runs in the core's process; `None` where workers have processes."""
    wrapper = getattr(core.model_executor, "driver_worker", None)
    return getattr(getattr(wrapper, "worker", None), "rl_memory", None)


def _is_in_caller(core: Any) -> bool:
    """Whether the core runs in the caller's process: it has no loop and no queues then, and steps when it is told."""
    return not hasattr(core, "input_queue")


def _wake_loop(core: Any) -> None:
    """Have an idle loop look for work again. What waits for the last step of a batch in flight (asynchronous
    scheduling) runs just before the loop blocks for the next message; requests kept until then would not go on."""
    if not _is_in_caller(core):
        from vllm.v1.engine import EngineCoreRequestType

        core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))


def _hand_out_aborts(core: Any, requests: list[Any]) -> None:
    """A core in the caller's process tells nobody of the requests that its pause aborts: the next step does."""
    if not requests:
        return
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

    step = core.step_fn

    def hand_out() -> tuple[dict[int, Any], bool]:
        core.step_fn = step
        ended = [EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ABORT) for request in requests]
        return {0: EngineCoreOutputs(outputs=ended)}, False

    core.step_fn = hand_out


def _end_idle_sessions(core: Any) -> None:
    """Requests that stream their input and wait for more of it run nowhere, keep their part of the KV cache, and
    cannot be computed again."""
    from vllm.v1.request import RequestStatus

    waiting = RequestStatus.WAITING_FOR_STREAMING_REQ
    idle = [number for number, request in core.scheduler.requests.items() if request.status is waiting]
    if idle:
        ended = core.scheduler.finish_requests(idle, RequestStatus.FINISHED_ABORTED)
        if _is_in_caller(core):
            _hand_out_aborts(core, ended)
        else:
            core._send_abort_outputs(ended)


def reset_caches(core: Any) -> None:
    """Forget what was computed with the weights. Multimodal inputs were not, and clients hold the other half of
    that cache: dropped on one side only, their next requests would fail."""
    _end_idle_sessions(core)
    if not core.reset_prefix_cache(reset_running_requests=True, reset_connector=True):
        raise EngineFaultError("vLLM could not reset its prefix cache, e.g. that of a KV connector")
    core.reset_encoder_cache()


def settle(future: Future[Any], done: Future[Any], result: Any = None) -> None:
    """Give a future the error of another that is done, or `result`."""
    error = done.exception()
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
