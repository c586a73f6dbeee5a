"""Sleep and wake on a GPU: each engine alone and with the plugin, in the same session.

    python -m integration.bench_gpu --engine vllm --model 7b --out results.json

The script needs the engine and one NVIDIA GPU. Model folders hold no weights; the engines start with dummy weights. The
subjects run one after the other, each in a process of its own, on an otherwise idle GPU. The script rewrites the file
with every value, and a run that is cut short leaves its values. The very first start of a model fills the engine's
compile caches: `--warm-start` starts each subject once before it is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

from integration import records
from integration.engines.base import gpu_used_bytes
from integration.models import SHAPES, write_model
from integration.offline import sglang_answers, start_sglang, start_vllm, vllm_answers
from integration.records import Records
from integration.subjects import described, succeeds

PROMPTS = [[5 + i, 6 + i, 7 + i, 8 + i] for i in range(64)]
ASLEEP_S = 0.5  # a trainer's turn, in which the driver scrubs freed memory; a wake at once would wait for that
SUBJECTS = ("plugin", "native")
ENDS = 20  # the first and the last cycles of a long run, which are compared
IDLE_MIB = 1024.0  # an idle GPU has less in use, and any engine takes more
IDLE_TIMEOUT_S = 60.0  # the system frees the memory of a killed process late, page-locked memory slowly


class Bench:
    """Runs one subject."""

    def __init__(self, engine: Any, idle_mib: float, records: Records) -> None:
        self._engine = engine
        self._idle_mib = idle_mib
        self._records = records

    def add(self, metric: str, value: float, unit: str = "s") -> None:
        self._records.add(metric, [value], unit)

    def timed(self, metric: str, run: Callable[[], Any]) -> None:
        self.add(metric, seconds_of(run))

    def run(self, cycles: int, drift_cycles: int) -> None:
        engine = self._engine
        tokens = engine.generate(PROMPTS, 32)
        self._throughput("_before")
        engine.settle()
        self.timed("sleep_l1_first_s", lambda: engine.sleep(1))
        time.sleep(ASLEEP_S)
        self._records.add("gpu_left_mib", [gpu_used_mib() - self._idle_mib], "MiB", engine.left())
        self.add("host_held_mib", host_held_mib(), "MiB")
        self._wake()
        identical = engine.generate(PROMPTS, 32) == tokens
        for _ in range(cycles):
            for _ in range(2):  # the second `touch` restores the weights
                engine.touch()
                self.timed("sleep_l1_later_s", lambda: engine.sleep(1))
                self._wake()
            identical = identical and engine.generate(PROMPTS, 32) == tokens  # a rollout leaves the weights alone
            self.timed("sleep_l1_clean_s", lambda: engine.sleep(1))
            self._wake()
        identical = identical and engine.generate(PROMPTS, 32) == tokens
        self._throughput()
        if drift_cycles:
            self._drift(drift_cycles)
            identical = identical and engine.generate(PROMPTS, 32) == tokens
        self.add("tokens_identical", float(identical), "bool")
        if not engine.can_discard:
            return
        for _ in range(cycles):  # last: discarded weights answer no request
            self.timed("sleep_l2_s", lambda: engine.sleep(2))
            time.sleep(ASLEEP_S)
            self.timed("wake_l2_s", engine.wake)
            time.sleep(ASLEEP_S)  # in place of a rollout

    def _drift(self, cycles: int) -> None:
        """Measure by how much many cycles raise the memory in use and the times of a sleep and a wake."""
        used = gpu_used_mib()
        sleeps, wakes = [], []
        for _ in range(cycles):
            sleeps.append(seconds_of(lambda: self._engine.sleep(1)))
            wakes.append(seconds_of(self._engine.wake))
        self.add(f"drift_mib_{cycles}", gpu_used_mib() - used, "MiB")
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


class Subject(ABC):
    """An engine's offline class, by itself or with the plugin."""

    engine: Any
    plugin: bool
    can_discard: bool

    @abstractmethod
    def generate(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        """Greedy answers of exactly `tokens` tokens."""

    @abstractmethod
    def sleep(self, level: int) -> None: ...

    @abstractmethod
    def wake(self, tags: list[str] | None = None) -> None: ...

    @abstractmethod
    def touch(self) -> None:
        """Change the weights a little, which outdates a backup; a second call restores them."""

    @abstractmethod
    def close(self) -> None: ...

    def wake_rest(self) -> None:
        """Wake what sleeps beside the weights; an engine alone needs the tag, or fails (vLLM 0.26)."""
        self.wake(None if self.plugin else ["kv_cache"])

    def settle(self) -> None:
        """Wait for the host memory that the plugin makes in the background of the start."""
        deadline = time.monotonic() + 60
        while self.plugin and time.monotonic() < deadline:
            self.engine.wake_up()  # no tag sleeps: the call only has the engine look at its host memory
            rank = self.engine.memory_status()[0].ranks[0]
            if rank.host_arena_bytes >= rank.tags["weights"].bytes:
                return
            time.sleep(1)

    def left(self) -> dict[str, Any]:
        """MiB that stay on the GPU during a sleep, by the plugin's own account."""
        if not self.plugin:
            return {}
        left = self.engine.memory_status()[0].ranks[0].left
        return {"causes": {cause: round(nbytes / 2**20) for cause, nbytes in left.items()}}


class VllmSubject(Subject):
    can_discard = True

    def __init__(self, model: Path, plugin: bool, memory: float) -> None:
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # `touch` sends a function to the worker
        self.plugin = plugin
        switch = {"additional_config": {"rl_memory": {}}} if plugin else {"enable_sleep_mode": True}
        self.engine = start_vllm(
            model,
            gpu_memory_utilization=memory,
            max_model_len=4096,
            max_num_seqs=64,
            enable_prefix_caching=False,
            **switch,
        )

    def generate(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        return vllm_answers(self.engine, prompts, tokens)

    def sleep(self, level: int) -> None:
        _print_steps(f"sleep {level}", self.engine.sleep(level=level))

    def wake(self, tags: list[str] | None = None) -> None:
        if self.plugin:
            _print_steps(f"wake {tags}", self.engine.wake_up_with_report(tags))
        else:
            self.engine.wake_up(tags=tags)

    def touch(self) -> None:
        self.engine.apply_model(_negate_one_element)

    def close(self) -> None:
        """vLLM alone ends its process only if `multiprocessing` was imported before the first temporary directory."""
        self.engine.llm_engine.engine_core.shutdown()


class SglangSubject(Subject):
    PROBE = "model.norm.weight"

    def __init__(self, model: Path, plugin: bool, memory: float) -> None:
        self.plugin = plugin
        self.can_discard = plugin  # SGLang itself chooses at its start whether a release keeps the weights
        self._hidden = json.loads((model / "config.json").read_text())["hidden_size"]
        self._touched = 0
        switch = {"rl_memory": True} if plugin else {"enable_memory_saver": True, "enable_weights_cpu_backup": True}
        self.engine = start_sglang(
            model,
            dtype="bfloat16",
            attention_backend="triton",
            disable_prefill_cuda_graph=True,
            disable_radix_cache=True,
            mem_fraction_static=memory,
            context_length=4096,
            max_running_requests=64,
            **switch,
        )
        self.touch()

    def generate(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        return sglang_answers(self.engine, prompts, tokens)

    def sleep(self, level: int) -> None:
        if self.plugin:
            _print_steps(f"sleep {level}", self.engine.sleep(level=level))
        else:
            self.engine.release_memory_occupation(tags=["kv_cache", "weights"])

    def wake(self, tags: list[str] | None = None) -> None:
        if self.plugin:
            _print_steps(f"wake {tags}", self.engine.wake_up(tags=tags))
        else:
            self.engine.resume_memory_occupation(tags=tags or ["weights", "kv_cache"])

    def touch(self) -> None:
        import torch

        weight = torch.full((self._hidden,), 1.0 + 0.125 * (self._touched % 2), dtype=torch.bfloat16)
        self._touched += 1
        self.engine.update_weights_from_tensor([(self.PROBE, weight)])

    def close(self) -> None:
        self.engine.shutdown()


def _print_steps(operation: str, report: Any) -> None:
    if report is not None:
        steps = ", ".join(f"{step} {1000 * seconds:.1f}" for step, seconds in report.seconds.items())
        print(f"{operation}: {steps} ms")


def _negate_one_element(model: Any) -> None:
    parameter = next(model.parameters())
    parameter.data.view(-1)[0].neg_()


ENGINES: dict[str, Any] = {"vllm": VllmSubject, "sglang": SglangSubject}


def seconds_of(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def gpu_used_mib() -> float:
    return gpu_used_bytes() / 2**20


def wait_for_idle_gpu() -> float:
    """Returns: MiB in use on the idle GPU.

    Raises:
        SystemExit: other processes still use the GPU after `IDLE_TIMEOUT_S`.
    """
    deadline = time.monotonic() + IDLE_TIMEOUT_S
    while (used := gpu_used_mib()) > IDLE_MIB:
        if time.monotonic() > deadline:
            raise SystemExit(f"{used:.0f} MiB of the GPU are in use by others")
        time.sleep(1)
    return used


def host_held_mib() -> float:
    """Resident memory of this process and its children."""
    import psutil

    root = psutil.Process()
    return sum(process.memory_info().rss for process in [root, *root.children(recursive=True)]) / 2**20


def run_subject(arguments: argparse.Namespace) -> None:
    kind = ENGINES[arguments.engine]
    idle = wait_for_idle_gpu()
    with tempfile.TemporaryDirectory() as scratch:
        model = write_model(Path(scratch, arguments.model), SHAPES[arguments.model], dtype="bfloat16")
        start = time.perf_counter()
        engine = kind(model, arguments.subject == "plugin", arguments.memory)
        startup = time.perf_counter() - start
        try:
            if not arguments.start_only:
                measure(engine, startup, idle, arguments)
        finally:
            engine.close()


def measure(engine: Any, startup: float, idle_mib: float, arguments: argparse.Namespace) -> None:
    common = described("bench_gpu", arguments.engine, arguments.model, arguments.subject, arguments.commit)
    bench = Bench(engine, idle_mib, Records(arguments.out, common))
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
    parser.add_argument("--memory", type=float, default=0.6, help="share of the GPU's memory that the engine takes")
    parser.add_argument("--cycles", type=int, default=3, help="cycles of each kind of sleep")
    parser.add_argument("--native-cycles", type=int, help="cycles of the engine alone, by default --cycles")
    drift = "more cycles to measure growth; the engine alone runs up to --native-cycles, and none without that option"
    parser.add_argument("--drift-cycles", type=int, default=0, help=drift)
    parser.add_argument("--warm-start", action="store_true", help="start each subject once before it is measured")
    parser.add_argument("--start-only", action="store_true", help="start the subject and measure nothing")
    parser.add_argument("--commit", default=os.environ.get("GIT_COMMIT", "unknown"), help="commit of this repository")
    parser.add_argument("--timeout", type=float, default=240, help="seconds that each subject may take")
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the records")
    arguments = parser.parse_args()
    if arguments.subject is not None:
        run_subject(arguments)
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
