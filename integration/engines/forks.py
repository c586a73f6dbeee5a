"""Servers as forks of one process that has imported their engine: the imports take most of a small engine's start.

The process reads requests from its input, a JSON object in each line, and answers each in a line: `{"start": …}` with
the id of a new process, `{"poll": ID}` with that process's exit code, or null while it runs. It ends with its input. It
runs no thread and no PyTorch of its own, so that nothing is lost in its forks.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn


class Forks:
    """The process of which servers are forks.

    Args:
        modules: What it imports; those that this version of the engine does not have are left out.
        environment: Its variables. What is read at an import must stand here.
    """

    def __init__(self, modules: Sequence[str], environment: dict[str, str]) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import main; main()", *modules],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        atexit.register(self.close)

    def start(self, command: Sequence[str], environment: dict[str, str], log: Path) -> Forked:
        """As `subprocess.Popen` with `python -m MODULE ARGUMENT…`, in a process group of its own."""
        request = {"command": list(command), "environment": environment, "log": str(log)}
        return Forked(self, self.ask(start=request))

    def ask(self, **request: Any) -> Any:
        pipes = self._process.stdin, self._process.stdout
        assert pipes[0] is not None and pipes[1] is not None
        with self._lock:
            pipes[0].write(json.dumps(request) + "\n")
            pipes[0].flush()
            return json.loads(pipes[1].readline())

    def close(self) -> None:
        """End the process. Its forks stay."""
        atexit.unregister(self.close)
        self._process.communicate()


class Forked:
    """What `Server` needs of a `Popen`."""

    def __init__(self, forks: Forks, pid: int) -> None:
        self._forks = forks
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._forks.ask(poll=self.pid)
        return self.returncode

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill_group(self) -> None:
        """Kill the process, and what it has started and left in its process group."""
        with contextlib.suppress(ProcessLookupError):  # the group is empty, or the process has not made it yet
            os.killpg(self.pid, signal.SIGKILL)


def main() -> NoReturn:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # engines print while they are imported
    before = dict(os.environ)
    for module in sys.argv[1:]:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a fork's collections need not look at, and copy, what its parent has imported
    imported = {name: value for name, value in os.environ.items() if before.get(name) != value}
    codes: dict[int, int] = {}

    def reap(*_: object) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                codes[ended[0]] = os.waitstatus_to_exitcode(ended[1])

    signal.signal(signal.SIGCHLD, reap)
    for line in iter(sys.stdin.readline, ""):
        request = json.loads(line)
        if "poll" in request:
            answer = codes.get(request["poll"])
        else:
            answer = os.fork()
            if not answer:
                answers.close()
                _become(imported, **request["start"])
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)  # nothing is left to do, and some modules complain at an interpreter's end


def _become(imported: dict[str, str], command: list[str], environment: dict[str, str], log: str) -> NoReturn:
    """Be the new process, from its first line to its end. `imported` are the variables that the imports have set."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setpgid(0, 0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.execvpe = _run  # type: ignore[assignment]  # `rl-memory serve` ends with it
    _run(command[0], command, {**imported, **environment})


def _run(_: str, command: list[str], environment: dict[str, str]) -> NoReturn:
    """Run `python -m MODULE ARGUMENT…` in this process."""
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path not in sys.path]
    importlib.invalidate_caches()
    tempfile.tempdir = None  # an import may have looked for it, by other variables
    if torch := sys.modules.get("torch"):  # OpenMP has read its variables before the fork
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    _, _, module, *arguments = command
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    sys.exit()
