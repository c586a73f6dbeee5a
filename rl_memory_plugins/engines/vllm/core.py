"""The hooks of the engine core: the controller over the executor's ranks, and vLLM's own calls redirected to it."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from rl_memory_plugins import admission, commands, operations
from rl_memory_plugins.board import StatusBoard
from rl_memory_plugins.commands import decode_reply
from rl_memory_plugins.controller import Controller
from rl_memory_plugins.coordination import RankGroup, raise_engine_failures
from rl_memory_plugins.engines.enabled import on_enabled, state_of
from rl_memory_plugins.engines.nccl_suspend import SuspendingRanks
from rl_memory_plugins.engines.vllm import external
from rl_memory_plugins.engines.vllm.adapters import number_in
from rl_memory_plugins.engines.vllm.capabilities import capabilities_of, hosts_of
from rl_memory_plugins.engines.vllm.core_hooks import (
    VllmEngine,
    VllmRanks,
    settle,
    worker_here,
)
from rl_memory_plugins.engines.vllm.late_interaction import EncodedQueries
from rl_memory_plugins.engines.vllm.options import config_of, suspends_communicators
from rl_memory_plugins.errors import RLMemoryError, StateConflictError, UnsupportedError
from rl_memory_plugins.hooking import Hooks
from rl_memory_plugins.loaded_versions import LoadedVersions
from rl_memory_plugins.records import EngineStatus, WeightsStatus
from rl_memory_plugins.tags import PUBLIC_TAGS, Content, PauseMode, Tag

CORE = "vllm.v1.engine.core:EngineCore"
PROCESS = "vllm.v1.engine.core:EngineCoreProc"
#: The stop reason of a request that reaches a closed core; `client.py` raises an error from it.
REFUSED = "rl_memory:"
#: The reason for a request whose adapter was removed while the request was on its way.
REMOVED = "adapter removed"
#: vLLM's own methods that read or write the weights, or the LoRA slots among them. While those sleep, a checkpoint
#: would be saved as zeros, and an adapter be gone after the wake that brings the old slots back. A reload moves the
#: parameters to the meta device before the first of them is written, and leaves them there if that is refused.
ON_WEIGHTS = (
    *("compute_weight_checksums", "reset_weights", "save_sharded_state", "save_tensorized_model"),
    *("add_lora", "remove_lora", "pin_lora"),
    *("reload_weights", "start_weight_update", "start_draft_weight_update", "update_weights", "finish_weight_update"),
)


def install(hooks: Hooks) -> None:
    hooks.wrap(f"{CORE}._initialize_kv_caches", _start_controller)
    hooks.wrap(f"{CORE}.sleep", _native_sleep)
    hooks.wrap(f"{CORE}.wake_up", _native_wake_up)
    hooks.wrap(f"{CORE}.is_sleeping", _native_is_sleeping)
    hooks.wrap(f"{CORE}.resume_scheduler", _native_resume)
    for path in (PROCESS, "vllm.v1.engine.core:DPEngineCoreProc"):
        if "resume_scheduler" in vars(hooks.require(path)):  # it acts before it calls the one above
            hooks.wrap(f"{path}.resume_scheduler", _native_resume)
    hooks.wrap(f"{CORE}.collective_rpc", _native_collective_rpc)
    hooks.wrap(f"{PROCESS}._reject_add_in_shutdown", _refuse_add)
    hooks.wrap(f"{CORE}.add_request", _note_request)
    hooks.wrap(f"{CORE}.reset_encoder_cache", _native_reset_encoder_cache)
    for name in ("pause_scheduler", "is_scheduler_paused", "reset_prefix_cache"):
        hooks.require(f"{CORE}.{name}")
    core = hooks.require(CORE)
    for name in ON_WEIGHTS:
        if hasattr(core, name):
            hooks.wrap(f"{CORE}.{name}", _native_on_weights)
    if hasattr(core, "set_weight_version"):
        hooks.wrap(f"{CORE}.set_weight_version", _native_set_weight_version)
    if hasattr(core, "release_kv_cache_memory"):
        hooks.wrap(f"{CORE}.release_kv_cache_memory", _native_release_kv_cache)
    core.rl_memory_call = _call


def _start_controller(original: Callable[..., Any]) -> Callable[..., Any]:
    """Start the controller once the KV cache exists: no memory is managed that is made later."""

    def _initialize_kv_caches(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, vllm_config, *args, **kwargs)
        config = config_of(vllm_config)
        if config is not None:
            board = StatusBoard()
            atexit.register(board.close)
            capabilities = capabilities_of(self, vllm_config)
            ranks = _ranks(self)
            self.rl_memory_engine = VllmEngine(self, capabilities.modes)
            self.rl_memory_queries = EncodedQueries()
            self.rl_memory = Controller(
                ranks,
                self.rl_memory_engine,
                board,
                vllm_config.parallel_config.data_parallel_index,
                update_timeout_s=config.update_timeout_s,
                capabilities=capabilities,
                keep=getattr(vllm_config.model_config, "sleep_preserve_parameter_names", ()),  # not in every version
            )
            self.rl_memory_versions = LoadedVersions(ranks, self.rl_memory)
        return result

    return _initialize_kv_caches


def _ranks(core: Any) -> RankGroup:
    parallel = core.vllm_config.parallel_config
    other_hosts = hosts_of(parallel) > 1 or parallel.distributed_executor_backend == "ray"  # where Ray puts them
    ranks: RankGroup = VllmRanks(core.model_executor, may_lack_plugin=other_hosts)
    if parallel.distributed_executor_backend == "external_launcher" and parallel.world_size > 1:
        ranks = external.ranks_of(core, worker_here(core).agent)
    return SuspendingRanks(ranks) if suspends_communicators(core.vllm_config) else ranks


def _call(self: Any, payload: bytes) -> Any:
    """Obey an encoded command, as a utility call of the engine core. The reply comes when the operation has ended."""
    controller = state_of(self)
    if controller is None:
        raise UnsupportedError("this engine was started without rl_memory")
    reply = controller.execute(payload)
    return reply.result() if reply.done() else reply


def is_busy(core: Any) -> bool:
    """Whether an operation of the core's controller is under way."""
    controller = state_of(core)
    return controller is not None and bool(controller.status.busy)


def notice_loads(core: Any, weight_version: str | None = None) -> None:
    """Notice weights that were loaded in the core's process without a call of the engine, as by `model.load_weights`.

    The next request must not meet a cache of the former weights.

    Args:
        weight_version: The version that the caller gives the weights. Weights that are not `valid` keep theirs.
    """
    controller = state_of(core)
    if controller is None or controller.status.busy:  # an operation looks by itself, at its end
        return
    worker = worker_here(core)
    if worker is not None and _was_changed(core, controller):
        core.rl_memory_engine.reset_caches_after_load()
        _note_loads(core, controller, reloaded=worker.agent.has_loaded)
    if weight_version is not None and controller.status.content is Content.VALID:
        controller.note_foreign_changes(weight_version, paused=core.is_scheduler_paused())


def _note_loads(
    core: Any, controller: Controller, *, reloaded: bool, contents: Sequence[WeightsStatus] | None = None
) -> None:
    """Publish loads by vLLM's own calls.

    Args:
        reloaded: One of the calls is `reload_weights`, so the weights may have another version.
        contents: See `Controller.note_foreign_changes`.
    """
    version = core.rl_memory_versions.after_load() if reloaded else None
    controller.note_foreign_changes(version, paused=core.is_scheduler_paused(), contents=contents)


def _was_changed(core: Any, controller: Controller, contents: Sequence[WeightsStatus] = ()) -> bool:
    """Whether other code has written the weights since the controller looked.

    Args:
        contents: The state of all ranks' weights, if they have told it. A worker in this process is
            looked at. Others may have written.
    """
    known = [WeightsStatus.of(rank) for rank in controller.status.ranks]
    if contents:
        return list(contents) != known
    worker = worker_here(core)
    return worker is None or worker.agent.content() not in known


def _obey(controller: Controller, command: commands.AnyCommand) -> Any:
    """Obey a command of a caller of vLLM's own methods: raise its error, drop its report."""
    reply = controller.obey(command)
    if reply.done():
        return raise_engine_failures([decode_reply(reply.result())])
    outcome: Future[None] = Future()

    def settle(done: Future[bytes]) -> None:
        try:
            raise_engine_failures([decode_reply(done.result())])
        except Exception as error:
            outcome.set_exception(error)
        else:
            outcome.set_result(None)

    reply.add_done_callback(settle)
    return outcome


@on_enabled()
def _native_sleep(controller: Controller, original: Any, core: Any, level: int = 1, mode: str = "abort") -> Any:
    outcome = _obey(controller, operations.sleep(level, None, mode))
    return outcome if isinstance(outcome, Future) else None


@on_enabled()
def _native_wake_up(controller: Controller, original: Any, core: Any, tags: list[str] | None = None) -> Any:
    engines = [controller.status]
    _obey(controller, operations.wake_up(with_graphs(without_scheduling(tags, engines), engines)))
    return not controller.status.asleep_tags()


def without_scheduling(tags: Any, engines: list[EngineStatus]) -> Any:
    """Replace vLLM's pseudo tag `scheduling` by the tags that are awake: their wake lifts a level-0 pause."""
    if not isinstance(tags, (list, tuple)) or "scheduling" not in tags:
        return tags
    others = [tag for tag in tags if tag != "scheduling"]
    asleep = {tag for engine in engines for tag in engine.asleep_tags()}
    awake = [tag.value for tag in PUBLIC_TAGS if tag.value not in asleep]
    return others or awake


def with_graphs(tags: Any, engines: list[EngineStatus]) -> Any:
    """Add the CUDA graphs to the wake of the last other tag, as vLLM's own wake does.

    Callers of vLLM know two tags, and expect an engine that serves requests once both are awake.
    """
    if not isinstance(tags, (list, tuple)):
        return tags
    asleep = {tag for engine in engines for tag in engine.asleep_tags()}
    left = [tag for tag in asleep if tag not in tags]
    return [*tags, *left] if left == [Tag.CUDA_GRAPH.value] and len(asleep) > 1 else tags


@on_enabled()
def _native_is_sleeping(controller: Controller, original: Any, core: Any) -> bool:
    return admission.is_sleeping([controller.status])


@on_enabled()
def _native_resume(controller: Controller, original: Callable[..., Any], core: Any) -> Any:
    refuse_resume(controller.refusal())
    # Data-parallel engines of experts resume in an all-reduce. Where nothing is paused, one of them may be in a step
    # and never come to it.
    if not core.is_scheduler_paused():
        return None
    result = original(core)
    _end_wave(core)
    return result


def _end_wave(core: Any) -> None:
    """End the wave that a refused request has begun, for data-parallel engines of a model with experts.

    The request has told the coordinator or its client that a wave runs, but no engine runs one. The next request would
    start no wave and hang. All engines resume in step, so each takes an empty step, which ends the wave.
    """
    if hasattr(core, "ignore_start_dp_wave") and core.has_coordinator:
        core.engines_running = True


def refuse_resume(refusal: RLMemoryError | None) -> None:
    """Refuse vLLM's own resume while the engine does not admit requests.

    Raises:
        StateConflictError: there is a refusal.
    """
    if refusal is not None:
        raise StateConflictError(f"cannot resume: {refusal.message}", **refusal.details)


@on_enabled()
def _native_release_kv_cache(controller: Controller, original: Any, core: Any) -> Any:
    if not core.is_scheduler_paused():
        raise StateConflictError("release_kv_cache_memory() requires a completed pause first")
    return _obey(controller, operations.sleep(1, [Tag.KV_CACHE.value], PauseMode.KEEP.value))


@on_enabled()
def _native_set_weight_version(controller: Controller, original: Any, core: Any, weight_version: str) -> None:
    """Follow vLLM's own call that names the weight version, as at the end of its own updates."""
    controller.note_foreign_changes(weight_version)


@on_enabled()
def _native_reset_encoder_cache(controller: Controller, original: Callable[..., None], core: Any) -> None:
    core.rl_memory_queries.forget(core)  # the workers drop theirs with their embeddings of images
    original(core)


@on_enabled()
def _native_on_weights(
    controller: Controller, original: Callable[..., Any], core: Any, *args: Any, **kwargs: Any
) -> Any:
    _require_weights(controller, original.__name__)
    return original(core, *args, **kwargs)


def _require_weights(controller: Controller, what: str) -> None:
    if Tag.WEIGHTS.value in controller.status.asleep_tags():
        raise StateConflictError(f"{what}: the weights are asleep: wake_up(tags=['weights']) first")


@on_enabled()
def _native_collective_rpc(
    controller: Controller,
    original: Callable[..., Any],
    core: Any,
    method: Any,
    timeout: Any = None,
    args: Any = (),
    kwargs: Any = None,
) -> Any:
    """Redirect the memory methods of workers to the engine. Any other call may have loaded weights."""
    if method in ("sleep", "wake_up", "discard"):
        outcome = _memory_rpc(core, method)(*(args or ()), **(kwargs or {}))
        nothing = [None] * len(controller.status.ranks)
        return _then(outcome, nothing) if isinstance(outcome, Future) else nothing
    controller.require_free()  # it may write what a prepared sleep has found unchanged
    core.rl_memory_queries.note_call(method, args)
    if method in ON_WEIGHTS:
        _require_weights(controller, method)
    epochs = [rank.content_epoch for rank in controller.status.ranks]
    after = _After()
    worker = worker_here(core)
    try:
        if worker is not None:
            return original(core, method, timeout, args, kwargs)
        return _guarded_rpc(core, original, method, timeout, args, kwargs, after)
    finally:
        if controller.status.busy or _was_changed(core, controller, after.contents):
            reloaded = after.reloaded if worker is None else worker.agent.has_loaded
            _note_loads(core, controller, reloaded=reloaded, contents=after.contents or None)
        if [rank.content_epoch for rank in controller.status.ranks] != epochs:
            core.rl_memory_engine.reset_caches_after_load()


def _memory_rpc(core: Any, method: str) -> Callable[..., Any]:
    """The method of the engine that replaces a memory method of a worker."""
    if method != "discard":
        return getattr(core, method)  # type: ignore[no-any-return]

    def discard(tags: Any) -> Any:
        return _obey(state_of(core), operations.sleep(2, tags, PauseMode.KEEP.value))

    return discard


def _then(outcome: Future[Any], result: Any) -> Future[Any]:
    """A future that holds `result` once `outcome` has succeeded."""
    answer: Future[Any] = Future()
    outcome.add_done_callback(lambda done: settle(answer, done, result))
    return answer


@dataclass
class _After:
    """What the ranks tell after a call: the state of their weights, and whether a rank has reloaded."""

    contents: list[WeightsStatus] = field(default_factory=list)
    reloaded: bool = False


def _guarded_rpc(
    core: Any,
    rpc: Callable[..., Any],
    method: Any,
    timeout: Any,
    args: Any,
    kwargs: Any,
    after: _After,
) -> list[Any]:
    """Call a method that may fail on many ranks, and fill `after`.

    vLLM stops at the first rank that raises, and leaves the replies of the other ranks in their queues, where later
    calls take them for their own. So every rank answers, and this function raises the first failure.
    """
    from rl_memory_plugins.engines.vllm.worker import call_guarded

    if not isinstance(method, str):
        import cloudpickle  # type: ignore[import-untyped]

        method = cloudpickle.dumps(method)
    replies = rpc(core, call_guarded, timeout, (method, tuple(args or ()), kwargs or {}), None)
    after.contents = [WeightsStatus(*state) for _, _, state, _ in replies]
    after.reloaded = any(reloaded for *_, reloaded in replies)
    for failed, reply, *_ in replies:
        if failed:
            raise RuntimeError(
                f"Worker failed with error '{reply}', please check the stack trace above for the root cause"
            )
    return [reply for _, reply, *_ in replies]


@on_enabled()
def _note_request(controller: Controller, original: Callable[..., None], core: Any, *args: Any, **kwargs: Any) -> None:
    core.rl_memory_engine.note_request()
    original(core, *args, **kwargs)


@on_enabled()
def _refuse_add(controller: Controller, original: Callable[..., Any], core: Any, request: Any) -> bool:
    """Refuse requests that were sent before the engine closed and arrive after."""
    if original(core, request):
        return True
    notice_loads(core)
    refusal = controller.refusal()
    number = number_in(request.lora_request)
    if refusal is not None:
        reason = refusal.details["reason"]
    elif number is not None and not controller.adapters.knows(number):
        reason = REMOVED
    elif not core.rl_memory_queries.admits(request):
        reason = ""  # that of a request which a reset has ended
    else:
        return False
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

    output = EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ABORT, stop_reason=REFUSED + reason)
    outputs = EngineCoreOutputs(finished_requests={request.request_id}, outputs=[output])
    core.output_queue.put_nowait((request.client_index, outputs))
    return True
