"""The flag and the keyword that enable the plugin on SGLang.

SGLang calls the plugin in every process, before it parses the command line. A plugin that is not enabled adds only the
flag and the keyword of `Engine`. A framework that makes `ServerArgs` itself and calls `launch_server` enables the
plugin by the variable `RL_MEMORY`, which all processes see.

SGLang logs the exceptions of plugins and goes on. An error that must stop the start is therefore raised where SGLang
does not catch it: from the parsing of the arguments, from the launch, or as `SystemExit`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from rl_memory_plugins.config import RLMemoryConfig
from rl_memory_plugins.engines.sglang.hooks import ARGUMENTS, ENGINE, hooks
from rl_memory_plugins.engines.sglang.modes import refuse_modes, refuse_servers
from rl_memory_plugins.engines.sglang.options import ATTRIBUTE, EXPLICIT, launching, stay_out
from rl_memory_plugins.engines.sglang.transfer_engine import accept_transfer_engine, resolving
from rl_memory_plugins.errors import RLMemoryError, UnsupportedError

HELP = "Sleep, wake and weight updates by rl_memory_plugins. Options as JSON or key=value,…"

_original: dict[str, Any] = {}


def register() -> None:
    """Called by SGLang's `load_plugins`, and by `rl_memory_plugins.sglang`."""
    try:
        hooks.wrap(f"{ARGUMENTS}.add_cli_args", _add_flag)
        hooks.wrap(f"{ARGUMENTS}.from_cli_args", _from_cli_args)
        _accept_keyword()
        if launching():
            accept_transfer_engine(hooks)
            _install()
    except RLMemoryError as error:
        raise SystemExit(f"rl_memory: {error.message}") from error


# -- the ways to enable it ----------------------------------------------------------------------------------


def _install() -> None:
    """Imported late: a process of an engine that is not enabled imports no role."""
    from rl_memory_plugins.engines.sglang.install import install

    install()


def _add_flag(original: Callable[..., Any]) -> Callable[..., Any]:
    def add_cli_args(parser: argparse.ArgumentParser) -> Any:
        result = original(parser)
        group = parser.add_argument_group(title="rl_memory_plugins", description=HELP)
        group.add_argument("--rl-memory", nargs="?", const="", default=None, metavar="OPTIONS", help=HELP)
        return result

    return add_cli_args


def _from_cli_args(original: Callable[..., Any]) -> Callable[..., Any]:
    def from_cli_args(cls: Any, args: argparse.Namespace) -> Any:
        value, saver = getattr(args, "rl_memory", None), args.enable_memory_saver
        config = _requested(value)
        if config is not None:
            args.enable_memory_saver = True
        with resolving(config, hooks):
            server_args = original(cls, args)
        return _enable(server_args, config, explicit=value is not None, saver=saver)

    return from_cli_args


def _accept_keyword() -> None:
    """Make `Engine` take `rl_memory=…`. SGLang's own registry would replace the class in every module."""
    engine = hooks.require(f"{ENGINE}:Engine")
    if not hasattr(engine, "server_args_class"):
        hooks.wrap(f"{ARGUMENTS}.__init__", _refuse_keyword)
        return
    if "server_args_class" in _original:
        return
    original = _original["server_args_class"] = engine.server_args_class

    def server_args_class(*args: Any, rl_memory: Any = None, **kwargs: Any) -> Any:
        config, saver = _requested(rl_memory), kwargs.get("enable_memory_saver", False)
        if config is not None:
            kwargs["enable_memory_saver"] = True
        with resolving(config, hooks):
            server_args = original(*args, **kwargs)
        return _enable(server_args, config, explicit=rl_memory is not None, saver=saver)

    engine.server_args_class = staticmethod(server_args_class)


def _refuse_keyword(original: Callable[..., None]) -> Callable[..., None]:
    """For releases without `Engine.server_args_class`. They lack other symbols too, and `install` names all of them."""

    def __init__(self: Any, *args: Any, rl_memory: Any = None, **kwargs: Any) -> None:
        if _requested(rl_memory) is not None:
            _install()
        original(self, *args, **kwargs)

    return __init__


def _requested(value: Any) -> RLMemoryConfig | None:
    """The configuration that the flag or the keyword gives, else the environment."""
    if value is None:
        return RLMemoryConfig.from_environment()
    return None if value is False else RLMemoryConfig.parse(value)


def _enable(server_args: Any, config: RLMemoryConfig | None, *, explicit: bool = True, saver: bool = False) -> Any:
    """Note the options in SGLang's own, and put in the hooks.

    Args:
        explicit: The flag or the keyword gives the options. Else the environment does, for engines that can be served.
        saver: `enable_memory_saver` as the user gave it.
    """
    setattr(server_args, ATTRIBUTE, None if config is None else config.to_dict())
    setattr(server_args, EXPLICIT, config is not None and explicit)
    if config is None:
        return server_args
    try:
        (refuse_servers if explicit else refuse_modes)(server_args)
    except UnsupportedError as error:
        stay_out(server_args, error)
        server_args.enable_memory_saver = saver
        return server_args
    _install()
    return server_args
