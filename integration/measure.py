"""Run the measurements of the documentation's records on the GPUs of one host, side by side, in a bounded time.

    python -m integration.measure --seconds 1500 --out FOLDER --python vllm=PATH --python sglang=PATH

`integration.measurements` lists them. They start in that order, or in that of `--only`, each as soon as enough GPUs are
free; what other work would disturb runs alone. Each has a time limit, a log, and a new file of records, which has what
was measured so far. What cannot begin before the time is over is named. The exit code is 1 if any failed, took too long
or was left out.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from integration.engines.base import REPOSITORY
from integration.measurements import MEASUREMENTS, Measurement
from integration.subjects import kill_all
from tests.run_report import commit

POLL_S = 0.1
LEAST_S = 60  # less is not worth a start


class Running(NamedTuple):
    measurement: Measurement
    gpus: list[str]
    process: subprocess.Popen[bytes]
    begun: float
    ends: float


class Outcome(NamedTuple):
    """How a measurement ended: `ok`, `failed`, `too long` or `left out`."""

    name: str
    outcome: str
    seconds: float


class Host:
    """The GPUs of a host and what runs on them.

    Args:
        gpus: As CUDA_VISIBLE_DEVICES names them.
        pythons: The Python of each engine.
        out: The folder of logs and records.
        sources: The folder of the engines' sources, `vllm` and `sglang`.
        seconds: After so long nothing runs any more.
    """

    def __init__(
        self, gpus: Sequence[str], pythons: Mapping[str, str], out: Path, sources: Path | None, seconds: float
    ) -> None:
        self._gpus, self._pythons, self._out, self._sources = list(gpus), pythons, out, sources
        self._running: list[Running] = []
        self._end = time.monotonic() + seconds
        self.outcomes: list[Outcome] = []

    def run(self, measurements: Sequence[Measurement]) -> None:
        """Run all, and return once the last has ended."""
        waiting = [one for one in measurements if self._can(one)]
        try:
            while waiting or self._running:
                self._reap()
                if waiting and self._end - time.monotonic() < LEAST_S:
                    for one in waiting:
                        self._note(one.name, "left out", 0.0)
                    waiting.clear()
                elif waiting and self._fits(waiting[0]):
                    self._start(waiting.pop(0))
                else:
                    time.sleep(POLL_S)
        finally:
            for running in self._running:
                kill_all(running.process)

    def _can(self, measurement: Measurement) -> bool:
        lacks_sources = self._sources is None and any("{sources}" in word for word in measurement.words)
        can = measurement.engine in self._pythons and measurement.gpus <= len(self._gpus) and not lacks_sources
        if not can:
            self._note(measurement.name, "left out", 0.0)
        return can

    @property
    def _free(self) -> list[str]:
        return [gpu for gpu in self._gpus if not any(gpu in one.gpus for one in self._running)]

    def _fits(self, measurement: Measurement) -> bool:
        disturbs = bool(self._running) and (measurement.alone or any(one.measurement.alone for one in self._running))
        return measurement.gpus <= len(self._free) and not disturbs

    def _start(self, measurement: Measurement) -> None:
        gpus = self._free[: measurement.gpus]
        now = time.monotonic()
        self._record(measurement).unlink(missing_ok=True)
        print(f"{time.strftime('%T')} {measurement.name} begins on {','.join(gpus)}", flush=True)
        with (self._out / f"{measurement.name}.log").open("wb") as log:
            process = subprocess.Popen(
                [self._pythons[measurement.engine], "-m", *self._words(measurement)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(gpus)},
                cwd=REPOSITORY,
                process_group=0,
            )
        ends = min(now + measurement.seconds, self._end)
        self._running.append(Running(measurement, gpus, process, now, ends))

    def _record(self, measurement: Measurement) -> Path:
        return self._out / f"{measurement.name}.json"

    def _words(self, measurement: Measurement) -> list[str]:
        places = {"out": self._record(measurement), "folder": self._out, "sources": self._sources}
        return [word.format(**places) for word in measurement.words]

    def _reap(self) -> None:
        for one in list(self._running):
            code, now = one.process.poll(), time.monotonic()
            if code is None and now < one.ends:
                continue
            kill_all(one.process)
            self._running.remove(one)
            outcome = "too long" if code is None else "failed" if code else "ok"
            self._note(one.measurement.name, outcome, now - one.begun)

    def _note(self, name: str, outcome: str, seconds: float) -> None:
        self.outcomes.append(Outcome(name, outcome, seconds))
        print(f"{time.strftime('%T')} {name}: {outcome}, {seconds:.0f} s", flush=True)


def main() -> int:
    arguments, chosen = _parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an exception, which ends what runs
    os.environ.setdefault("GIT_COMMIT", commit() or "unknown")  # for the records
    out = arguments.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    sources = arguments.sources and arguments.sources.absolute()
    host = Host(arguments.gpus.split(","), dict(arguments.python), out, sources, arguments.seconds)
    host.run(chosen)
    return int(any(one.outcome != "ok" for one in host.outcomes))


def _parse() -> tuple[argparse.Namespace, list[Measurement]]:
    parser = argparse.ArgumentParser(
        prog="python -m integration.measure",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--gpus", default="0", help="as in CUDA_VISIBLE_DEVICES")
    parser.add_argument("--seconds", type=float, required=True, help="after so long nothing runs any more")
    parser.add_argument(
        "--python",
        action="append",
        required=True,
        type=_named,
        metavar="ENGINE=PATH",
        help="the Python that has the engine; may be given for both engines",
    )
    parser.add_argument("--sources", type=Path, help="folder of vllm and sglang, the engines' sources, for their tests")
    parser.add_argument("--only", nargs="+", default=[""], help="parts of the names of what to run, in their order")
    parser.add_argument("--out", type=Path, required=True, help="folder for logs and records")
    arguments = parser.parse_args()
    chosen = list(dict.fromkeys(one for part in arguments.only for one in MEASUREMENTS if part in one.name))
    if not chosen:
        names = ", ".join(one.name for one in MEASUREMENTS)
        parser.error(f"no measurement's name has any of {', '.join(arguments.only)}. The names are {names}.")
    return arguments, chosen


def _named(word: str) -> tuple[str, str]:
    engine, equals, path = word.partition("=")
    if engine not in {one.engine for one in MEASUREMENTS} or not equals or not path:
        raise argparse.ArgumentTypeError(f"{word!r} is not vllm=PATH or sglang=PATH")
    program = shutil.which(path)
    if program is None:
        raise argparse.ArgumentTypeError(f"{path!r} is no program that can be run")
    return engine, str(Path(program).absolute())  # not resolved: a link is what makes an environment


if __name__ == "__main__":
    sys.exit(main())
