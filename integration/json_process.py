"""A child process that answers calls. Each call and each answer is a line of JSON on its standard input and output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rl_memory_plugins.errors import RLMemoryError, from_record


def serve(start: Callable[[], Mapping[str, Callable[..., Any]]]) -> None:
    """Answer calls by the functions that `start` returns, until the input ends. The first line says `ready`."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # other output must not mix with the answers
    calls = start()
    print(json.dumps({"answer": "ready"}), file=answers, flush=True)
    for line in sys.stdin:
        call = json.loads(line)
        try:
            answer = {"answer": calls[call.pop("call")](**call)}
        except RLMemoryError as error:
            answer = {"error": error.to_record()}
        print(json.dumps(answer), file=answers, flush=True)


class Child:
    """The process, as its parent sees it. The constructor waits until it is ready.

    Args:
        module: The module to run, which calls `serve`.
        words: The module's command-line arguments.
        environment: The environment; by default that of this process.
    """

    def __init__(self, module: str, *words: str, environment: Mapping[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[1],
            env=environment,
        )
        self._answer()

    def call(self, name: str, **arguments: Any) -> Any:
        """
        Raises:
            RLMemoryError: the error of the child process.
            RuntimeError: the child process has ended.
        """
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"call": name, **arguments}) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the child process has ended: {self.process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise from_record(answer["error"])
        return answer["answer"]

    def close(self, wait_s: float = 0.0) -> None:
        """End the input, and kill the process if it does not end within `wait_s` seconds."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(wait_s)
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
