"""Runs checks, each within its deadline. No check ends or hangs the doctor."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from rl_memory_plugins.doctor.check import Check
from rl_memory_plugins.doctor.finding import Finding, failure, not_applicable
from rl_memory_plugins.doctor.machine import why_no_gpu

AT_ONCE = 4
"""Processes at a time. Each imports torch or an engine."""

_LAST_CHARACTERS = 600


def run(checks: Sequence[Check]) -> list[Finding]:
    """The findings of all checks, in their order."""
    turns = threading.Semaphore(min(AT_ONCE, os.cpu_count() or 1))
    found: list[Finding | None] = [None] * len(checks)

    def in_turn(position: int, check: Check) -> None:
        with turns:
            found[position] = run_one(check)

    threads = [
        threading.Thread(target=in_turn, args=(position, check), daemon=True)
        for position, check in enumerate(checks)
        if check.own_process
    ]
    for thread in threads:
        thread.start()
    for position, check in enumerate(checks):
        if not check.own_process:
            found[position] = run_one(check)
    for thread in threads:
        thread.join()  # a process has its deadline
    return [finding for finding in found if finding is not None]


def run_one(check: Check) -> Finding:
    """The finding of one check. An exception is a failure, and so is a deadline that passes."""
    missing = why_no_gpu() if check.needs_gpu else ""
    if missing:
        finding = not_applicable(missing)
    else:
        finding = in_own_process(check) if check.own_process else _in_thread(check)
    return msgspec.structs.replace(finding, name=check.name, docs=finding.docs or check.docs)


def attempt(check: Check) -> Finding:
    """Call the check here. An exception is a failure."""
    try:
        return check.examine()
    except Exception as error:
        return failure(f"the check raised {type(error).__name__}: {error}", "report it, if the message does not help")


def _in_thread(check: Check) -> Finding:
    found: list[Finding] = []
    thread = threading.Thread(target=lambda: found.append(attempt(check)), daemon=True)  # a hanging one is left behind
    thread.start()
    thread.join(check.deadline_s)
    return found[0] if found else _hangs(check)


def in_own_process(check: Check) -> Finding:
    """Run the check's function in a new interpreter. It is imported there by its name."""
    function = f"{check.examine.__module__}:{check.examine.__qualname__}"
    with tempfile.TemporaryDirectory(prefix="rl-memory-doctor-") as folder:
        answer, log = Path(folder, "answer"), Path(folder, "log")
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "rl_memory_plugins.doctor.child", function, str(answer)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
            try:
                code = process.wait(check.deadline_s)
            except subprocess.TimeoutExpired:
                return _hangs(check)
            finally:
                with suppress(ProcessLookupError):  # with its own children
                    os.killpg(process.pid, signal.SIGKILL)
                process.poll()
        if code == 0 and answer.exists():
            return msgspec.json.decode(answer.read_bytes(), type=Finding)
        said = log.read_text(errors="replace").strip()[-_LAST_CHARACTERS:]
        end = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return failure(
            f"the process of this check ended with {end}; its last words: {said or '(none)'}",
            "a call of the driver, of torch or of the engine failed: try it alone, and compare the versions above",
        )


def _hangs(check: Check) -> Finding:
    return failure(
        f"no result after {check.deadline_s:g} s: the check hangs",
        "look for a busy or broken device or file system; `dmesg` and `nvidia-smi` show some of them",
    )
