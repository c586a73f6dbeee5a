"""vLLM with one more argument: `LLM(model, rl_memory=True)` and `AsyncEngineArgs(model=…, rl_memory=True)`."""

from __future__ import annotations

from typing import Any

import vllm

from rl_memory_plugins.config import RLMemoryConfig
from rl_memory_plugins.engines.vllm.options import CONFIG_KEY

__all__ = ["LLM", "AsyncEngineArgs", "EngineArgs"]


def _with_config(rl_memory: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    additional = dict(arguments.get("additional_config") or {})
    if rl_memory is None or (rl_memory is True and CONFIG_KEY in additional):
        return arguments
    # `False` stays in the configuration: it wins over the environment.
    additional[CONFIG_KEY] = False if rl_memory is False else RLMemoryConfig.parse(rl_memory).to_dict()
    return {**arguments, "additional_config": additional}


class _WithRLMemory:
    """Adds the argument `rl_memory` to a class of vLLM that takes `additional_config`."""

    def __init__(self, *args: Any, rl_memory: Any = True, **kwargs: Any) -> None:
        super().__init__(*args, **_with_config(rl_memory, kwargs))


class LLM(_WithRLMemory, vllm.LLM):  # type: ignore[misc]
    """`vllm.LLM`.

    Args:
        rl_memory: `True` for the options in `additional_config`, else the defaults; or options for
            `config.RLMemoryConfig.parse`. `False` disables the plugin. With `None` the environment decides.
    """


class EngineArgs(_WithRLMemory, vllm.EngineArgs):  # type: ignore[misc]
    """`vllm.EngineArgs` with `rl_memory`, as for `LLM`."""


class AsyncEngineArgs(_WithRLMemory, vllm.AsyncEngineArgs):  # type: ignore[misc]
    """`vllm.AsyncEngineArgs` with `rl_memory`, as for `LLM`."""
