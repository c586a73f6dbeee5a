"""Weights that other processes read or write: through Mooncake's TransferEngine, or in a group of two instances.

SGLang registers the memory of the weights with the TransferEngine at the start. Peers then read and write that memory
without any call of this engine. `registered_memory.py` follows the sleeps. This module notes the registrations, and
refuses to give weights to a new instance that are asleep or not valid.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rl_memory_plugins.engines.enabled import on_enabled
from rl_memory_plugins.engines.sglang import worker
from rl_memory_plugins.engines.sglang.hooks import SCHEDULER
from rl_memory_plugins.engines.sglang.registered_memory import RegisteredMemory
from rl_memory_plugins.errors import RLMemoryError, StateConflictError
from rl_memory_plugins.hooking import Hooks
from rl_memory_plugins.records import EngineStatus
from rl_memory_plugins.tags import Content, Tag

UTILS = "sglang.srt.model_loader.remote_instance_weight_loader_utils"
#: SGLang's functions that register a model, `(model, transfer_engine)`.
REGISTER = ("register_memory_region_v1", "register_memory_region_v2")
#: The calls that give a new instance the weights of this engine, and the names of their replies.
SENDS = {
    "init_weights_send_group_for_remote_instance": "InitWeightsSendGroupForRemoteInstanceReqOutput",
    "send_weights_to_remote_instance": "SendWeightsToRemoteInstanceReqOutput",
}
#: The routes that tell a peer where the weights are.
INFO = ("/remote_instance_transfer_engine_info", "/get_remote_instance_transfer_engine_info")


def unreadable(status: EngineStatus) -> RLMemoryError | None:
    """Why nobody may copy the weights of an engine; `None` if they can be copied."""
    if status.busy:
        return StateConflictError(status.under_way, busy=status.busy)
    if Tag.WEIGHTS.value in status.asleep_tags():
        return StateConflictError(
            "the weights are asleep: wake_up(tags=['weights']) first", asleep=status.asleep_tags()
        )
    if status.content is not Content.VALID:
        return StateConflictError(
            f"the weights are {status.content.value}: send a complete update first", content=status.content.value
        )
    return None


class _Recorder:
    """A TransferEngine whose registrations are noted."""

    def __init__(self, engine: Any, registered: RegisteredMemory) -> None:
        self._engine = engine
        self._registered = registered

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def register_memory(self, address: int, nbytes: int) -> int:
        result: int = self._engine.register_memory(address, nbytes)
        if result == 0:
            self._registered.note(self._engine, address, nbytes)
        return result


def _recording(original: Callable[..., Any]) -> Callable[..., Any]:
    def register(model: Any, transfer_engine: Any) -> Any:
        found = worker.registered()
        return original(model, transfer_engine if found is None else _Recorder(transfer_engine, found))

    return register


def install(hooks: Hooks) -> None:
    for name in REGISTER:
        hooks.wrap(f"{UTILS}:{name}", _recording)
    for name, reply in SENDS.items():
        hooks.wrap(f"{SCHEDULER}.{name}", _sending(reply))


def _sending(reply: str) -> Callable[..., Any]:
    @on_enabled()
    def send(added: Any, original: Callable[..., Any], scheduler: Any, recv_req: Any) -> Any:
        refusal = unreadable(added.controller.status)
        if refusal is None:
            return original(scheduler, recv_req)
        from sglang.srt.managers import io_struct

        return getattr(io_struct, reply)(success=False, message=refusal.message)

    return send


def guard_info(app: Any, status: Callable[[], list[EngineStatus]]) -> None:
    """Refuse to tell a peer where the weights are while nobody may copy them. The addresses never change."""
    for route in app.router.routes:
        if getattr(route, "path", "") in INFO:
            route.app = _guarded(route.app, status)


def _guarded(app: Callable[..., Any], status: Callable[[], list[EngineStatus]]) -> Callable[..., Any]:
    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        from rl_memory_plugins.server.responses import error_response

        refusal = next(filter(None, map(unreadable, status())), None)
        await (app if refusal is None else error_response(refusal))(scope, receive, send)

    return guarded
