"""Try every way of updating every kind of weights on an engine, and record the outcomes.

    python -m integration.kinds vllm --only dense "Gemma 2"

Records of the file that this run does not repeat stay.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from integration.engines.base import REPOSITORY
from integration.kinds import table
from integration.kinds.ways import WAYS
from tests.run_report import ENGINES, commit, gpus, version_of


def main() -> int:
    arguments = _parse()
    from integration.kinds.preload import preload
    from integration.kinds.run import START_TIMEOUT_S, run

    preload(arguments.engine)
    out = arguments.out or _default(arguments.engine)
    about = {
        "engine": arguments.engine,
        "engine_version": version_of(*ENGINES[arguments.engine]),
        "device": ", ".join(dict.fromkeys(gpus())) or "cpu",
    }
    records: list[dict[str, Any]] = json.loads(out.read_text()) if out.exists() else []
    failures = 0
    for name in arguments.only:
        start = time.monotonic()
        logs = arguments.log_dir and arguments.log_dir / re.sub(r"\W", "_", f"{arguments.engine}-{name}")
        with tempfile.TemporaryDirectory() as folder:
            for found in run(
                arguments.engine,
                name,
                Path(folder),
                tuple(arguments.ways),
                logs=logs,
                start_timeout_s=arguments.start_timeout or START_TIMEOUT_S,
            ):
                command = f"python -m integration.kinds {arguments.engine} --only {shlex.quote(name)}"
                record = {**about, "kind": name, **found._asdict(), "commit": commit(), "command": command}
                records = [one for one in records if (one["kind"], one["way"]) != (name, found.way)] + [record]
                failures += found.outcome == "failed"
                print(f"{name:40} {found.way:10} {found.outcome:14} {found.reason}", flush=True)
        print(f"{name:40} took {time.monotonic() - start:.0f} s", flush=True)
        out.parent.mkdir(parents=True, exist_ok=True)
        order = list(table.KINDS)
        records.sort(key=lambda one: (order.index(one["kind"]), WAYS.index(one["way"])))
        out.write_text(json.dumps(records, indent=1) + "\n")
    return int(failures > 0)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m integration.kinds", description=__doc__)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("--only", nargs="+", choices=table.KINDS, default=list(table.KINDS), metavar="KIND")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY")
    parser.add_argument("--log-dir", type=Path, help="keep the engines' logs here, in a folder for each kind")
    parser.add_argument("--start-timeout", type=float, metavar="SECONDS", help="for one engine's start; 600")
    parser.add_argument("--out", type=Path, help="the file of the records; that of this engine in integration/results")
    return parser.parse_args()


def _default(engine: str) -> Path:
    device = "gpu" if gpus() else "cpu"
    return REPOSITORY / "integration" / "results" / f"kinds-{engine}-{version_of(*ENGINES[engine])}-{device}.json"


if __name__ == "__main__":
    sys.exit(main())
