"""One subject: the tests of each file, in a process of its own, so that one that dies takes no other along."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from integration.upstream import outcomes
from integration.upstream.sources import TestedFile

REPOSITORY = Path(__file__).parents[2]
SUBJECTS: Mapping[str, Mapping[str, str]] = {
    "native": {},
    # The environment alone: no test and no command line has to know of the package.
    "plugin": {"RL_MEMORY": "1"},
}
TEST_SECONDS = 600
Outcomes = dict[str, tuple[str, str]]


def run(subject: str, root: Path, file: TestedFile, models: Path, logs: Path, seconds: float) -> Outcomes:
    """Run the tests of one file.

    Args:
        subject: Of `SUBJECTS`.
        root: The folder whose `tests` (or `test`) the file lies in.
        models: For `HF_HOME`.
        logs: A folder for pytest's output and the outcomes.
        seconds: After so long the file's process and its children are killed.

    Returns: The outcome and the reason of each test, by its id.
    """
    stem = logs / f"{subject}-{file.path.replace('/', '.')}"
    logs.mkdir(parents=True, exist_ok=True)
    written = stem.with_suffix(".jsonl")
    written.unlink(missing_ok=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RL_MEMORY")}
    environment |= {"HF_HOME": str(models), "HF_HUB_OFFLINE": "1", outcomes.VARIABLE: str(written)}
    # The tests' folder first: their package `tests` must be found before this repository's.
    environment["PYTHONPATH"] = os.pathsep.join([str(root), str(REPOSITORY), environment.get("PYTHONPATH", "")])
    environment |= SUBJECTS[subject]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "integration.upstream.outcomes", "-p", "no:cacheprovider"]
    command += ["--timeout", str(TEST_SECONDS), *(["-k", file.named] if file.named else []), file.path]
    with stem.with_suffix(".log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=root, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            print(f"  killed after {seconds:.0f} s", flush=True)
        finally:
            _kill_session(process.pid)
            process.wait()
    return outcomes.read(written)


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
