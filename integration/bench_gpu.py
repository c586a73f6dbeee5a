"""Sleep and wake on a GPU: each engine alone and with the plugin, in the same session.

    python -m integration.bench_gpu --engine vllm --model 7b --out results.json
    python -m integration.bench_gpu --engine vllm --model 72b --tp 2 --memory 0.9 --out results.json

The script needs the engine and as many NVIDIA GPUs as `--tp` says. Model folders hold no weights; the engines start
with dummy weights. The subjects run one after the other, each in a process of its own, on otherwise idle GPUs. The
script rewrites the file with every value, and a run that is cut short leaves its values. The very first start of a
model fills the engine's compile caches: `--warm-start` starts each subject once before it is measured.

    tokens_identical     whether single prompts are answered as before the first sleep, after every cycle. A first batch
                         comes before, because other kernels may serve it
    difference           by how much the log-probabilities of 64 prompts at once differ from those before, at most.
                         vLLM composes a batch of the requests that have arrived, and other batches are rounded in other
                         ways: `difference_awake` is the same without a sleep
    request_start_s      a request of 256 tokens just after the start, while the plugin prepares its host memory; with
                         the nine deciles of all requests, because they take one of two times
    request_s            the same once the memory is prepared
    gpu_left_mib         of several GPUs the one that has the most in use
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from integration import records
from integration.engines.base import used_bytes_by_gpu
from integration.gpu_subjects import ENGINES, Options, host_held_mib
from integration.models import SHAPES, weight_bytes, write_model
from integration.offline import Token, most_different
from integration.records import Records
from integration.subjects import add_commit, described, succeeds

PROMPTS = [[5 + i, 6 + i, 7 + i, 8 + i] for i in range(64)]
ALONE = 4  # the prompts of which each is answered alone
TOKENS = 32
ROOM_BYTES = 8 << 30  # what an engine needs on a GPU beside the weights
REQUESTS = 150  # at the start; the plugin prepares host memory for some seconds
ASLEEP_S = 0.5  # a trainer's turn, in which the driver scrubs freed memory; a wake at once would wait for that
SUBJECTS = ("plugin", "native")
ENDS = 20  # the first and the last cycles of a long run, which are compared
IDLE_MIB = 1024.0  # an idle GPU has less in use, and any engine takes more
IDLE_TIMEOUT_S = 60.0  # the system frees the memory of a killed process late, page-locked memory slowly


class Bench:
    """Runs one subject.

    Args:
        idle_mib: MiB in use on each idle GPU.
        levels: The levels of the sleeps.
    """

    def __init__(self, engine: Any, idle_mib: list[float], records: Records, levels: list[int]) -> None:
        self._engine = engine
        self._idle_mib = idle_mib
        self._records = records
        self._levels = levels
        self._answers: list[list[int]] = []
        self._scored: list[list[Token]] = []
        self._identical = True

    def add(self, metric: str, value: float, unit: str = "s") -> None:
        self._records.add(metric, [value], unit, self._engine.steps if unit == "s" else {})

    def timed(self, metric: str, run: Callable[[], Any]) -> None:
        self._engine.steps = {}
        self.add(metric, seconds_of(run))

    def run(self, cycles: int, drift_cycles: int) -> None:
        engine = self._engine
        engine.generate(PROMPTS, TOKENS)
        self._requests("request_start_s")
        self._answers, self._scored = self._alone(), engine.scored(PROMPTS, TOKENS)
        self._add_difference("difference_awake")
        self._throughput("_before")
        engine.settle()
        self._requests("request_s")
        if 1 in self._levels:
            self._preserve(cycles, drift_cycles)
        if 2 in self._levels and engine.can_discard:
            for _ in range(cycles):  # last: discarded weights answer no request
                self.timed("sleep_l2_s", lambda: engine.sleep(2))
                time.sleep(ASLEEP_S)
                self.timed("wake_l2_s", engine.wake)
                time.sleep(ASLEEP_S)  # in place of a rollout

    def _preserve(self, cycles: int, drift_cycles: int) -> None:
        """Sleeps at level 1."""
        engine = self._engine
        self.timed("sleep_l1_first_s", lambda: engine.sleep(1))
        time.sleep(ASLEEP_S)
        left = [now - idle for now, idle in zip(gpus_used_mib(), self._idle_mib, strict=True)]
        self._records.add("gpu_left_mib", [max(left)], "MiB", engine.left())
        self.add("host_held_mib", host_held_mib(), "MiB")
        self._wake()
        self._compare()
        for _ in range(cycles):
            for _ in range(2):  # the second `touch` restores the weights
                engine.touch()
                self.timed("sleep_l1_later_s", lambda: engine.sleep(1))
                self._wake()
            self._compare()  # a rollout leaves the weights alone
            self.timed("sleep_l1_clean_s", lambda: engine.sleep(1))
            self._wake()
        self._compare()
        self._throughput()
        if drift_cycles:
            self._drift(drift_cycles)
            self._compare()
        self.add("tokens_identical", float(self._identical), "bool")

    def _alone(self) -> list[list[int]]:
        return [answer for prompt in PROMPTS[:ALONE] for answer in self._engine.generate([prompt], TOKENS)]

    def _compare(self) -> None:
        self._identical = self._alone() == self._answers and self._identical
        self._add_difference("difference")

    def _add_difference(self, metric: str) -> None:
        self.add(metric, most_different(self._scored, self._engine.scored(PROMPTS, TOKENS)), "nats")

    def _requests(self, metric: str) -> None:
        seconds = [seconds_of(lambda: self._engine.generate([PROMPTS[0] * 64], 1)) for _ in range(REQUESTS)]
        self._records.add(metric, seconds, "s", {"deciles": statistics.quantiles(seconds, n=10)})

    def _drift(self, cycles: int) -> None:
        """Measure by how much many cycles raise the memory in use and the times of a sleep and a wake."""
        used = sum(gpus_used_mib())
        sleeps, wakes = [], []
        for _ in range(cycles):
            sleeps.append(seconds_of(lambda: self._engine.sleep(1)))
            wakes.append(seconds_of(self._engine.wake))
        self.add(f"drift_mib_{cycles}", sum(gpus_used_mib()) - used, "MiB")
        if cycles < 2 * ENDS:
            return
        for operation, seconds in (("sleep", sleeps), ("wake", wakes)):
            ratio = statistics.median(seconds[-ENDS:]) / statistics.median(seconds[:ENDS])
            self.add(f"drift_{operation}_ratio_{cycles}", ratio, "last / first")

    def _wake(self) -> None:
        time.sleep(ASLEEP_S)
        self.timed("wake_weights_s", lambda: self._engine.wake(["weights"]))
        self.timed("wake_kv_s", self._engine.wake_rest)

    def _throughput(self, when: str = "") -> None:
        self._engine.generate(PROMPTS, 128)
        for _ in range(5):
            start = time.perf_counter()
            answers = self._engine.generate(PROMPTS, 128)
            rate = sum(map(len, answers)) / (time.perf_counter() - start)
            self.add("decode_tok_s" + when, rate, "tokens/s")
        for _ in range(7):
            self.timed("ttft_s" + when, lambda: self._engine.generate([PROMPTS[0] * 64], 1))


def seconds_of(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def gpus_used_mib() -> list[float]:
    return [used / 2**20 for used in used_bytes_by_gpu()]


def gpu_bytes() -> int:
    """The memory of the first GPU."""
    import pynvml

    pynvml.nvmlInit()
    return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).total)


def wait_for_idle_gpus() -> list[float]:
    """Returns: MiB in use on each idle GPU.

    Raises:
        SystemExit: other processes still use a GPU after `IDLE_TIMEOUT_S`.
    """
    deadline = time.monotonic() + IDLE_TIMEOUT_S
    while max(used := gpus_used_mib()) > IDLE_MIB:
        if time.monotonic() > deadline:
            raise SystemExit(f"{max(used):.0f} MiB of a GPU are in use by others")
        time.sleep(1)
    return used


def run_subject(arguments: argparse.Namespace) -> None:
    kind = ENGINES[arguments.engine]
    idle = wait_for_idle_gpus()
    with tempfile.TemporaryDirectory() as scratch:
        model = write_model(Path(scratch, arguments.model), SHAPES[arguments.model], dtype="bfloat16")
        start = time.perf_counter()
        options: Options | None = {} if arguments.subject == "plugin" else None
        engine = kind(model, options, arguments.memory, arguments.tp)
        startup = time.perf_counter() - start
        try:
            if not arguments.start_only:
                measure(engine, startup, idle, arguments)
        finally:
            engine.close()


def measure(engine: Any, startup: float, idle_mib: list[float], arguments: argparse.Namespace) -> None:
    common = described("bench_gpu", arguments.engine, arguments.model, arguments.subject, arguments.commit)
    if arguments.tp > 1:
        common["tensor_parallel"] = arguments.tp
    bench = Bench(engine, idle_mib, Records(arguments.out, common), arguments.levels)
    if arguments.warm_start:  # else it is mostly compilation
        bench.add("startup_s", startup)
    bench.run(*cycles_of(arguments))


def cycles_of(arguments: argparse.Namespace) -> tuple[int, int]:
    """The numbers of measured cycles and of further cycles that show growth."""
    cycles, drift_cycles = arguments.cycles, arguments.drift_cycles
    if arguments.subject == "plugin":
        return cycles, drift_cycles
    if arguments.native_cycles is None:
        return cycles, 0
    return arguments.native_cycles, min(arguments.native_cycles, drift_cycles)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=sorted(ENGINES), default="vllm")
    parser.add_argument("--model", choices=sorted(SHAPES), default="7b")
    parser.add_argument("--subject", choices=SUBJECTS, default=None, help="by default both, one after the other")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    levels = "levels of the sleeps; of 72b a backup by the engine alone takes more host memory than most machines have"
    parser.add_argument("--levels", type=int, nargs="+", choices=(1, 2), default=[1, 2], help=levels)
    parser.add_argument("--memory", type=float, default=0.6, help="share of the GPU's memory that the engine takes")
    parser.add_argument("--cycles", type=int, default=3, help="cycles of each kind of sleep")
    parser.add_argument("--native-cycles", type=int, help="cycles of the engine alone, by default --cycles")
    drift = "more cycles to measure growth; the engine alone runs up to --native-cycles, and none without that option"
    parser.add_argument("--drift-cycles", type=int, default=0, help=drift)
    parser.add_argument("--warm-start", action="store_true", help="start each subject once before it is measured")
    parser.add_argument("--start-only", action="store_true", help="start the subject and measure nothing")
    add_commit(parser)
    parser.add_argument("--timeout", type=float, default=240, help="seconds that each subject may take")
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the records")
    arguments = parser.parse_args()
    if arguments.subject is not None:
        run_subject(arguments)
        return
    needed, has = weight_bytes(arguments.model) / arguments.tp + ROOM_BYTES, arguments.memory * gpu_bytes()
    if needed > has:
        print(f"skipped: {arguments.model} needs {needed / 1e9:.0f} GB of each GPU, and the engine has {has / 1e9:.0f}")
        return
    failed = [subject for subject in SUBJECTS if not _measured(subject, arguments)]
    for record in records.read(arguments.out):
        print(f"{record['subject']:7} {record['metric']:22} {record['median']:10.4f} {record['unit']}")
    if failed:
        raise SystemExit(f"did not end well: {', '.join(failed)}")


def _measured(subject: str, arguments: argparse.Namespace) -> bool:
    command = [sys.executable, "-m", "integration.bench_gpu", *sys.argv[1:], "--subject", subject]
    if arguments.warm_start and not succeeds([*command, "--start-only"], arguments.timeout):
        return False
    return succeeds(command, arguments.timeout)


if __name__ == "__main__":
    main()
