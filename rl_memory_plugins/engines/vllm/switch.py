"""How vLLM is told: the flag, and when the hooks are put in.

The general plugin is called in every vLLM process, before the command line is parsed. Not enabled, it wraps
two functions through which it can be enabled, and nothing else: `EngineArgs.add_cli_args`, so that the flag
exists, and `EngineArgs.create_engine_config`, which sees the flag and `additional_config`. An enabled process tells
its children, by an environment variable, to put in the hooks before the engine's classes are used.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

from rl_memory_plugins.config import RLMemoryConfig
from rl_memory_plugins.engines.vllm import modes, options
from rl_memory_plugins.engines.vllm.hooks import hooks
from rl_memory_plugins.engines.vllm.options import CHILD_VARIABLE, CONFIG_KEY, FLAG_VARIABLE

HELP = "Sleep, wake and weight updates by rl_memory_plugins. Options as JSON or key=value,…"


def register() -> None:
    hooks.wrap("vllm.engine.arg_utils:EngineArgs.add_cli_args", _add_flag)
    hooks.wrap("vllm.engine.arg_utils:EngineArgs.create_engine_config", _create_engine_config)
    if os.environ.get(CHILD_VARIABLE):
        _install()


def _install() -> None:
    from rl_memory_plugins.engines.vllm.install import install  # only an enabled process needs the roles

    install()


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
        value = options.requested(self)
        if isinstance(self.additional_config, dict):  # the engine sees no trace of a `False`
            self.additional_config = {k: v for k, v in self.additional_config.items() if k != CONFIG_KEY}
        if value is None:
            return original(self, *args, **kwargs)
        modes.refuse_arguments(self)
        options.enable(self, value)
        _install()
        config = original(self, *args, **kwargs)
        modes.refuse_configuration(config)
        return config

    return create_engine_config
