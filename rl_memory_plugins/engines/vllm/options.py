"""How the options travel: in `vllm_config.additional_config["rl_memory"]`, which vLLM carries to every process."""

from __future__ import annotations

import os
from typing import Any

from rl_memory_plugins.config import RLMemoryConfig

CONFIG_KEY = "rl_memory"
CHILD_VARIABLE = "RLMEM_VLLM_HOOKS"  # an enabled parent sets it for its child processes
_COPIED_BY_RAY = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"

_made_here = False  # this process has made the configuration of an enabled engine


def config_of(vllm_config: Any) -> RLMemoryConfig | None:
    """The options of an engine, or `None` if it is not enabled."""
    additional = getattr(vllm_config, "additional_config", None)
    if not isinstance(additional, dict) or CONFIG_KEY not in additional:
        return None
    return RLMemoryConfig.from_dict(additional[CONFIG_KEY])


def suspends_communicators(vllm_config: Any) -> bool:
    """Whether a sleep of this engine suspends its NCCL communicators, by the option or by vLLM's own flag."""
    config = config_of(vllm_config)
    flag = getattr(vllm_config.model_config, "enable_nccl_comm_suspend", False)  # not in every version
    return bool(flag) or (config is not None and config.nccl_suspend)


def requested(engine_args: Any) -> Any:
    """The options that the user gave: in `additional_config`, which the flag fills too, else in the environment.

    Returns: `None` if the user has not enabled the plugin for this engine.
    """
    additional = getattr(engine_args, "additional_config", None)
    if isinstance(additional, dict) and CONFIG_KEY in additional:
        value = additional[CONFIG_KEY]
        return None if value is False else {} if value is None else value
    return RLMemoryConfig.from_environment()


def is_explicit(engine_args: Any) -> bool:
    """Whether the flag or `additional_config` decides, not the environment alone, which a job sets for all engines."""
    additional = getattr(engine_args, "additional_config", None)
    return isinstance(additional, dict) and CONFIG_KEY in additional


def take_back() -> None:
    """Undo `enable` for an engine that runs without the plugin after all."""
    global _made_here
    _made_here = False
    os.environ.pop(CHILD_VARIABLE, None)


def enable(engine_args: Any, value: Any) -> None:
    """Put the options into the engine's configuration, and make child processes put in the hooks."""
    global _made_here
    engine_args.additional_config = dict(engine_args.additional_config or {})
    engine_args.additional_config[CONFIG_KEY] = RLMemoryConfig.parse(value).to_dict()
    _made_here = True
    os.environ[CHILD_VARIABLE] = "1"
    # vLLM copies only these variables to remote Ray workers.
    copied = os.environ.get(_COPIED_BY_RAY, "").split(",")
    os.environ[_COPIED_BY_RAY] = ",".join(dict.fromkeys(name for name in (*copied, CHILD_VARIABLE) if name))


def may_serve(args: Any) -> bool:
    """Whether a server with these arguments may have an enabled engine.

    The variable for child processes does not count: a server without the plugin may be such a child.
    """
    return _made_here or requested(args) is not None
