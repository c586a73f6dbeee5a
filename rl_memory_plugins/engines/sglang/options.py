"""How the options travel: as `server_args._rl_memory`, which SGLang pickles to its schedulers."""

from __future__ import annotations

import os
from typing import Any

from rl_memory_plugins.config import RLMemoryConfig

CHILD_VARIABLE = "RLMEM_SGLANG"  # set by an enabled parent while it starts its children
ATTRIBUTE = "_rl_memory"  # of ServerArgs: the options, or None if the engine is not enabled


def config_of(server_args: Any) -> RLMemoryConfig | None:
    """The options of an engine, or `None` if it is not enabled."""
    if not hasattr(server_args, ATTRIBUTE):  # a framework made it: only the environment can enable the plugin
        return RLMemoryConfig.from_environment()
    options = getattr(server_args, ATTRIBUTE)
    return None if options is None else RLMemoryConfig.from_dict(options)


def launching() -> bool:
    """Whether this process is starting an enabled engine, or is one of its processes."""
    return CHILD_VARIABLE in os.environ or RLMemoryConfig.from_environment() is not None
