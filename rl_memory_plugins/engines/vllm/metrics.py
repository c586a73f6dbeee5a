"""vLLM's own metrics of sleep and updates, kept true for states that vLLM's own sleep does not have."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from rl_memory_plugins import admission, commands
from rl_memory_plugins.operations import Transition
from rl_memory_plugins.records import EngineStatus
from rl_memory_plugins.tags import Tag, TagState

#: Since 0.33 the routes of vLLM measure their operations; this package's routes stand in their place. For each
#: transition: the module and the function that give the metrics, and vLLM's name of the operation.
_OPERATIONS = {
    commands.Sleep: ("vllm.entrypoints.serve.dev.sleep.metrics", "sleep_mode_operation_metrics", "sleep"),
    commands.WakeUp: ("vllm.entrypoints.serve.dev.sleep.metrics", "sleep_mode_operation_metrics", "wake"),
    commands.UpdateWeights: ("vllm.entrypoints.rl.online.metrics", "weight_operation_metrics", "update"),
}


def measured(command: Transition) -> AbstractContextManager[None]:
    """The body runs the command, and vLLM's metrics of operations measure it if this version has any."""
    if type(command) not in _OPERATIONS:
        return contextlib.nullcontext()
    module, function, operation = _OPERATIONS[type(command)]
    try:
        metrics = getattr(importlib.import_module(module), function)()
    except ImportError:
        return contextlib.nullcontext()
    return metrics.record(operation)  # type: ignore[no-any-return]


def sleep_state(engines: Sequence[EngineStatus]) -> tuple[int, int]:
    """The arguments of vLLM's `record_sleep_state`.

    Returns: 1 if anything sleeps or is paused, else 0; and the level: 2 if weights are discarded, 1 if they are
        preserved in host memory, 0 if they are on the device.
    """
    weights = {
        rank.tags[Tag.WEIGHTS.value].state
        for engine in engines
        for rank in engine.ranks
        if Tag.WEIGHTS.value in rank.tags
    }
    level = 2 if TagState.DISCARDED in weights else int(TagState.PRESERVED in weights)
    return int(admission.is_sleeping(engines)), level


class FreshAtScrape:
    """ASGI middleware that brings metrics up to date before they are read.

    The engine's state also changes by calls that this server does not serve: those of another server of the same
    engine, and vLLM's own calls in the engine's process.
    """

    def __init__(self, app: Any, refresh: Callable[[], None]) -> None:
        self._app = app
        self._refresh = refresh

    def __call__(self, scope: Any, receive: Any, send: Any) -> Awaitable[None]:
        if scope["type"] == "http" and scope["path"].removeprefix(scope.get("root_path", "")).startswith("/metrics"):
            self._refresh()
        return self._app(scope, receive, send)  # type: ignore[no-any-return]
