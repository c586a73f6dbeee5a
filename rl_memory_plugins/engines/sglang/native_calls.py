"""The handlers of SGLang's own control requests. They call the state machine and never raise.

An exception in a handler ends the server. A handler that raises on one rank leaves the other ranks in a barrier. So
each handler answers by SGLang's own reply type, after all ranks have agreed on the answer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from rl_memory_plugins import operations
from rl_memory_plugins.commands import AnyCommand, decode_reply
from rl_memory_plugins.coordination import raise_engine_failures
from rl_memory_plugins.engines.enabled import on_enabled, state_of
from rl_memory_plugins.engines.sglang.modes import STORED
from rl_memory_plugins.engines.sglang.scheduler_hooks import forget_embeddings
from rl_memory_plugins.errors import RLMemoryError, StateConflictError, unsupported
from rl_memory_plugins.hooking import Hooks
from rl_memory_plugins.tags import Tag

logger = logging.getLogger(__name__)

SCHEDULER = "sglang.srt.managers.scheduler:Scheduler"
UPDATER = "sglang.srt.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager"

FROM_DISK = "update_weights_from_disk"
#: Handlers that write weights. The value tells whether the handler ends in a barrier of the tensor-parallel ranks.
WRITES = {
    "update_weights_from_disk": False,
    "update_weights_from_distributed": False,
    "update_weights_from_tensor": True,
    "update_weights_from_ipc": True,
}
#: Handlers that begin and end a session of updates. New in 0.5.21.
SESSIONS = {"begin_weight_update": True, "end_weight_update": True}
READS = ("check_weights", "get_weights_by_name")
POST_PROCESS = "post_process_weights"  # added by slime's patch: packs quantised weights again after an update
#: Handlers that SGLang calls by name; their exceptions become answers. While the weights sleep they would save zeros.
SAVES = ("save_sharded_model", "save_remote_model")
ATTACHES = "attach_hicache_storage_wrapped"
OUTPUTS = {
    "update_weights_from_disk": "UpdateWeightFromDiskReqOutput",
    "update_weights_from_distributed": "UpdateWeightsFromDistributedReqOutput",
    "update_weights_from_tensor": "UpdateWeightsFromTensorReqOutput",
    "update_weights_from_ipc": "UpdateWeightsFromIPCReqOutput",
    "begin_weight_update": "BeginWeightUpdateReqOutput",
    "end_weight_update": "EndWeightUpdateReqOutput",
    "check_weights": "CheckWeightsReqOutput",
    POST_PROCESS: "PostProcessWeightsReqOutput",
}


def install(hooks: Hooks) -> None:
    for name, ends_in_barrier in WRITES.items():
        hooks.wrap(f"{UPDATER}.{name}", _writing(name, ends_in_barrier))
    updater = hooks.require(UPDATER)
    for name, ends_in_barrier in SESSIONS.items():
        if hasattr(updater, name):
            hooks.wrap(f"{UPDATER}.{name}", _in_agreement(name, ends_in_barrier))
    if hasattr(updater, POST_PROCESS):
        hooks.wrap(f"{UPDATER}.{POST_PROCESS}", _post_processing())
    for name in SAVES:
        hooks.wrap(f"{UPDATER}.{name}", _saving)
    if hasattr(hooks.require(SCHEDULER), ATTACHES):
        hooks.wrap(f"{SCHEDULER}.{ATTACHES}", _attaching)
    for name in READS:
        hooks.wrap(f"{UPDATER}.{name}", _reading(name))
    hooks.wrap(f"{UPDATER}.release_memory_occupation", _redirect_to("ReleaseMemoryOccupationReqOutput", _sleep))
    hooks.wrap(f"{UPDATER}.resume_memory_occupation", _redirect_to("ResumeMemoryOccupationReqOutput", _wake_up))


def _refusal(added: Any) -> RLMemoryError | None:
    """Why SGLang's own calls that touch weights cannot run now; `None` if they can."""
    status = added.controller.status
    if status.busy:
        return StateConflictError(status.under_way, busy=status.busy)
    if Tag.WEIGHTS.value in status.asleep_tags():
        return StateConflictError(
            "the weights are asleep: wake_up(tags=['weights']) first", asleep=status.asleep_tags()
        )
    return None


def _output(name: str, success: bool, message: str) -> Any:
    from sglang.srt.managers import io_struct

    if name == "get_weights_by_name":
        return io_struct.GetWeightsByNameReqOutput(parameter=None)
    extra = {"num_paused_requests": 0} if name == "update_weights_from_disk" else {}
    return getattr(io_struct, OUTPUTS[name])(success=success, message=message, **extra)


def _added(updater: Any) -> Any:
    return state_of(updater.scheduler)


def _agree(added: Any, name: str, ends_in_barrier: bool, call: Callable[[], Any]) -> Any:
    """Run a handler on all ranks and give all of them one answer: SGLang's own, or the messages of the failed ranks."""
    try:
        output = call()
        mine = None if getattr(output, "success", True) else str(output.message)
    except Exception as error:
        logger.exception("%s failed", name)
        output = None
        mine = f"{type(error).__name__}: {error}"
        if ends_in_barrier:  # the other ranks wait there
            added.ranks.barrier()
    failures = [
        f"rank {rank}: {message}" for rank, message in enumerate(added.ranks.gather(mine)) if message is not None
    ]
    if failures:
        return _output(name, success=False, message="; ".join(failures))
    return output


def _guarded(name: str, handle: Callable[[Any, Any, Any, Callable[[], Any]], Any]) -> Callable[..., Any]:
    """Wrap a handler that touches weights: refuse the request while the weights are asleep or the engine is busy.

    Args:
        handle: Called with the scheduler's `SglangScheduler`, SGLang's updater, the request, and SGLang's own handler.
    """

    @on_enabled(_added)
    def handler(added: Any, original: Callable[..., Any], updater: Any, recv_req: Any) -> Any:
        refusal = _refusal(added)
        if refusal is not None:
            return _output(name, success=False, message=refusal.message)
        return handle(added, updater, recv_req, lambda: original(updater, recv_req))

    return handler


def _writing(name: str, ends_in_barrier: bool) -> Callable[..., Any]:
    from_disk = name == FROM_DISK

    def update(added: Any, updater: Any, recv_req: Any, original: Callable[[], Any]) -> Any:
        asleep = added.controller.status.asleep_tags()
        if getattr(recv_req, "recapture_cuda_graph", False) and asleep:  # a capture runs the model
            return _output(name, success=False, message=f"{', '.join(asleep)} asleep: wake_up() before a recapture")
        if getattr(recv_req, "flush_cache", False):
            refusal = added.cannot_flush()
            if refusal is not None:
                return _output(name, success=False, message=refusal.message)

        def call() -> Any:
            forget_embeddings()  # SGLang computes nothing before the handler returns
            agent = added.worker.agent
            loading = agent.loading(f"{name} from {recv_req.model_path}") if from_disk else nullcontext()
            with loading, added.updates.record(agent.identity if _loads_by_user(updater, recv_req) else None):
                return original()

        with _implicit_session(updater, name, recv_req, added) as session:
            in_session = _session(updater) is not None
            output = session.refused or _agree(added, name, ends_in_barrier, call)
            wrote = any(added.ranks.gather(added.updates.wrote))
            if wrote:
                _settle(added, success=output.success, in_session=in_session)
            if session.refused is None and (wrote or output.success):
                _note_draft(added, recv_req, success=output.success)
        output = session.refused or output
        if wrote and in_session and output.success:
            added.controller.refresh()  # not `note_foreign_changes`, which would abort requests that are paused
        if not wrote and output.success and not _is_for_draft(added, updater, recv_req):
            # The models' loaders log unknown names and go on.
            output = _output(name, success=False, message="no tensor has the name of a parameter: nothing was written")
        version = getattr(recv_req, "weight_version", None)
        if from_disk and wrote and output.success:
            version = added.versions.after_load(version) or version
        added.controller.note_foreign_changes(version if output.success else None)
        return output

    return _guarded(name, update)


def _loads_by_user(updater: Any, recv_req: Any) -> bool:
    """Whether a function of the user loads the weights, who may write them by a kernel or a library of his own."""
    load_format = getattr(recv_req, "load_format", None)
    return bool(load_format) and load_format in (updater.scheduler.server_args.custom_weight_loader or ())


def _is_for_draft(added: Any, updater: Any, recv_req: Any) -> bool:
    """Whether an update that wrote no target weights was for the draft model: slime sends buckets of its tensors."""
    if getattr(recv_req, "selector", "all") == "draft":
        return True
    has_draft = getattr(updater, "draft_worker", None) is not None
    return has_draft and any(added.ranks.gather(added.updates.wrote_anything))


def _note_draft(added: Any, recv_req: Any, *, success: bool) -> None:
    """An update is over. SGLang has given the tensors to the models that `selector` names."""
    keeps_copies = success and added.worker.draft_copies  # these are as old as before, and so is the draft
    if getattr(recv_req, "selector", "all") in ("all", "draft") and not keeps_copies:
        added.worker.manager.draft.note_draft(complete=success)


def _settle(added: Any, *, success: bool, in_session: bool) -> None:
    """An update is over on all ranks, and some rank wrote."""
    if not success:
        added.updates.fail()
        return
    if in_session and not added.updates.is_open:  # the session of a draft model that shares a parameter
        added.updates.begin()
    added.updates.settle()


def _session(updater: Any) -> Any:
    """SGLang's open session; `None` if none is open, or if this version has no sessions."""
    return getattr(updater, "_session", None)


class _Session:
    """The session around one update.

    Attributes:
        refused: SGLang's answer, if the session could not begin or end.
    """

    refused: Any = None


@contextmanager
def _implicit_session(updater: Any, name: str, recv_req: Any, added: Any) -> Iterator[_Session]:
    """Put a session around an update whose caller opens none. The option `implicit_update_session` asks for it."""
    session = _Session()
    needed = name in ("update_weights_from_tensor", "update_weights_from_distributed")
    if not needed or not added.config.implicit_update_session or getattr(updater, "_session", ...) is not None:
        yield session
        return
    from sglang.srt.managers import io_struct

    begun = updater.begin_weight_update(io_struct.BeginWeightUpdateReqInput(selector=recv_req.selector))
    if not begun.success:
        session.refused = _output(name, success=False, message=begun.message)
    yield session
    if begun.success:
        ended = updater.end_weight_update(io_struct.EndWeightUpdateReqInput())
        if not ended.success:
            session.refused = _output(name, success=False, message=ended.message)


def _in_agreement(name: str, ends_in_barrier: bool) -> Callable[..., Any]:
    """Wrap the begin and the end of a session. Both process weights."""
    ends = name == "end_weight_update"

    def session(added: Any, updater: Any, recv_req: Any, original: Callable[[], Any]) -> Any:
        def call() -> Any:
            forget_embeddings()  # a trainer may have written weights by RDMA, past SGLang's handlers
            added.worker.manager.learn_unfilled()  # before SGLang takes layers apart
            with added.worker.region():
                return original()

        opened = _session(updater)
        output = _agree(added, name, ends_in_barrier, call)
        if (opened is not None) is not ends:  # out of turn: SGLang has refused the call and touched nothing
            return output
        of_target = getattr(opened if ends else recv_req, "selector", "all") in ("all", "target")
        if not output.success:
            updater._session = None  # on every rank, or else the ranks would disagree on the next call
            if of_target:
                added.updates.fail()
                added.updates.break_off()
                added.controller.note_foreign_changes()
        elif not ends and of_target:
            added.updates.begin()
            added.controller.refresh()  # not `note_foreign_changes`: see above
        elif ends and added.updates.end():
            added.controller.note_foreign_changes()
        return output

    return _guarded(name, session)


def _post_processing() -> Callable[..., Any]:
    def process(added: Any, updater: Any, recv_req: Any, original: Callable[[], Any]) -> Any:
        def call() -> Any:
            added.worker.manager.learn_unfilled()  # before the first write
            with added.worker.region():  # for parameters that the packing makes anew
                return original()

        output = _agree(added, POST_PROCESS, True, call)
        if not output.success:  # some layers may be packed and others not
            added.updates.fail()
            added.controller.note_foreign_changes()
        return output

    return _guarded(POST_PROCESS, process)


def _reading(name: str) -> Callable[..., Any]:
    def read(added: Any, updater: Any, recv_req: Any, original: Callable[[], Any]) -> Any:
        resets = (
            getattr(recv_req, "action", None) == "reset_tensors" and getattr(recv_req, "selector", "all") != "draft"
        )
        try:
            if resets:  # SGLang's checker overwrites the weights: the engine stays closed until an update
                added.worker.manager.give_up_content()
            return original()
        except Exception as error:
            logger.exception("%s failed", name)
            return _output(name, success=False, message=f"{type(error).__name__}: {error}")
        finally:
            if resets:
                added.controller.note_foreign_changes()

    return _guarded(name, read)


@on_enabled(_added)
def _saving(added: Any, original: Callable[..., Any], updater: Any, params: Any) -> Any:
    refusal = _refusal(added)
    if refusal is not None:
        raise refusal
    return original(updater, params)


@on_enabled()
def _attaching(added: Any, original: Callable[..., Any], scheduler: Any, recv_req: Any) -> Any:
    """Refuse to attach a storage backend, as `--hicache-storage-backend` is refused at the start."""
    from sglang.srt.managers import io_struct

    message = unsupported("a storage backend of HiCache", STORED).message
    return io_struct.AttachHiCacheStorageReqOutput(success=False, message=message)


def _obey(added: Any, command: AnyCommand) -> None:
    """Obey a command of a caller that bypasses the tokenizer's process. Its error can only be logged."""

    def log(done: Any) -> None:
        try:
            raise_engine_failures([decode_reply(done.result())])
        except RLMemoryError as error:
            logger.error("%s: %s", type(command).__name__, error.message)

    added.controller.obey(command).add_done_callback(log)


def _redirect_to(output: str, command: Callable[[Any, Any], AnyCommand]) -> Callable[..., Any]:
    """Redirect SGLang's release or resume to the state machine.

    Args:
        output: The name of SGLang's reply type.
        command: Makes the command, from SGLang's updater and its request.
    """

    @on_enabled(_added)
    def handler(added: Any, original: Callable[..., Any], updater: Any, recv_req: Any) -> Any:
        from sglang.srt.managers import io_struct

        try:
            _obey(added, command(updater, recv_req))
        except RLMemoryError as error:
            logger.error("%s: %s", type(recv_req).__name__, error.message)
        return getattr(io_struct, output)()

    return handler


def _sleep(updater: Any, recv_req: Any) -> AnyCommand:
    return operations.sleep(native_level(updater.scheduler.server_args), recv_req.tags or None, "keep")


def _wake_up(updater: Any, recv_req: Any) -> AnyCommand:
    return operations.wake_up(recv_req.tags or None)


def native_level(server_args: Any) -> int:
    """The level of SGLang's own release: it keeps the weights only with `--enable-weights-cpu-backup`."""
    return 1 if server_args.enable_weights_cpu_backup else 2
