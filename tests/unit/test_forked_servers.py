"""Processes that are forks of one that has imported their modules."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from integration.engines.forks import Forked, Forks
from integration.engines.vllm import Vllm
from integration.waiting import wait_until

IMPORTED = """
    import os, tempfile
    tempfile.gettempdir()
    print("imported", flush=True)
    os.environ["SET_BY_THE_IMPORT"] = "1"
"""
SERVER = """
    import os, sys, tempfile, time
    import imported
    variables = [os.environ.get(name) for name in ("OWN", "SET_BY_THE_IMPORT", "FORMER")]
    variables.append(tempfile.gettempdir() == os.environ["TMPDIR"])
    print(sys.argv[1:], *variables, __name__, flush=True)
    if sys.argv[1] == "again":
        os.execvpe(sys.executable, [sys.executable, "-m", "server", "once"], {**os.environ, "OWN": "2"})
    if sys.argv[1] == "leave":
        print(os.spawnl(os.P_NOWAIT, "/bin/sleep", "sleep", "600"), flush=True)
    while sys.argv[1] == "stay":
        time.sleep(0.01)
    sys.exit(3)
"""


def write(path: Path, text: str) -> None:
    path.write_text("\n".join(line.removeprefix("    ") for line in text.splitlines()))


@pytest.fixture
def forks(tmp_path: Path) -> Iterator[Forks]:
    write(tmp_path / "imported.py", IMPORTED)
    write(tmp_path / "server.py", SERVER)
    found = Forks(["imported", "no_such_module"], {**environment(tmp_path), "FORMER": "1", "TMPDIR": str(tmp_path)})
    yield found
    found.close()


def environment(folder: Path) -> dict[str, str]:
    path = os.pathsep.join([str(folder), *sys.path])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def start(forks: Forks, folder: Path, name: str, *arguments: str) -> tuple[Forked, Path]:
    log = folder / f"{name}.log"
    own = folder / "own"
    own.mkdir(exist_ok=True)
    variables = {**environment(folder), "OWN": "1", "TMPDIR": str(own)}
    return forks.start([sys.executable, "-m", "server", *arguments], variables, log), log


def test_each_has_its_arguments_and_variables_and_nothing_is_imported_again(forks: Forks, tmp_path: Path) -> None:
    first, log = start(forks, tmp_path, "first", "--name", "a b")
    second, other = start(forks, tmp_path, "second", "again")
    for process in (first, second):
        wait_until(lambda process=process: process.poll() is not None, "the process ends")  # type: ignore[misc]
        assert process.returncode == 3
    assert log.read_text() == "['--name', 'a b'] 1 1 None True __main__\n"
    assert other.read_text() == "['again'] 1 1 None True __main__\n['once'] 2 1 None True __main__\n"


def test_a_signal_ends_one_alone(forks: Forks, tmp_path: Path) -> None:
    ends, _ = start(forks, tmp_path, "ends", "stay")
    stays, log = start(forks, tmp_path, "stays", "stay")
    wait_until(log.exists, "it runs")
    ends.send_signal(signal.SIGTERM)
    wait_until(lambda: ends.poll() is not None, "the process ends")
    assert ends.returncode == -signal.SIGTERM
    assert stays.poll() is None and os.getpgid(stays.pid) == stays.pid
    stays.send_signal(signal.SIGKILL)
    wait_until(lambda: stays.poll() is not None, "the process ends")
    stays.send_signal(signal.SIGTERM)  # nobody is there


def test_what_an_ended_process_has_left_in_its_group_is_killed(forks: Forks, tmp_path: Path) -> None:
    process, log = start(forks, tmp_path, "leaves", "leave")
    wait_until(lambda: process.poll() is not None, "the process ends")
    left = psutil.Process(int(log.read_text().splitlines()[-1]))
    assert left.is_running()
    process.kill_group()
    wait_until(lambda: not left.is_running() or left.status() == psutil.STATUS_ZOMBIE, "nothing is left")
    process.kill_group()  # nobody is there


class Toy(Vllm):
    name = "toy"
    imports = ("json",)
    import_folders = ()


def test_servers_with_plugins_of_their_own_are_forks_of_one_process(tmp_path: Path) -> None:
    sites = [tmp_path / name for name in ("first", "second")]
    told = []
    for site in sites:
        site.mkdir()
        (site / "told.py").write_text(f"import sys\nprint(*[path for path in sys.path if {str(tmp_path)!r} in path])")
        variables = {**environment(site), "PYTHONPATH": str(site)}
        forks, log = Toy().forks(variables), site / "log"
        told.append(forks)
        process = forks.start([sys.executable, "-m", "told"], variables, log)
        wait_until(lambda process=process: process.poll() is not None, "the process ends")  # type: ignore[misc]
        assert log.read_text() == f"{site}\n"  # no plugin of another server is there
    assert told[0] is told[1]
    told[0].close()
