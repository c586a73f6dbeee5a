"""Helpers of the benchmarks: run each subject in a process of its own, and name its GPU in the records."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping


def gpu_name() -> str:
    import pynvml

    pynvml.nvmlInit()
    return str(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0)))


def run_bounded(command: list[str], timeout_s: float, environment: Mapping[str, str] | None = None) -> None:
    """Run a subject; one that fails or hangs takes none of its processes' GPU memory into the next.

    Raises:
        subprocess.SubprocessError: it failed, or was not done in time.
    """
    process = subprocess.Popen(command, process_group=0, env=environment)
    try:
        code = process.wait(timeout_s)
    finally:
        process.kill()
        process.wait()
        with contextlib.suppress(ProcessLookupError):
            for _ in range(100):  # until all that it started is gone, but for what nobody reaps
                os.killpg(process.pid, signal.SIGKILL)
                time.sleep(0.1)
    if code != 0:
        raise subprocess.CalledProcessError(code, command)
