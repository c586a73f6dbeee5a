"""How SGLang is told: the flag, the configuration that travels with it, and when the hooks are put in.

The plugin is called in every SGLang process, before the command line is parsed. Not enabled, it puts in only
what it can be enabled through: the flag, and `Engine`'s keyword. Enabled, the options travel as
`server_args._rl_memory`, which SGLang pickles to the schedulers. These are started through a function of ours,
which puts in the hooks before the engine's classes are used. A framework that makes `ServerArgs` itself and
calls `launch_server` enables the plugin by `RL_MEMORY`, which all processes see.

SGLang only logs what a plugin raises. So what must stop the start is raised where SGLang does not catch it:
from the parsing of the arguments, from the launch, or as `SystemExit`.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
from collections.abc import Callable
from typing import Any

from rl_memory_plugins.config import RLMemoryConfig
from rl_memory_plugins.errors import RLMemoryError, unsupported
from rl_memory_plugins.hooking import Hooks

CHILD_VARIABLE = "RLMEM_SGLANG"  # set by an enabled parent while it starts its children
ATTRIBUTE = "_rl_memory"  # of ServerArgs: the options, or None if the engine is not enabled
HELP = "Sleep, wake and weight updates by rl_memory_plugins. Options as JSON or key=value,…"

ENGINE = "sglang.srt.entrypoints.engine"
ARGUMENTS = "sglang.srt.server_args:ServerArgs"

hooks = Hooks("sglang")
_original: dict[str, Any] = {}


def register() -> None:
    """Called by SGLang's `load_plugins`, and by `rl_memory_plugins.sglang`."""
    try:
        hooks.wrap(f"{ARGUMENTS}.add_cli_args", _add_flag)
        hooks.wrap(f"{ARGUMENTS}.from_cli_args", _from_cli_args)
        _accept_keyword()
        if CHILD_VARIABLE in os.environ or RLMemoryConfig.from_environment() is not None:
            install()
    except RLMemoryError as error:
        raise SystemExit(f"rl_memory: {error.message}") from error


def install() -> None:
    """Put in the hooks of all roles. Each acts only on engines whose configuration enables it."""
    from rl_memory_plugins.engines.sglang import balance, client, native, scheduler, server, worker

    roles = (worker, scheduler, native, client, server, balance)
    hooks.install(_hook_launch, *(role.install for role in roles))


def run_data_parallel_controller_process(*args: Any, **kwargs: Any) -> Any:
    """Takes the place of SGLang's, which does not load plugins before 0.5.22. A child finds it by this name."""
    from sglang.srt.managers import data_parallel_controller

    if launching():
        install()
    return data_parallel_controller.run_data_parallel_controller_process(*args, **kwargs)


def run_scheduler_process(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """In a scheduler's process: put in the hooks first, whether or not SGLang finds the plugin there."""
    install()
    return original(*args, **kwargs)


def config_of(server_args: Any) -> RLMemoryConfig | None:
    """The options of an engine, or `None` if it is not enabled."""
    if not hasattr(server_args, ATTRIBUTE):  # made by a framework: only the environment can enable it
        return RLMemoryConfig.from_environment()
    options = getattr(server_args, ATTRIBUTE)
    return None if options is None else RLMemoryConfig.from_dict(options)


# -- the ways to enable it ----------------------------------------------------------------------------------


def _add_flag(original: Callable[..., Any]) -> Callable[..., Any]:
    def add_cli_args(parser: argparse.ArgumentParser) -> Any:
        result = original(parser)
        group = parser.add_argument_group(title="rl_memory_plugins", description=HELP)
        group.add_argument("--rl-memory", nargs="?", const="", default=None, metavar="OPTIONS", help=HELP)
        return result

    return add_cli_args


def _from_cli_args(original: Callable[..., Any]) -> Callable[..., Any]:
    def from_cli_args(cls: Any, args: argparse.Namespace) -> Any:
        config = _requested(getattr(args, "rl_memory", None))
        if config is not None:
            args.enable_memory_saver = True
        return _enable(original(cls, args), config)

    return from_cli_args


def _accept_keyword() -> None:
    """`Engine(..., rl_memory=…)`. Assigned, because SGLang's registry would hook the class in every module."""
    engine = hooks.require(f"{ENGINE}:Engine")
    if not hasattr(engine, "server_args_class"):
        hooks.wrap(f"{ARGUMENTS}.__init__", _refuse_keyword)
        return
    if "server_args_class" in _original:
        return
    original = _original["server_args_class"] = engine.server_args_class

    def server_args_class(*args: Any, rl_memory: Any = None, **kwargs: Any) -> Any:
        config = _requested(rl_memory)
        if config is not None:
            kwargs["enable_memory_saver"] = True
        return _enable(original(*args, **kwargs), config)

    engine.server_args_class = staticmethod(server_args_class)


def _refuse_keyword(original: Callable[..., None]) -> Callable[..., None]:
    """Releases whose `Engine` does not say how it makes `ServerArgs` lack more than that: `install` names it all."""

    def __init__(self: Any, *args: Any, rl_memory: Any = None, **kwargs: Any) -> None:
        if _requested(rl_memory) is not None:
            install()
        original(self, *args, **kwargs)

    return __init__


def _requested(value: Any) -> RLMemoryConfig | None:
    """What was asked for: by the flag or the keyword, else by the environment."""
    if value is None:
        return RLMemoryConfig.from_environment()
    return None if value is False else RLMemoryConfig.parse(value)


def _enable(server_args: Any, config: RLMemoryConfig | None) -> Any:
    setattr(server_args, ATTRIBUTE, None if config is None else config.to_dict())
    if config is not None:
        _refuse_servers(server_args)
        install()
    return server_args


# -- the launch ---------------------------------------------------------------------------------------------


def _hook_launch(hooks: Hooks) -> None:
    hooks.require(f"{ENGINE}:Engine.server_args_class")
    hooks.require(f"{ENGINE}:run_data_parallel_controller_process")
    hooks.wrap(f"{ENGINE}:Engine._launch_subprocesses", _launch_subprocesses)
    from sglang.srt.entrypoints import engine

    # Assigned, because a wrapped function keeps its name, and a child finds it by that.
    engine.run_data_parallel_controller_process = run_data_parallel_controller_process


def _launch_subprocesses(original: Callable[..., Any]) -> Callable[..., Any]:
    def launch(cls: Any, server_args: Any, *args: Any, **kwargs: Any) -> Any:
        config = config_of(server_args)
        if config is None:
            return original(cls, server_args, *args, **kwargs)
        if cls.__name__ == "RayEngine":
            raise unsupported(*RAY)
        refuse_modes(server_args)
        os.environ[CHILD_VARIABLE] = json.dumps(config.to_dict())
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")  # registrations do not survive an unmapped address
        run_scheduler = kwargs["run_scheduler_process_func"]
        kwargs["run_scheduler_process_func"] = functools.partial(run_scheduler_process, run_scheduler)
        try:
            return original(cls, server_args, *args, **kwargs)
        finally:
            os.environ.pop(CHILD_VARIABLE, None)

    return launch


def launching() -> bool:
    """Whether this process is starting an enabled engine, or is one of its processes."""
    return CHILD_VARIABLE in os.environ or RLMemoryConfig.from_environment() is not None


RAY = ("Ray schedulers", "their actors load no plugins")
STORED = "what it stores is of the weights of its time, and is found again after an update"


def _refuse_servers(server_args: Any) -> None:
    """Servers that start their processes by themselves: no launch is seen there, and no hook put in.

    Raises:
        UnsupportedError: names the option.
    """
    for option in ("encoder_only", "smg_grpc_mode", "grpc_mode"):
        if getattr(server_args, option, False):
            raise unsupported(f"--{option.replace('_', '-')}", "that server starts processes that no plugin reaches")


def refuse_modes(server_args: Any) -> None:
    """Modes in which processes exist that no plugin reaches, or that no call can be kept safe in.

    Raises:
        UnsupportedError: names the mode and why.
    """
    from sglang.srt.environ import envs

    _refuse_servers(server_args)
    if server_args.tokenizer_worker_num > 1:
        raise unsupported("--tokenizer-worker-num > 1", "its workers load no plugins")
    rust = getattr(envs, "SGLANG_RUST_SERVER", None)
    if rust is not None and rust.get():
        raise unsupported("SGLANG_RUST_SERVER", "it has no Python server to put the routes and the gate in")
    if getattr(server_args, "use_ray", False):
        raise unsupported(*RAY)
    if getattr(server_args, "weight_cache_mode", "off") != "off":
        raise unsupported("--weight-cache-mode", "the weights are shared with other engines and cannot be released")
    if server_args.pp_size > 1:
        raise unsupported("--pp-size > 1", "a stage forwards a request only after handling it, so stages cannot agree")
    if server_args.disaggregation_mode not in (None, "null"):
        raise unsupported("--disaggregation-mode", "transfers read the KV cache whenever the other side wants")
    if server_args.enable_eplb:
        raise unsupported("--enable-eplb", "experts change places between updates, which is not followed here")
    if server_args.elastic_ep_backend is not None:
        raise unsupported("--elastic-ep-backend", "ranks that come and go cannot agree on a sleep")
    if getattr(server_args, "enable_pdmux", False):
        raise unsupported("--enable-pdmux", "its loop takes no notice of a pause")
    if server_args.hicache_storage_backend is not None:
        raise unsupported("--hicache-storage-backend", STORED)
    for option in ("enable_lmcache", "enable_flexkv", "enable_unified_cache_external_linker"):
        if getattr(server_args, option, False):
            raise unsupported(f"--{option.replace('_', '-')}", STORED)
    if getattr(server_args, "radix_cache_backend", None) == "flexkv":
        raise unsupported("--radix-cache-backend=flexkv", STORED)
    if not server_args.enable_memory_saver and server_args.device != "cpu":
        raise unsupported("enable_memory_saver=False", "SGLang sizes and registers memory by it; pass True")
