"""Weight updates from a trainer on one GPU to an engine on another: by the plugin, by the engine's own route, by NCCL.

    python -m integration.bench_remote --engine vllm --model 7b --repeats 5 --timeout 100 --out FILE

The script needs two GPUs of one host. The trainer is on the first and sees both. The engine sees the second only. Each
subject has a time limit, and every figure is in the file as soon as it is measured.

    broadcast      torch's broadcast of the same bytes by NCCL, in buckets of 1 GiB, between two processes: the limit
    plugin_auto    the plugin with the transport that `auto` takes: buckets packed on the engine's GPU, by CUDA IPC
    plugin         the plugin with `transport="nccl"`
    native         the engine's own: vLLM's weight transfer `nccl`, SGLang's `update_weights_from_distributed`

    update_s       the trainer's whole call
    update_first_s the first one, with the making of the communicator
    validate_first_s  of it, the engine's check of the manifest. The first row's is of an unknown one
    closed_s       how long the engine refuses requests, by polling its status; of the engine's own routes, which close
                   nothing, from the first call of an update to the end of the last (SGLang answers the last one before
                   its GPU has done the work)
    gb_per_s       the checkpoint's bytes by `update_s`
    peak_extra_mib_trainer, peak_extra_mib_engine    the most memory in use on either GPU during an update, beyond that
                   before the subject's first one, of all processes
    kept_extra_mib_trainer, kept_extra_mib_engine    the same after the update

After the updates the engine must have the trainer's checksums (with the plugin), and must answer otherwise than with
other weights. With `--device cpu` the script tries itself: Gloo takes the place of NCCL, and vLLM, which has no such
route on the CPU, has no `native`.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

from integration import broadcast, records, remote_trainer
from integration.bench_weights import SglangSubject, Subject, VllmSubject, environment, require_success, serve
from integration.engines.ports import reserve_port
from integration.models import SHAPES, weight_bytes, write_model
from integration.records import Records
from integration.subjects import add_commit, described, gpu_name, succeeds

SUBJECTS = ("broadcast", "plugin", "native")
VISIBLE = "CUDA_VISIBLE_DEVICES"
#: What SGLang sets for its own processes, and its trainers for theirs: both ends of a communicator must have the same.
TRAINER_ENVIRONMENT = {"vllm": {}, "sglang": {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}}


class TimesUpdates(Subject):
    """Counts the engine as closed from the first call of an update by its own route to the end of the last."""

    _begun = 0.0
    _took: tuple[float, ...] = ()

    def native_start(self) -> None:
        self._begun = time.perf_counter()
        super().native_start()

    def native_finish(self) -> None:
        super().native_finish()
        self._took += (time.perf_counter() - self._begun,)

    def closed(self) -> list[float]:
        if self.plugin:
            return super().closed()
        found, self._took = list(self._took), ()
        return found


class RemoteVllm(TimesUpdates, VllmSubject):
    transfer = "nccl"
    options: ClassVar = {"enforce_eager": True}  # an update takes the same time, and the start less


class RemoteSglang(TimesUpdates, SglangSubject):
    def join(self, arguments: dict[str, Any]) -> None:
        require_success(self.engine.init_weights_update_group(**arguments))

    def native_update(self, *arguments: Any) -> None:
        require_success(self.engine.update_weights_from_distributed(**arguments[0]))


ENGINES: dict[str, Any] = {"vllm": RemoteVllm, "sglang": RemoteSglang}


class Rows:
    """The records of a process; each row of the table is a subject."""

    def __init__(self, out: Path, common: dict[str, Any]) -> None:
        self._out = out
        self._common = common
        self._rows: dict[str, Records] = {}

    def about(self, details: dict[str, Any]) -> None:
        """Add fields to the records of rows that have none yet."""
        self._common |= details

    def record(self, row: str, metric: str, values: list[float], unit: str, details: dict[str, Any]) -> None:
        """Add a metric. The rows come one after the other."""
        if row not in self._rows:
            self._rows[row] = Records(self._out, {**self._common, "subject": row}, by_step=True)
        self._rows[row].add(metric, values, unit, details)


def run_subject(arguments: argparse.Namespace) -> list[str]:
    """Measure one subject; returns the rows that failed."""
    cuda = arguments.device == "cuda"
    common = described(
        "bench_remote",
        arguments.engine,
        arguments.model,
        arguments.subject,
        arguments.commit,
        gpu=gpu_name() if cuda else "none",
        words=arguments.given,
    )
    rows = Rows(arguments.out, {**common, "gpus": 2 if cuda else 0})
    reservation, port = reserve_port()
    with reservation, tempfile.TemporaryDirectory() as scratch:
        if arguments.subject == "broadcast":
            measure_broadcast(arguments, rows, port)
            return []
        context = mp.get_context("spawn")
        pipe, inside = context.Pipe()
        trainer = context.Process(
            target=remote_trainer.main,
            args=(
                inside,
                arguments.engine,
                arguments.subject,
                arguments.model,
                arguments.device,
                arguments.repeats,
                port,
            ),
            daemon=True,
        )
        with mock.patch.dict(os.environ, TRAINER_ENVIRONMENT[arguments.engine]):
            trainer.start()
        inside.close()
        if cuda:
            os.environ[VISIBLE] = gpus()[1]
        dtype = "bfloat16" if cuda else "float32"
        model = write_model(Path(scratch, arguments.model), SHAPES[arguments.model], dtype=dtype)
        memory = share(arguments.model) if cuda else 0.0
        subject = ENGINES[arguments.engine](model, arguments.subject == "plugin", arguments.device, memory)
        subject.record, subject.about = rows.record, rows.about
        pipe.send("started")
        return serve(pipe, subject)


def measure_broadcast(arguments: argparse.Namespace, rows: Rows, port: int) -> None:
    details = {"transport": "nccl" if arguments.device == "cuda" else "gloo"}
    rows.about({"bytes": weight_bytes(arguments.model) * (1 if arguments.device == "cuda" else 2)})

    def record(metric: str, values: list[float], unit: str) -> None:
        rows.record("broadcast", metric, values, unit, details)

    broadcast.measure(arguments.model, arguments.device, arguments.repeats, port, record)


def gpus() -> list[str]:
    """The names of the two GPUs."""
    return os.environ.get(VISIBLE, "0,1").split(",")[:2]


def share(model: str) -> float:
    """The share of the GPU's memory for the engine: weights, a KV cache, and what each engine adds."""
    import pynvml

    pynvml.nvmlInit()
    total = int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).total)
    return max(0.4, (1.05 * weight_bytes(model) + (6 << 30)) / total)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=sorted(ENGINES), default="vllm")
    parser.add_argument("--model", choices=sorted(SHAPES), default="7b")
    parser.add_argument("--subject", choices=SUBJECTS, action="append", help="by default all, one after the other")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu is only for trying the script")
    parser.add_argument("--repeats", type=int, default=5, help="updates after the first one")
    add_commit(parser)
    parser.add_argument("--timeout", type=float, default=100, help="seconds that each subject may take")
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the records")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.given = sys.argv[1 : sys.argv.index("--inside")] if arguments.inside else []
    arguments.out = arguments.out.absolute()
    if arguments.inside:
        arguments.subject = arguments.subject[-1]
        failed = run_subject(arguments)
        if failed:
            print(f"{arguments.subject}: failed: {', '.join(failed)}", flush=True)
        sys.stdout.flush()
        os._exit(1 if failed else 0)  # an engine's shutdown can take long, and `run_bounded` kills its processes
    subjects = arguments.subject or SUBJECTS
    if arguments.device == "cpu" and arguments.engine == "vllm":
        subjects = [subject for subject in subjects if subject != "native"]
    command = [sys.executable, "-m", "integration.bench_remote", *sys.argv[1:], "--inside", "--subject"]
    succeeded = True
    for subject in subjects:
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as scratch:
            variables = environment(arguments.engine, arguments.device, Path(scratch))
            succeeded = succeeds([*command, subject], arguments.timeout, variables) and succeeded
        print(f"{subject}: {time.monotonic() - start:.0f} s in all", flush=True)
    answers = [record["median"] for record in records.read(arguments.out) if record["metric"] == "answers"]
    if answers:
        same = "the same" if len(set(answers)) == 1 else "not the same"
        print(f"the answers of {len(answers)} subjects are {same}", flush=True)
    sys.exit(0 if succeeded else 1)


if __name__ == "__main__":
    main()
