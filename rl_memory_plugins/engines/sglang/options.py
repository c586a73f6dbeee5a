"""How the options travel: as `server_args._rl_memory`, which SGLang pickles to its schedulers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from rl_memory_plugins.config import RLMemoryConfig
from rl_memory_plugins.engines.enabled import require_or_stay_out
from rl_memory_plugins.errors import RLMemoryError

CHILD_VARIABLE = "RLMEM_SGLANG"  # set by an enabled parent while it starts its children
ATTRIBUTE = "_rl_memory"  # of ServerArgs: the options, or None if the engine is not enabled
EXPLICIT = "_rl_memory_explicit"  # of ServerArgs: the flag or the keyword enables it, not the environment alone


def config_of(server_args: Any) -> RLMemoryConfig | None:
    """The options of an engine, or `None` if it is not enabled."""
    if not hasattr(server_args, ATTRIBUTE):  # a framework made it: only the environment can enable the plugin
        return RLMemoryConfig.from_environment()
    options = getattr(server_args, ATTRIBUTE)
    return None if options is None else RLMemoryConfig.from_dict(options)


def stay_out(server_args: Any, error: RLMemoryError) -> None:
    """Leave an engine alone that cannot be served. Raises as `require_or_stay_out` does."""
    require_or_stay_out(error, explicit=getattr(server_args, EXPLICIT, False))
    setattr(server_args, ATTRIBUTE, None)


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Child processes that start meanwhile find the plugin disabled in their environment."""
    former = os.environ.pop("RL_MEMORY", None)
    try:
        yield
    finally:
        if former is not None:
            os.environ["RL_MEMORY"] = former


def launching() -> bool:
    """Whether this process is starting an enabled engine, or is one of its processes."""
    return CHILD_VARIABLE in os.environ or RLMemoryConfig.from_environment() is not None
