"""The composition root: all hooks of an enabled engine, and the symbols that are replaced in this process."""

from __future__ import annotations

from rl_memory_plugins.engines.vllm import adapters, client, core, first_load, server, worker
from rl_memory_plugins.engines.vllm.hooks import hooks


def install() -> None:
    """Put in the hooks of all roles. Each acts only on engines whose configuration enables it."""
    hooks.install(*(role.install for role in (first_load, worker, adapters, core, client, server)))
