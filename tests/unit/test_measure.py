"""Measurements side by side: which GPUs they get, what runs alone, what the time limits end."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path

import psutil
import pytest

from integration import measure
from integration.measure import Host
from integration.measurements import MEASUREMENTS, Measurement
from integration.waiting import wait_until

#: Notes its GPUs and when it ran.
NOTES = """
import json, os, pathlib, sys, time
out, seconds = pathlib.Path(sys.argv[1]), float(sys.argv[2])
begun = time.monotonic()
time.sleep(seconds)
out.write_text(json.dumps([os.environ["CUDA_VISIBLE_DEVICES"].split(","), begun, time.monotonic()]))
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A folder in which a test puts modules that measurements run."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "notes.py").write_text(NOTES)
    return tmp_path


def one(name: str, gpus: int = 1, *, sleep_s: float = 0.3, seconds: int = 60, alone: bool = False) -> Measurement:
    return Measurement(name, "vllm", gpus, seconds, ("notes", "{out}", str(sleep_s)), alone)


def host_of(folder: Path, gpus: str = "0 1 2", seconds: float = 600, sources: Path | None = None) -> Host:
    return Host(gpus.split(), {"vllm": sys.executable}, folder, sources, seconds)


def noted(folder: Path, name: str) -> tuple[set[str], float, float]:
    gpus, begun, ended = json.loads((folder / f"{name}.json").read_text())
    return set(gpus), begun, ended


def meet(first: tuple[set[str], float, float], second: tuple[set[str], float, float]) -> bool:
    return first[1] < second[2] and second[1] < first[2]


def outcomes(host: Host) -> dict[str, str]:
    return {outcome.name: outcome.outcome for outcome in host.outcomes}


def test_what_runs_at_a_time_shares_no_gpu(module):
    host = host_of(module)
    names = "abcdef"
    host.run([one(name, 1 + number % 2) for number, name in enumerate(names)])
    assert outcomes(host) == dict.fromkeys(names, "ok")
    runs = {name: noted(module, name) for name in names}
    assert [len(runs[name][0]) for name in names] == [1, 2, 1, 2, 1, 2]
    pairs = [(first, second) for first in names for second in names if first < second]
    assert not [pair for pair in pairs if meet(*(runs[name] for name in pair)) and runs[pair[0]][0] & runs[pair[1]][0]]
    assert {gpu for found in runs.values() for gpu in found[0]} == {"0", "1", "2"}


def test_what_others_would_disturb_runs_alone(module):
    host = host_of(module)
    host.run([one("before", sleep_s=1), one("quiet", alone=True), one("after")])
    runs = {name: noted(module, name) for name in ("before", "quiet", "after")}
    assert not meet(runs["before"], runs["quiet"])
    assert not meet(runs["quiet"], runs["after"])


def test_one_that_needs_more_gpus_is_not_passed_for_ever(module):
    host = host_of(module, "0 1")
    host.run([one("first", sleep_s=1), one("both", 2), one("last")])
    assert noted(module, "both")[1] < noted(module, "last")[1]


def test_one_that_takes_too_long_ends_with_its_server_and_leaves_its_gpus(module):
    server = f"""
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], process_group=0)
pathlib.Path({str(module)!r}, "pid").write_text(str(child.pid))
time.sleep(600)
"""
    (module / "serves.py").write_text(server)
    host = host_of(module, "0")
    host.run([Measurement("slow", "vllm", 1, 5, ("serves",)), one("next")])
    assert outcomes(host) == {"slow": "too long", "next": "ok"}
    pid = int((module / "pid").read_text())
    wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie", "the server has ended")


def test_a_failure_is_told_and_the_rest_runs(module):
    (module / "fails.py").write_text("raise SystemExit('no such model')")
    host = host_of(module)
    host.run([Measurement("bad", "vllm", 1, 60, ("fails",)), one("good")])
    assert outcomes(host) == {"bad": "failed", "good": "ok"}
    assert "no such model" in (module / "bad.log").read_text()


def test_what_cannot_begin_in_time_is_left_out(module):
    host = host_of(module, seconds=measure.LEAST_S - 1)
    host.run([one("late")])
    assert outcomes(host) == {"late": "left out"}
    assert not (module / "late.json").exists()


def test_what_this_host_cannot_run_is_left_out(module):
    host = host_of(module, "0")
    host.run(
        [
            one("pair", 2),
            Measurement("other", "sglang", 1, 60, ("notes", "{out}", "0")),
            Measurement("tests", "vllm", 1, 60, ("notes", "{out}", "{sources}")),
            one("fits"),
        ]
    )
    assert outcomes(host) == {"pair": "left out", "other": "left out", "tests": "left out", "fits": "ok"}


def test_a_former_run_leaves_no_records(module):
    (module / "again.json").write_text("of a former run")
    (module / "fails.py").write_text("raise SystemExit(1)")
    host_of(module).run([Measurement("again", "vllm", 1, 60, ("fails",))])
    assert not (module / "again.json").exists()


def test_an_interrupt_ends_what_runs(module, monkeypatch):
    host = host_of(module)
    pids: list[int] = []

    def interrupted(seconds: float) -> None:
        pids.extend(child.pid for child in psutil.Process().children())
        raise KeyboardInterrupt

    monkeypatch.setattr(measure.time, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        host.run([one("long", sleep_s=600)])
    monkeypatch.undo()
    assert pids
    assert not [pid for pid in pids if psutil.pid_exists(pid) and "notes" in " ".join(psutil.Process(pid).cmdline())]


def test_the_names_of_the_list_are_those_of_files_and_its_places_are_known():
    names = [measurement.name for measurement in MEASUREMENTS]
    assert len(set(names)) == len(names)
    for measurement in MEASUREMENTS:
        assert re.fullmatch(r"[\w.-]+", measurement.name)
        assert set(re.findall(r"{(\w+)}", " ".join(measurement.words))) <= {"out", "folder", "sources"}
        assert "{out}" in measurement.words


def test_every_option_of_the_list_is_one_of_its_module(monkeypatch, tmp_path):
    """The parsers themselves say whether they take the words; nothing runs."""
    pytest.importorskip("torch")
    import argparse
    import importlib

    class Parsed(Exception):
        pass

    parse = argparse.ArgumentParser.parse_args

    def parsed(parser, *arguments):
        parse(parser, *arguments)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)
    for measurement in MEASUREMENTS:
        name, *words = (
            word.format(out=tmp_path / "o.json", folder=tmp_path, sources=tmp_path) for word in measurement.words
        )
        if name == "pytest":
            continue
        module = importlib.import_module(f"{name}.__main__" if Path(*name.split(".")).is_dir() else name)
        monkeypatch.setattr(sys, "argv", [name, *words])
        with pytest.raises(Parsed):
            module.main()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--python", f"vllm={sys.executable}", "--only", "nonesuch"], "no measurement's name has any of nonesuch"),
        (["--python", "python"], "'python' is not vllm=PATH or sglang=PATH"),
        (["--python", "trt=python"], "'trt=python' is not"),
        (["--python", "vllm="], "'vllm=' is not"),
        (["--python", "vllm=/no/python"], "'/no/python' is no program"),
        ([], "--python"),
    ],
)
def test_words_that_name_nothing_are_refused(words, says, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["measure", "--seconds", "100", "--out", str(tmp_path / "out"), *words])
    with pytest.raises(SystemExit) as refusal:
        measure.main()
    assert refusal.value.code == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("only", "expected"),
    [([], "ab1 ab2 b"), (["--only", "b"], "ab1 ab2 b"), (["--only", "b2", "ab"], "ab2 ab1")],
    ids=["all", "once", "in their order"],
)
def test_what_is_named_runs_in_that_order(only, expected, monkeypatch, tmp_path):
    known = [Measurement(name, "vllm", 1, 60, ("none",)) for name in ("ab1", "ab2", "b")]
    monkeypatch.setattr(measure, "MEASUREMENTS", known)
    words = ["--seconds", "600", "--out", str(tmp_path), "--python", f"vllm={sys.executable}"]
    monkeypatch.setattr(sys, "argv", ["measure", *words, *only])
    assert [one.name for one in measure._parse()[1]] == expected.split()


def test_the_records_name_the_commit(module, monkeypatch):
    monkeypatch.delenv("GIT_COMMIT", raising=False)
    (module / "says.py").write_text("import os; print(os.environ['GIT_COMMIT'])")
    monkeypatch.setattr(measure, "commit", lambda: "abc1234")
    monkeypatch.setattr(measure, "MEASUREMENTS", [Measurement("says", "vllm", 1, 60, ("says",))])
    words = ["--seconds", "600", "--out", str(module / "out"), "--python", f"vllm={sys.executable}"]
    monkeypatch.setattr(sys, "argv", ["measure", *words])
    former = signal.getsignal(signal.SIGTERM)
    try:
        assert measure.main() == 0
    finally:
        signal.signal(signal.SIGTERM, former)
        os.environ.pop("GIT_COMMIT", None)
    assert (module / "out/says.log").read_text() == "abc1234\n"
