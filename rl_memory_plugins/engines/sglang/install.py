"""The composition root: all hooks of an enabled engine, and the processes in which they are put in.

SGLang starts its schedulers by functions of this package. A child process finds these functions by their names. They
put in the hooks before the engine's classes are used, whether or not SGLang loads plugins in the child process.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from typing import Any

from rl_memory_plugins.engines.sglang import (
    client,
    native_calls,
    remote_instance,
    scheduler,
    server,
    tp_memory_balance,
    worker,
)
from rl_memory_plugins.engines.sglang.hooks import ENGINE, hooks
from rl_memory_plugins.engines.sglang.modes import RAY, refuse_modes
from rl_memory_plugins.engines.sglang.nccl_suspend import use_suspendable_memory
from rl_memory_plugins.engines.sglang.options import CHILD_VARIABLE, config_of, disabled, launching, stay_out
from rl_memory_plugins.errors import UnsupportedError, unsupported
from rl_memory_plugins.hooking import Hooks


def install() -> None:
    """Put in the hooks of all roles. Each acts only on engines whose configuration enables it."""
    roles = (worker, scheduler, native_calls, remote_instance, client, server, tp_memory_balance)
    hooks.install(_hook_launch, *(role.install for role in roles))


def run_data_parallel_controller_process(*args: Any, **kwargs: Any) -> Any:
    """Replaces SGLang's function, which loads no plugins before 0.5.22. The child process finds it by this name."""
    from sglang.srt.managers import data_parallel_controller

    if launching():
        install()
    return data_parallel_controller.run_data_parallel_controller_process(*args, **kwargs)


def run_scheduler_process(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Put in the hooks in a scheduler's process, then run SGLang's own function."""
    install()
    return original(*args, **kwargs)


def _hook_launch(hooks: Hooks) -> None:
    hooks.require(f"{ENGINE}:Engine.server_args_class")
    hooks.require(f"{ENGINE}:run_data_parallel_controller_process")
    hooks.wrap(f"{ENGINE}:Engine._launch_subprocesses", _launch_subprocesses)
    from sglang.srt.entrypoints import engine

    # `hooks.wrap` would keep the name of SGLang's function, by which the child process then finds SGLang's own.
    engine.run_data_parallel_controller_process = run_data_parallel_controller_process


def _launch_subprocesses(original: Callable[..., Any]) -> Callable[..., Any]:
    def launch(cls: Any, server_args: Any, *args: Any, **kwargs: Any) -> Any:
        config = config_of(server_args)
        if config is None:
            return original(cls, server_args, *args, **kwargs)
        try:
            if cls.__name__ == "RayEngine":
                raise unsupported(*RAY)
            refuse_modes(server_args)
            use_suspendable_memory(config)
        except UnsupportedError as error:
            stay_out(server_args, error)
            with disabled():
                return original(cls, server_args, *args, **kwargs)
        os.environ[CHILD_VARIABLE] = json.dumps(config.to_dict())
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")  # registrations do not survive an unmapped address
        run_scheduler = kwargs["run_scheduler_process_func"]
        kwargs["run_scheduler_process_func"] = functools.partial(run_scheduler_process, run_scheduler)
        try:
            return original(cls, server_args, *args, **kwargs)
        finally:
            os.environ.pop(CHILD_VARIABLE, None)

    return launch
