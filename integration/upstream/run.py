"""One subject: the tests of each file, in a process of its own, so that one that dies takes no other along."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from integration.upstream import outcomes
from integration.upstream.sources import OwnTests

SUBJECTS: Mapping[str, Mapping[str, str]] = {
    "native": {},
    # The environment alone: no test and no command line has to know of the package.
    "plugin": {"RL_MEMORY": "1"},
}
TEST_SECONDS = 600
Outcomes = dict[str, tuple[str, str]]


class Setting(NamedTuple):
    """What all files of a run have in common.

    Attributes:
        root: The folder whose `tests` (or `test`) the files lie in.
        logs: A folder for pytest's output and the outcomes.
        variables: Environment variables beside those of this process.
        seconds: After so long a file's process and its children are killed.
    """

    root: Path
    logs: Path
    variables: Mapping[str, str]
    seconds: float


def former(subject: str, file: OwnTests, setting: Setting) -> Outcomes:
    """The outcomes of an earlier run of this file with the same folder."""
    return outcomes.read(_stem(subject, file, setting).with_suffix(".jsonl"))


def _stem(subject: str, file: OwnTests, setting: Setting) -> Path:
    return setting.logs / f"{subject}-{file.path.replace('/', '.')}"


def run(subject: str, file: OwnTests, setting: Setting) -> Outcomes:
    """Run the tests of one file, for one of the `SUBJECTS`. After one in which the process ends, the others still run.

    Returns: The outcome and the reason of each test, by its id.
    """
    stem = _stem(subject, file, setting)
    setting.logs.mkdir(parents=True, exist_ok=True)
    written = stem.with_suffix(".jsonl")
    written.unlink(missing_ok=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RL_MEMORY")}
    environment |= {**setting.variables, outcomes.VARIABLE: str(written), **SUBJECTS[subject]}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "integration.upstream.outcomes", "-p", "no:cacheprovider"]
    # The log has the engines' output also where the process ends.
    command += ["-s", "--timeout", str(TEST_SECONDS), *(["-k", file.named] if file.named else []), file.path]
    ends = time.monotonic() + setting.seconds
    with stem.with_suffix(".log").open("w") as log:
        found: Outcomes = {}
        while True:
            process = subprocess.Popen(
                command,
                cwd=setting.root,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                process.wait(max(ends - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                print(f"  killed after {setting.seconds:.0f} s", flush=True)
                return outcomes.read(written)
            finally:
                _kill_session(process.pid)
                process.wait()
            before, found = found, outcomes.read(written)
            if not any(reason == outcomes.DIED for test, (_, reason) in found.items() if test not in before):
                return found


def _kill_session(leader: int) -> None:
    """Kill what a test file left behind, and wait: an engine that goes on would hold the memory of the next one's."""
    import psutil

    left = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == leader:
                process.kill()
                left.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    psutil.wait_procs(left, timeout=30)
