"""Helpers of the benchmarks: run each subject in a process of its own, and describe its run in the records."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import psutil

from tests.run_report import command_of


def gpu_name() -> str:
    import pynvml

    pynvml.nvmlInit()
    return str(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0)))


def engine_version(engine: str) -> str:
    """The version of an installed engine or of its CPU build.

    Raises:
        PackageNotFoundError: the engine is not installed.
    """
    try:
        return version(engine)
    except PackageNotFoundError:
        return version(f"{engine}-cpu")


def described(
    module: str,
    engine: str,
    model: str,
    subject: str,
    commit: str,
    *,
    gpu: str | None = None,
    words: Sequence[str] | None = None,
) -> dict[str, Any]:
    """What all records of one run have in common.

    Args:
        module: The benchmark's module in `integration`.
        engine: The engine's name, or `none`.
        gpu: The GPU's name; by default that of GPU 0.
        words: The command's arguments; by default those of this process.
    """
    import torch

    return {
        "engine": engine,
        "engine_version": "" if engine == "none" else engine_version(engine),
        "torch": torch.__version__,
        "gpu": gpu_name() if gpu is None else gpu,
        "model": model,
        "subject": subject,
        "commit": commit,
        "command": command_of(f"integration.{module}", words),
    }


def run_bounded(command: list[str], timeout_s: float, environment: Mapping[str, str] | None = None) -> None:
    """Run a subject and kill all its processes at the end, whose GPU memory the next subject needs.

    Raises:
        subprocess.SubprocessError: the subject failed, or took longer than `timeout_s`.
    """
    process = subprocess.Popen(command, process_group=0, env=environment)
    try:
        code = process.wait(timeout_s)
    finally:
        kill_all(process)
    if code != 0:
        raise subprocess.CalledProcessError(code, command)


def kill_all(process: subprocess.Popen[Any]) -> None:
    """Kill a process, its group and its children, and wait until they are gone.

    Args:
        process: The leader of its group. If it has ended, only its group is left to be found.
    """
    children: list[psutil.Process] = []
    if process.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):  # an engine's server has a process group of its own
            children = psutil.Process(process.pid).children(recursive=True)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    process.kill()
    process.wait()
    with contextlib.suppress(ProcessLookupError):
        for _ in range(100):  # zombies that nobody reaps may stay
            os.killpg(process.pid, signal.SIGKILL)
            time.sleep(0.1)


def add_commit(parser: argparse.ArgumentParser) -> None:
    """The option with the commit that records name."""
    parser.add_argument("--commit", default=os.environ.get("GIT_COMMIT", "unknown"), help="commit of this repository")


def succeeds(command: list[str], timeout_s: float, environment: Mapping[str, str] | None = None) -> bool:
    """Run a subject as `run_bounded` does; a failure is printed."""
    try:
        run_bounded(command, timeout_s, environment)
    except subprocess.SubprocessError as error:
        print(error, file=sys.stderr, flush=True)
        return False
    return True
