"""Run an engine's own tests twice, natively and with the package on, and compare. See `integration.upstream`."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from integration.upstream import comparison, hub, sources
from integration.upstream.environment import DEFAULTS_VARIABLE, environment
from integration.upstream.run import SUBJECTS, Outcomes, Setting, former, run
from tests.run_report import ENGINES, command_of, commit, gpus, version_of

DEFAULT_FOLDER = Path(".upstream")


def main() -> int:
    arguments = _parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the tests that run are killed too
    folder = arguments.folder.resolve()
    root = (arguments.source or sources.vllm_tests(folder)).resolve()
    find = sources.vllm_files if arguments.engine == "vllm" else sources.sglang_files
    files = [file for file in find(root) if any(part in file.path for part in arguments.only)]
    on_gpu = bool(gpus())
    variables = environment(arguments.engine, on_gpu=on_gpu, defaults=arguments.defaults, root=root)
    variables["HF_HOME"] = str(
        hub.make(folder / f"models-{'gpu' if on_gpu else 'cpu'}", small=not on_gpu and arguments.engine == "vllm")
    )
    if arguments.engine == "vllm":
        variables["VLLM_ASSETS_CACHE"] = str(hub.make_picture(folder / "assets"))
    setting = Setting(root, folder / "logs", variables, arguments.file_seconds)
    found: dict[str, Outcomes] = {subject: {} for subject in SUBJECTS}
    tests: list[comparison.Test] = []
    for file in files:
        for subject in SUBJECTS:
            if subject in arguments.subjects:
                print(f"{subject}: {file.path}", flush=True)
                found[subject] |= run(subject, file, setting)
            else:
                found[subject] |= former(subject, file, setting)
        # After each file, so that a run that is killed leaves the comparison of the files before.
        tests = comparison.compare(arguments.engine, found["native"], found["plugin"])
        if arguments.out:
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(json.dumps(_record(arguments, tests), indent=1) + "\n")
    comparison.show(tests)
    return int(any(map(comparison.is_unexpected, tests)) or not any(test["plugin"] == "passed" for test in tests))


def _record(arguments: argparse.Namespace, tests: list[comparison.Test]) -> dict[str, Any]:
    return {
        "engine": arguments.engine,
        "engine_version": version_of(*ENGINES[arguments.engine]),
        "complete": not any(arguments.only),
        "package_version": version("rl_memory_plugins"),
        "device": gpus() or ["cpu"],
        "python": platform.python_version(),
        "commit": commit(),
        "command": command_of("integration.upstream"),
        "score": comparison.score(tests),
        "tests": tests,
    }


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m integration.upstream", description=__doc__)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("--source", type=Path, help="a checkout of the engine; vLLM's tests are downloaded without it")
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER, help="tests, models and logs")
    parser.add_argument("--only", nargs="+", default=[""], help="parts of the paths of the files to run")
    parser.add_argument(
        "--subjects",
        nargs="*",
        choices=SUBJECTS,
        default=list(SUBJECTS),
        help="run these alone; the outcomes of the others are those of an earlier run with this folder",
    )
    parser.add_argument(
        "--defaults",
        type=json.loads,
        default=json.loads(os.environ.get(DEFAULTS_VARIABLE, "{}")),
        help=f"JSON: other defaults of SGLang's arguments; of the environment {DEFAULTS_VARIABLE}, if it is set",
    )
    parser.add_argument("--file-seconds", type=float, default=1800, help="kill a file of tests after so long")
    parser.add_argument("--out", type=Path, help="where the record is written")
    arguments = parser.parse_args()
    if arguments.engine == "sglang" and not arguments.source:
        parser.error("SGLang's tests are in its repository alone: --source names a checkout")
    return arguments


if __name__ == "__main__":
    raise SystemExit(main())
