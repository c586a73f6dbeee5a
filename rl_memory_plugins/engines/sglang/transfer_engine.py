"""SGLang's arguments for Mooncake's TransferEngine, which an enabled engine accepts.

SGLang disables the TransferEngine if its own memory saver is on, because that registers no memory again after a
release. Enabled engines have this option on, and register the memory again; see `registered_memory.py`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from rl_memory_plugins.config import RLMemoryConfig
from rl_memory_plugins.engines.sglang.modes import refuse_modes
from rl_memory_plugins.engines.sglang.options import config_of
from rl_memory_plugins.errors import RLMemoryError, unsupported
from rl_memory_plugins.hooking import Hooks

#: Where SGLang decides whether it can use the TransferEngine, by release: a module and a class.
VALIDATORS = (("sglang.srt.arg_groups.model_path_hook", ""), ("sglang.srt.server_args", "ServerArgs"))
NAME = "validate_transfer_engine"

_resolving: ContextVar[RLMemoryConfig | None] = ContextVar("rl_memory_resolving", default=None)


@contextmanager
def resolving(config: RLMemoryConfig | None, hooks: Hooks) -> Iterator[None]:
    """The body makes SGLang's arguments, for an engine with these options; `None` if it is not enabled.

    Older releases resolve their arguments meanwhile, newer ones at the launch.
    """
    if config is not None:
        accept_transfer_engine(hooks)
    token = _resolving.set(config)
    try:
        yield
    finally:
        _resolving.reset(token)


def accept_transfer_engine(hooks: Hooks) -> None:
    """Put in the hook that this module is about. A release without the function has no TransferEngine."""
    for module, owner in VALIDATORS:
        try:
            found = importlib.import_module(module)
        except ImportError:
            continue
        if hasattr(getattr(found, owner) if owner else found, NAME):
            hooks.wrap(f"{module}:{owner}.{NAME}" if owner else f"{module}:{NAME}", _validating)


def _validating(original: Callable[..., Any]) -> Callable[..., Any]:
    def validate(server_args: Any) -> Any:
        config = _resolving.get() or config_of(server_args)
        if config is None or not server_args.enable_memory_saver or not _is_served(server_args):
            return original(server_args)
        if config.allocator == "tms":
            raise unsupported("the TransferEngine with allocator=tms", "it registers no memory of torch_memory_saver")
        return _has_mooncake() or original(server_args)  # which then warns that Mooncake is absent

    return validate


def _has_mooncake() -> bool:
    try:
        return importlib.util.find_spec("mooncake.engine") is not None
    except (ModuleNotFoundError, ValueError):
        return False


def _is_served(server_args: Any) -> bool:
    try:
        refuse_modes(server_args)
    except RLMemoryError:
        return False
    return True
