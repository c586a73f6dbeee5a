"""Requests while the plugin prepares its host memory: whether they take longer than others.

    python -m integration.bench_preparation --engine vllm --model 7b --rounds 2 --out results.json

Three subjects: the plugin, which prepares host memory from the start on (`plugin`); the plugin, which obtains it at the
first sleep (`first_use`); the engine alone (`native`). The subjects run one after the other, each in a process of its
own, on an otherwise idle GPU. Every second round has them in the opposite order, because whatever runs first fills
caches. The records of each round have its number and the nine deciles. The script needs the engine and an NVIDIA GPU.

    request_start_s      a request of 256 tokens just after the start; `prepared_mib` says by how much the resident
                         memory grew meanwhile
    decode_start_tok_s   batches of 64 prompts and 128 tokens, right after these requests
    request_s            a request of 256 tokens, once no more memory becomes resident
    decode_tok_s         batches, right after these requests
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from integration import records
from integration.bench_gpu import PROMPTS, REQUESTS, seconds_of, wait_for_idle_gpus
from integration.gpu_subjects import ENGINES, host_held_mib
from integration.models import SHAPES, write_model
from integration.records import Records
from integration.subjects import add_commit, described, succeeds

TOKENS, BATCHES = 128, 5
OPTIONS: dict[str, Any] = {"plugin": {}, "first_use": {"prepare_host_memory": "first_use"}, "native": None}


def measure(subject: Any, found: Records) -> None:
    """Record requests and batches of a started subject, at once and after its host memory is prepared."""
    subject.generate(PROMPTS, TOKENS)
    _serve(subject, found, "_start")
    subject.settle()
    _serve(subject, found, "")


def _serve(subject: Any, found: Records, when: str) -> None:
    held = host_held_mib()
    seconds = [seconds_of(lambda: subject.generate([PROMPTS[0] * 64], 1)) for _ in range(REQUESTS)]
    grown = round(host_held_mib() - held)
    details = {"deciles": statistics.quantiles(seconds, n=10), "prepared_mib": grown}
    found.add(f"request{when}_s", seconds, "s", details)
    batches = [seconds_of(lambda: subject.generate(PROMPTS, TOKENS)) for _ in range(BATCHES)]
    rates = [len(PROMPTS) * TOKENS / batch for batch in batches]
    found.add(f"decode{when}_tok_s", rates, "tokens/s")


def run_subject(arguments: argparse.Namespace) -> None:
    common = described("bench_preparation", arguments.engine, arguments.model, arguments.subject, arguments.commit)
    wait_for_idle_gpus()
    with tempfile.TemporaryDirectory() as scratch:
        model = write_model(Path(scratch, arguments.model), SHAPES[arguments.model], dtype="bfloat16")
        subject = ENGINES[arguments.engine](model, OPTIONS[arguments.subject], arguments.memory, 1)
        try:
            measure(subject, Records(arguments.out, {**common, "round": arguments.round}))
        finally:
            subject.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=sorted(ENGINES), default="vllm")
    parser.add_argument("--model", choices=sorted(SHAPES), default="7b")
    parser.add_argument("--memory", type=float, default=0.6, help="share of the GPU's memory that the engine takes")
    parser.add_argument("--rounds", type=int, default=2, help="starts of each subject")
    parser.add_argument("--subject", choices=tuple(OPTIONS), help="by default all, one after the other")
    parser.add_argument("--round", type=int, default=0, help="the number of this round, of a single subject")
    parser.add_argument("--timeout", type=float, default=240, help="seconds that each start may take")
    add_commit(parser)
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the records")
    arguments = parser.parse_args()
    if arguments.subject is not None:
        run_subject(arguments)
        return
    command = [sys.executable, "-m", "integration.bench_preparation", *sys.argv[1:]]
    starts = [(one, subject) for one in range(arguments.rounds) for subject in list(OPTIONS)[:: -1 if one % 2 else 1]]
    failed = [
        f"{subject} in round {one}"
        for one, subject in starts
        if not succeeds([*command, "--subject", subject, "--round", str(one)], arguments.timeout)
    ]
    for record in records.read(arguments.out):
        print(record["subject"], record["round"], record["metric"], f"{record['median']:.4f}", record["unit"])
    if failed:
        raise SystemExit(f"did not end well: {', '.join(failed)}")


if __name__ == "__main__":
    main()
