"""The flag that enables the plugin on vLLM, and the moment at which the hooks are put in.

vLLM calls the general plugin in every process, before it parses the command line. A plugin that is not enabled wraps
two functions only: `EngineArgs.add_cli_args`, which gets the flag, and `EngineArgs.create_engine_config`, which reads
`additional_config`. The value of the flag lies in `additional_config` too. So it travels with the parsed arguments,
also to child processes, and holds for no other command line. An enabled process sets an environment variable, by which
its children put in the hooks before the engine's classes are used.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

from rl_memory_plugins.config import RLMemoryConfig
from rl_memory_plugins.engines.enabled import require_or_stay_out
from rl_memory_plugins.engines.vllm import modes, options
from rl_memory_plugins.engines.vllm.hooks import hooks
from rl_memory_plugins.engines.vllm.options import CHILD_VARIABLE, CONFIG_KEY
from rl_memory_plugins.errors import UnsupportedError

HELP = "Sleep, wake and weight updates by rl_memory_plugins. Options as JSON or key=value,…"


def register() -> None:
    hooks.wrap("vllm.engine.arg_utils:EngineArgs.add_cli_args", _add_flag)
    hooks.wrap("vllm.engine.arg_utils:EngineArgs.create_engine_config", _create_engine_config)
    if os.environ.get(CHILD_VARIABLE):
        _install()


def _install() -> None:
    from rl_memory_plugins.engines.vllm.install import install  # imports all roles, which only enabled processes need

    install()


class _Flag(argparse.Action):
    """Refuse wrong options while vLLM reads the command line, before it makes an engine."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: Any = None
    ) -> None:
        value = values if isinstance(values, str) and values else "1"
        try:
            RLMemoryConfig.parse(value)
        except Exception as error:
            parser.error(str(error))
        setattr(namespace, self.dest, value)


def _add_flag(original: Callable[..., Any]) -> Callable[..., Any]:
    def add_cli_args(parser: Any, *args: Any, **kwargs: Any) -> Any:
        parser = original(parser, *args, **kwargs)
        group = parser.add_argument_group(title="rl_memory_plugins", description=HELP)
        group.add_argument("--rl-memory", action=_Flag, nargs="?", const="1", default=None, help=HELP)
        parser.parse_known_args = _into_additional_config(parser.parse_known_args)
        return parser

    return add_cli_args


def _into_additional_config(parse: Callable[..., Any]) -> Callable[..., Any]:
    """Put the value of the flag where `EngineArgs.from_cli_args` finds it, also in a child process without hooks."""

    def parse_known_args(*args: Any, **kwargs: Any) -> Any:
        namespace, rest = parse(*args, **kwargs)
        if namespace.rl_memory is not None:
            namespace.additional_config = {CONFIG_KEY: namespace.rl_memory, **(namespace.additional_config or {})}
        return namespace, rest

    return parse_known_args


def _create_engine_config(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        value, explicit = options.requested(self), options.is_explicit(self)
        if isinstance(self.additional_config, dict):  # the engine must not see a `False`
            self.additional_config = {k: v for k, v in self.additional_config.items() if k != CONFIG_KEY}
        if value is None:
            return original(self, *args, **kwargs)
        before = self.additional_config, self.enable_sleep_mode
        try:
            modes.refuse_arguments(self)
            self.enable_sleep_mode = False  # this package replaces it, and vLLM refuses it on devices without its own
            options.enable(self, value)
            _install()
            config = original(self, *args, **kwargs)
            modes.refuse_configuration(config)
            if before[1] and getattr(self, "sleep_mode_offload_cudagraph", False):  # not in every version
                os.environ.setdefault(
                    "NCCL_GRAPH_REGISTER", "0"
                )  # as vLLM's own sleep: workers on all hosts inherit it
        except UnsupportedError as error:
            require_or_stay_out(error, explicit=explicit)
            self.additional_config, self.enable_sleep_mode = before
            options.take_back()
            return original(self, *args, **kwargs)
        return config

    return create_engine_config
