"""The hooks of a scheduler's process: its controller, the refusal of requests, and SGLang's own control requests."""

from __future__ import annotations

import atexit
import inspect
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from http import HTTPStatus
from typing import Any

from rl_memory_plugins.board import StatusBoard
from rl_memory_plugins.capabilities import Capabilities
from rl_memory_plugins.config import RLMemoryConfig
from rl_memory_plugins.controller import Controller
from rl_memory_plugins.engines.enabled import on_enabled
from rl_memory_plugins.engines.nccl_suspend import SuspendingRanks
from rl_memory_plugins.engines.sglang import adapters, frozen, nodes, pipeline, worker
from rl_memory_plugins.engines.sglang.adapters import SglangAdapters
from rl_memory_plugins.engines.sglang.draft import has_copies, runners_of
from rl_memory_plugins.engines.sglang.hooks import SCHEDULER
from rl_memory_plugins.engines.sglang.last_step import LastStep
from rl_memory_plugins.engines.sglang.modes import LOCAL_CONTROL, refuse_modes
from rl_memory_plugins.engines.sglang.nccl_suspend import use_suspendable_memory
from rl_memory_plugins.engines.sglang.options import config_of
from rl_memory_plugins.engines.sglang.scheduler_hooks import RankedGroup, SglangEngine, handle_natively
from rl_memory_plugins.engines.sglang.worker import Memory, SglangWorker
from rl_memory_plugins.errors import InvalidRequestError, RLMemoryError, StateConflictError, unsupported
from rl_memory_plugins.hooking import Hooks
from rl_memory_plugins.loaded_versions import LoadedVersions
from rl_memory_plugins.records import INITIAL_VERSION
from rl_memory_plugins.tags import PauseMode
from rl_memory_plugins.weights.engine_updates import EngineUpdates

logger = logging.getLogger(__name__)

IDLE_SECONDS = 0.001  # between two polls for requests while closed; SGLang's own loop spins


def install(hooks: Hooks) -> None:
    hooks.wrap(f"{SCHEDULER}.__init__", _init)
    hooks.wrap(f"{SCHEDULER}.init_request_dispatcher", _add_handler)
    hooks.wrap(f"{SCHEDULER}.process_input_requests", _process_input_requests)
    hooks.wrap(f"{SCHEDULER}.maybe_sleep_on_idle", _stay_awake_while_draining)
    hooks.wrap(f"{SCHEDULER}.handle_generate_request", _refuse_while_closed)
    hooks.wrap(f"{SCHEDULER}.handle_embedding_request", _refuse_while_closed)
    hooks.wrap(f"{SCHEDULER}._add_request_to_queue", _enter_namespace)
    hooks.wrap(f"{SCHEDULER}.process_batch_result", _process_once)
    hooks.wrap(f"{SCHEDULER}.pause_generation", _native_pause)
    hooks.wrap(f"{SCHEDULER}.continue_generation", _native_continue)
    if hasattr(hooks.require(SCHEDULER), "handle_update_weight_version"):
        hooks.wrap(f"{SCHEDULER}.handle_update_weight_version", _native_weight_version)
    hooks.wrap(f"{SCHEDULER}.flush_cache", _flush_what_is_there)
    pipeline.install(hooks)
    hooks.require("sglang.srt.runtime_context:get_parallel")


class SglangScheduler:
    """The controller, the worker and the refusals of one scheduler; `scheduler.rl_memory`."""

    def __init__(self, scheduler: Any, memory: Memory, config: RLMemoryConfig) -> None:
        from torch import distributed

        self._scheduler = scheduler
        self.config = config
        stage = scheduler.weight_updater.tp_cpu_group
        self.pipeline = pipeline.of(scheduler, int(scheduler.server_args.pp_size))
        group = stage if self.pipeline is None else scheduler.world_group.cpu_group
        runner = scheduler.tp_worker.model_runner
        model = runner.model
        slots = SglangAdapters(runner)
        self.worker = SglangWorker(
            model,
            memory,
            config,
            distributed.get_rank(group),
            lambda: slots,
            runners_of(scheduler),
            has_copies(scheduler),
        )
        self.ranks = RankedGroup(self.worker.agent, group, stage)
        self.engine = SglangEngine(scheduler, self.ranks, self.all_batches)
        self.last_step = LastStep(scheduler, self.ranks)
        self.pace = self.worker.manager.arena.pace
        self.pace.ranks = int(scheduler.server_args.tp_size) * int(scheduler.server_args.pp_size)
        self.worker.agent.receiver.before_writing = self.engine.end_frozen_step
        self.updates = EngineUpdates(
            self.worker.manager,
            model.named_parameters,
            padding=self.worker.agent.receiver.padding,
            reset=self.worker.reset_unfilled,  # SGLang's step after a load refuses a KV scale that is NaN
        )
        board = StatusBoard() if self.ranks.rank == 0 else None
        if board is not None:
            atexit.register(board.close)
        self.controller = Controller(
            SuspendingRanks(self.ranks) if config.nccl_suspend else self.ranks,
            self.engine,
            board,
            _engine_rank(scheduler),
            update_timeout_s=config.update_timeout_s,
            capabilities=capabilities_of(scheduler.server_args),
        )
        named = getattr(scheduler.server_args, "weight_version", INITIAL_VERSION)
        if named != INITIAL_VERSION:
            self.controller.note_foreign_changes(named)
        self.versions = LoadedVersions(self.ranks, self.controller)

    def handle(self, request: Any) -> None:
        """Obey a command. Rank 0 sends the reply for all ranks when the operation has ended."""
        from rl_memory_plugins.engines.sglang.messages import RLMemoryReqOutput

        def send(done: Future[bytes]) -> None:
            if self.ranks.rank == 0:
                self._answer(RLMemoryReqOutput(rid=request.rid, payload=done.result()), request)

        frozen.hide_batch(self._scheduler)  # an update of an adapter waits for its trainer while requests run
        self.controller.execute(request.payload).add_done_callback(send)

    def answer_health_checks(self, requests: list[Any]) -> list[Any]:
        """Answer health checks of a closed engine without a forward pass. Returns the other requests."""
        from sglang.srt.managers.io_struct import HealthCheckOutput
        from sglang.srt.managers.utils import is_health_check_generate_req

        if not requests or self.controller.refusal() is None:
            return requests
        for request in filter(is_health_check_generate_req, requests):
            self._answer(HealthCheckOutput(rid=request.rid), request)
        return [request for request in requests if not is_health_check_generate_req(request)]

    def cannot_flush(self) -> RLMemoryError | None:
        """Why SGLang would fail to flush its caches after an update; `None` if it would succeed."""
        if self.engine.kv_cache_sleeps:
            return None
        is_idle = self._scheduler.is_fully_idle
        has_option = "ignore_waiting" in inspect.signature(is_idle).parameters
        options = {"ignore_waiting": self._scheduler._engine_paused} if has_option else {}
        if self.ranks.all(bool(is_idle(**options))):
            return None
        return StateConflictError(
            "requests are running: let them finish, abort them, or pause with mode='retract' before the update"
        )

    def all_batches(self) -> AbstractContextManager[None]:
        """In the body, SGLang's own code finds all running requests in one batch."""
        return nullcontext() if self.pipeline is None else self.pipeline.as_one_batch()

    def may_begin_step(self) -> bool:
        """Whether this stage of a pipeline may plan a batch. If no step is in flight, do first what waits for that."""
        assert self.pipeline is not None
        held: list[Any] = []
        if self.pipeline.is_empty:
            held, self.pipeline.held = self.pipeline.held, []
            if held:
                handle_natively(self._scheduler, self.answer_health_checks(held))
            self.after_input()
        return not (held or self.pipeline.held or self.engine.stops_steps)

    @property
    def must_stay_awake(self) -> bool:
        """Whether something waits for the next passes of SGLang's loop."""
        return self.engine.draining or bool(self.last_step.held or (self.pipeline and self.pipeline.held))

    def after_input(self) -> None:
        self.engine.poll()
        if self.controller.refusal() is not None and not self.engine.draining:
            time.sleep(IDLE_SECONDS)

    def refusal_of_adapter(self, request: Any) -> RLMemoryError | None:
        """The error for a request whose adapter was removed while the request was on its way."""
        number = adapters.number_in(getattr(request, "lora_id", None))
        if number is None or self.controller.adapters.knows(number):
            return None
        return InvalidRequestError("the adapter of this request has been removed", field="lora_path")

    def refuse(self, request: Any, refusal: RLMemoryError) -> None:
        """Answer a request that arrived while the engine is closed."""
        from sglang.srt.managers.io_struct import AbortReq

        for item in getattr(getattr(request, "mm_inputs", None), "mm_items", None) or ():
            release = getattr(item, "release_transport_proxies", None)
            if release is not None:  # the sender lends this memory until each rank has released it
                release()
        reason = finish_reason_of(refusal)
        self._answer(AbortReq(rid=request.rid, finished_reason=reason, abort_message=refusal.message), request)

    def _answer(self, output: Any, request: Any) -> None:
        self._scheduler.ipc_channels.send_to_tokenizer.send_output(output, request)


def finish_reason_of(refusal: RLMemoryError) -> dict[str, Any]:
    """Why SGLang has ended a request that was refused.

    The status is an `HTTPStatus`, as SGLang tells an error by it. Where SGLang's processes speak msgpack, it arrives as
    an integer.
    """
    status = HTTPStatus(refusal.status)
    return {"type": "abort", "status_code": status, "message": refusal.message, "err_type": refusal.code}


def capabilities_of(server_args: Any) -> Capabilities:
    """The abilities of an engine that its arguments decide."""
    no_freeze = frozen.why_not(server_args)
    modes = tuple(mode for mode in PauseMode if mode is not PauseMode.FREEZE or not no_freeze)
    return Capabilities(
        hosts=nodes.count(server_args), modes=modes, no_freeze=no_freeze, no_adapters=adapters.why_none(server_args)
    )


def _parallel(scheduler: Any) -> Any:
    """SGLang's description of the scheduler's place among its peers."""
    parallel = getattr(scheduler, "ps", None)
    if parallel is None:  # SGLang >= 0.5.20
        from sglang.srt.runtime_context import get_parallel

        parallel = get_parallel()
    return parallel


def _engine_rank(scheduler: Any) -> int:
    """The data-parallel rank of this scheduler's engine. With attention-DP all ranks form one engine, rank 0."""
    return 0 if has_attention_dp(scheduler.server_args) else int(_parallel(scheduler).dp_rank or 0)


def has_attention_dp(server_args: Any) -> bool:
    """Whether the data-parallel ranks share one tensor-parallel group and receive control requests through it.

    Raises:
        UnsupportedError: they share the group, but each receives control requests by itself.
    """
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    local = getattr(parallel, "enable_dp_attention_local_control_broadcast", None)
    if local is None:
        local = getattr(server_args, "enable_dp_attention_local_control_broadcast", False)
    if local:
        raise unsupported(*LOCAL_CONTROL)
    enabled = getattr(parallel, "attn_dp_enabled", None)
    return bool(getattr(server_args, "enable_dp_attention", False) if enabled is None else enabled)


# -- hooks --------------------------------------------------------------------------------------------------


def _init(original: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any, server_args: Any, *args: Any, **kwargs: Any) -> None:
        config = config_of(server_args)
        if config is None:
            original(self, server_args, *args, **kwargs)
            return
        refuse_modes(server_args)  # a launcher without the plugin has not checked them
        use_suspendable_memory(config)
        memory = Memory(config, lambda: _device_and_rank(self), server_args)
        worker.prepare(memory)
        original(self, server_args, *args, **kwargs)
        nodes.require_all_nodes(server_args)
        self.rl_memory = SglangScheduler(self, memory, config)

    return __init__


def _device_and_rank(scheduler: Any) -> tuple[str, int]:
    """The device of this process, and its number among the schedulers of all data-parallel engines."""
    args = scheduler.server_args
    device = str(args.device)
    if args.device is None or device.startswith("cuda"):
        import torch

        device = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
    parallel = _parallel(scheduler)
    stage = _engine_rank(scheduler) * int(args.pp_size) + int(parallel.pp_rank)
    return device, stage * int(args.tp_size) + int(parallel.tp_rank)


@on_enabled(lambda scheduler: config_of(scheduler.server_args))
def _add_handler(config: RLMemoryConfig, original: Callable[..., Any], scheduler: Any) -> Any:
    from sglang.utils import TypeBasedDispatcher

    from rl_memory_plugins.engines.sglang.messages import RLMemoryReqInput

    result = original(scheduler)
    handler = TypeBasedDispatcher([(RLMemoryReqInput, lambda request: scheduler.rl_memory.handle(request))])
    scheduler._request_dispatcher += handler
    return result


@on_enabled()
def _process_input_requests(
    added: SglangScheduler, original: Callable[..., Any], scheduler: Any, recv_reqs: list[Any]
) -> Any:
    if added.pipeline is not None:
        return original(scheduler, added.answer_health_checks(added.pipeline.pass_on(recv_reqs)))
    result = original(scheduler, added.answer_health_checks(added.last_step.pass_on(recv_reqs)))
    added.after_input()
    return result


@on_enabled()
def _stay_awake_while_draining(added: SglangScheduler, original: Callable[..., None], scheduler: Any) -> None:
    """Keep SGLang awake during a drain. With --sleep-on-idle it would sleep for a second before the drain could end."""
    if not added.must_stay_awake:
        original(scheduler)


@on_enabled()
def _refuse_while_closed(
    added: SglangScheduler, original: Callable[..., Any], scheduler: Any, recv_req: Any, **kwargs: Any
) -> Any:
    """Refuse requests that were sent before the engine closed and arrive after."""
    from sglang.srt.managers.utils import is_health_check_generate_req

    if not is_health_check_generate_req(recv_req):
        added.engine.note_request()
    refusal = added.controller.refusal() or added.refusal_of_adapter(recv_req)
    return original(scheduler, recv_req, **kwargs) if refusal is None else added.refuse(recv_req, refusal)


@on_enabled()
def _flush_what_is_there(
    added: SglangScheduler, original: Callable[..., bool], scheduler: Any, *args: Any, **kwargs: Any
) -> bool:
    """Skip a flush while the KV cache sleeps: it is empty, and some models' flush would write into released memory."""
    return added.engine.kv_cache_sleeps or original(scheduler, *args, **kwargs)


@on_enabled()
def _enter_namespace(
    added: SglangScheduler, original: Callable[..., Any], scheduler: Any, req: Any, *args: Any, **kwargs: Any
) -> Any:
    """Keep a request that has no KV cache yet, or no longer, from finding that of frozen requests."""
    added.engine.namespace.enter(req)
    return original(scheduler, req, *args, **kwargs)


@on_enabled()
def _process_once(
    added: SglangScheduler, original: Callable[..., Any], scheduler: Any, batch: Any, result: Any, *args: Any
) -> Any:
    added.pace.note_step()
    return None if frozen.is_done(result) else original(scheduler, batch, result, *args)


@on_enabled()
def _native_pause(added: SglangScheduler, original: Callable[..., Any], scheduler: Any, recv_req: Any) -> None:
    added.engine.paused_natively = True
    with added.all_batches() if recv_req.mode == "retract" else nullcontext():
        original(scheduler, recv_req)
    frozen.hide_batch(scheduler)


@on_enabled()
def _native_continue(added: SglangScheduler, original: Callable[..., Any], scheduler: Any, recv_req: Any) -> None:
    """Lift the pause. A closed engine continues when it opens."""
    added.engine.paused_natively = False
    if added.controller.refusal() is None:
        original(scheduler, recv_req)
    else:
        added.engine.continue_later()


@on_enabled()
def _native_weight_version(added: SglangScheduler, original: Callable[..., Any], scheduler: Any, recv_req: Any) -> Any:
    """Follow SGLang's own call that names the weight version."""
    output = original(scheduler, recv_req)
    added.controller.note_foreign_changes(recv_req.new_version)
    return output
