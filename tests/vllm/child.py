"""Processes with engines: forks of a process that has imported vLLM, which run functions or scripts of the tests."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import io
import multiprocessing as mp
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import psutil

from tests.aids.vllm_fork import vllm_fork

START_TIMEOUT_S = 600
CALL_TIMEOUT_S = 180

_CONTEXT = mp.get_context("forkserver")
# Imported once, by the process of which all children are forks: it takes vLLM some 8 s of a core.
_IMPORTED = (
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.models.qwen2",
)
_CONTEXT.set_forkserver_preload([*_IMPORTED, "tests.vllm.preloaded"])


class Child:
    """A process that makes an engine and keeps it; functions and results travel by pickle.

    Args:
        make: Gives an `LLM` or an `AsyncLLM`; may be a coroutine function.
        environment: Variables that are set before the engine is made.
        forked: The engine's own processes are forks, too, not new interpreters.
        wait: For the engine; else call `wait_ready` before the first function.
    """

    def __init__(
        self,
        make: Callable[..., Any],
        *arguments: Any,
        environment: dict[str, str],
        forked: bool = True,
        wait: bool = True,
    ) -> None:
        self._pipe, inside = _CONTEXT.Pipe()
        environment = {**os.environ, **environment}
        self._process = _CONTEXT.Process(target=_serve, args=(inside, environment, forked, make, arguments))
        self._process.start()
        inside.close()
        if wait:
            self.wait_ready()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        try:
            self._receive(timeout_s)
        except BaseException:
            _kill(self.processes())  # an engine that is still starting does not look at its pipe
            raise

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """`function(engine, *arguments)` over there."""
        self._pipe.send((function, arguments))
        return self._receive(CALL_TIMEOUT_S)

    def processes(self) -> list[psutil.Process]:
        """The child and all that it has started; none once it has ended."""
        try:
            root = psutil.Process(self._process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def stop(self) -> None:
        processes = self.processes()
        self._pipe.close()  # the child leaves its loop
        _, alive = psutil.wait_procs(processes, timeout=20)
        _kill(alive)
        self._process.join(10)

    def _receive(self, timeout_s: float) -> Any:
        if not self._pipe.poll(timeout_s):
            raise TimeoutError(f"the child did not answer within {timeout_s} s")
        result, error = self._pipe.recv()
        if error:
            raise AssertionError(f"in the child:\n{error}")
        return result


def run_script(script: str, arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    """Run a script in a process that has imported vLLM already. Its engines' processes are forks, too.

    Args:
        script: Python source.
        arguments: `sys.argv` from 1 on.
        environment: Variables that are set before the script runs.

    Returns:
        What the script printed. A failure is an AssertionError.
    """
    pipe, inside = _CONTEXT.Pipe()
    process = _CONTEXT.Process(
        target=_run_script, args=(inside, script, list(arguments), {**os.environ, **environment})
    )
    process.start()
    inside.close()
    try:
        if not pipe.poll(START_TIMEOUT_S):
            raise TimeoutError(f"the script did not end within {START_TIMEOUT_S} s")
        output, error = pipe.recv()
    finally:
        pipe.close()
        process.join(10)
        process.kill()
    if error:
        raise AssertionError(f"in the script:\n{output}{error}")
    return str(output)


def _run_script(pipe: Connection, script: str, arguments: list[str], environment: dict[str, str]) -> None:
    _become(environment, forked=True)
    sys.argv[1:] = arguments
    output, error = io.StringIO(), ""
    with contextlib.redirect_stdout(output):
        try:
            exec(compile(script, "script", "exec"), {"__name__": "__main__"})
        except BaseException:
            error = traceback.format_exc()
    pipe.send((output.getvalue(), error))
    os._exit(0)  # an engine's own threads may keep a process alive


def _become(environment: dict[str, str], *, forked: bool) -> None:
    """Set what a new process would have from its start."""
    os.environ.update(environment)
    if forked:
        import torch

        torch.set_num_threads(1)  # OpenMP has read its variables before the fork
        vllm_fork.register()


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _serve(
    pipe: Connection,
    environment: dict[str, str],
    forked: bool,
    make: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    _become(environment, forked=forked)
    loop = asyncio.new_event_loop()

    def run(function: Callable[..., Any], *arguments: Any) -> Any:
        if not inspect.iscoroutinefunction(function):
            return function(*arguments)
        return loop.run_until_complete(function(*arguments))

    try:
        kept = run(make, *arguments)
        pipe.send((None, ""))
        while True:
            function, arguments = pipe.recv()
            try:
                pipe.send((run(function, kept, *arguments), ""))
            except Exception:
                pipe.send((None, traceback.format_exc()))
    except EOFError:
        kept = getattr(kept, "llm_engine", kept)
        getattr(kept, "engine_core", kept).shutdown()
        os._exit(0)  # an engine's own threads may keep a process alive
    except BaseException:
        pipe.send((None, traceback.format_exc()))
        raise
