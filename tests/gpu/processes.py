"""Other processes for the tests: some hold GPU memory as a trainer does, others are run to see how they end,
and engines."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from integration.engines.base import Server

ROOT = Path(__file__).parents[2]


def run(code: str, timeout: float = 120, **environment: str) -> str:
    """Run Python code in a fresh process; returns its output, and fails if it does not end well."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=_environment(environment),
        check=False,
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


@contextmanager
def other_process(code: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Run Python code beside the test, from the line it prints first until the block ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=_environment(environment),
    )
    try:
        assert process.stdout is not None
        process.first_line = process.stdout.readline()
        assert process.first_line, "the other process ended before it was ready"
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def gpu_memory_taken(left_bytes: int, byte: int = 0xAB) -> Iterator[None]:
    """Another process holds all but `left_bytes` of the free GPU memory, written full of `byte`."""
    code = f"""
        import sys, torch
        held = []
        torch.zeros(1, device="cuda")
        while (free := torch.cuda.mem_get_info()[0] - {left_bytes}) > (16 << 20):
            step = min(free // (2 << 20) * (2 << 20), 8 << 30)
            held.append(torch.full((step,), {byte}, dtype=torch.uint8, device="cuda"))
        torch.cuda.synchronize()
        print("ready", flush=True)
        sys.stdin.read()
    """
    with other_process(code):
        yield


class MemoryTaker:
    """See `memory_taker`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def leave(self, left_bytes: int) -> None:
        """Take all of the free GPU memory but `left_bytes`, or what can be got of it."""
        self.begin_to_leave(left_bytes)
        self.wait()

    def begin_to_leave(self, left_bytes: int) -> None:
        """The same, without waiting for it."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{left_bytes}\n")
        self._process.stdin.flush()

    def wait(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline().strip() == "done"

    def give_back(self) -> None:
        """All that was taken."""
        self.leave(-1)


@contextmanager
def memory_taker() -> Iterator[MemoryTaker]:
    """Another process that takes GPU memory, in small pieces, when it is told to."""
    code = """
        import sys, torch
        held, step = [], 256 << 20
        def take(left):
            while torch.cuda.mem_get_info()[0] - left > step:
                try:
                    held.append(torch.empty(step, dtype=torch.uint8, device="cuda"))
                except torch.OutOfMemoryError:
                    return
        torch.zeros(1, device="cuda")
        print("ready", flush=True)
        for line in sys.stdin:
            if int(line) < 0:
                held.clear()
                torch.cuda.empty_cache()
            else:
                take(int(line))
            print("done", flush=True)
    """
    with other_process(code) as process:
        yield MemoryTaker(process)


@contextmanager
def together(*servers: AbstractContextManager[Server]) -> Iterator[list[Server]]:
    """Started and stopped at the same time: a start takes most of a minute, and hardly more where there are several."""
    with ThreadPoolExecutor(len(servers)) as pool:
        starts = [pool.submit(server.__enter__) for server in servers]
        try:
            yield [start.result() for start in starts]
        finally:
            wait(starts)  # one of them may have failed
            running = [server for server, start in zip(servers, starts, strict=True) if start.exception() is None]
            list(pool.map(lambda server: server.__exit__(None, None, None), running))


def _environment(extra: dict[str, str]) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "PYTHONFAULTHANDLER": "1", **extra}
