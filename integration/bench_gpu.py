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
import json
import os
import statistics
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from integration import records
from integration.engines.base import used_bytes_by_gpu
from integration.models import SHAPES, weight_bytes, write_model
from integration.offline import (
    Token,
    most_different,
    sglang_answers,
    sglang_scored,
    start_sglang,
    start_vllm,
    vllm_answers,
    vllm_scored,
)
from integration.records import Records
from integration.subjects import add_commit, described, succeeds

PROMPTS = [[5 + i, 6 + i, 7 + i, 8 + i] for i in range(64)]
ALONE = 4  # the prompts of which each is answered alone
TOKENS = 32
ROOM_BYTES = 8 << 30  # what an engine needs on a GPU beside the weights
SETTLE_S = 240.0  # the longest wait for host memory; 145 GB on two ranks take more than a minute
GROWTH_MIB = 64.0  # of resident memory in two seconds, while host memory is made
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


class Subject(ABC):
    """An engine's offline class, by itself or with the plugin."""

    engine: Any
    plugin: bool
    can_discard: bool
    steps: Mapping[str, Any] = MappingProxyType({})  # of the latest sleep or wake, for its record

    @abstractmethod
    def generate(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        """Greedy answers of exactly `tokens` tokens."""

    @abstractmethod
    def scored(self, prompts: list[list[int]], tokens: int) -> list[list[Token]]:
        """See `offline.vllm_scored`."""

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
        """Wait for the host memory that the plugin makes in the background: until no more becomes resident."""
        deadline = time.monotonic() + SETTLE_S
        before, held = -GROWTH_MIB, host_held_mib()
        while self.plugin and held - before >= GROWTH_MIB and time.monotonic() < deadline:
            time.sleep(2)
            before, held = held, host_held_mib()

    def left(self) -> dict[str, Any]:
        """MiB that stay on the GPU during a sleep, by the plugin's own account."""
        if not self.plugin:
            return {}
        left = self.engine.memory_status()[0].ranks[0].left
        return {"causes": {cause: round(nbytes / 2**20) for cause, nbytes in left.items()}}

    def note_steps(self, operation: str, report: Any) -> None:
        """Print the plugin's report of a sleep or a wake, and keep its steps for the record."""
        if report is not None:
            milliseconds = {step: round(1000 * seconds, 1) for step, seconds in report.seconds.items()}
            print(f"{operation}: {milliseconds} ms", flush=True)
            self.steps = {"steps_ms": milliseconds}


class VllmSubject(Subject):
    can_discard = True

    def __init__(self, model: Path, plugin: bool, memory: float, tp: int) -> None:
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # `touch` sends a function to the worker
        self.plugin = plugin
        switch: dict[str, Any] = {"additional_config": {"rl_memory": {}}} if plugin else {"enable_sleep_mode": True}
        if tp > 1:  # FlashInfer would build its fused all-reduce at the start
            switch["compilation_config"] = {"pass_config": {"fuse_allreduce_rms": False}}
        self.engine = start_vllm(
            model,
            tensor_parallel_size=tp,
            gpu_memory_utilization=memory,
            max_model_len=4096,
            max_num_seqs=64,
            enable_prefix_caching=False,
            **switch,
        )

    def generate(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        return vllm_answers(self.engine, prompts, tokens)

    def scored(self, prompts: list[list[int]], tokens: int) -> list[list[Token]]:
        return vllm_scored(self.engine, prompts, tokens)

    def sleep(self, level: int) -> None:
        self.note_steps(f"sleep {level}", self.engine.sleep(level=level))

    def wake(self, tags: list[str] | None = None) -> None:
        if self.plugin:
            self.note_steps(f"wake {tags}", self.engine.wake_up_with_report(tags))
        else:
            self.engine.wake_up(tags=tags)

    def touch(self) -> None:
        self.engine.apply_model(_negate_one_element)

    def close(self) -> None:
        """vLLM alone ends its process only if `multiprocessing` was imported before the first temporary directory."""
        self.engine.llm_engine.engine_core.shutdown()


class SglangSubject(Subject):
    PROBE = "model.norm.weight"

    def __init__(self, model: Path, plugin: bool, memory: float, tp: int) -> None:
        self.plugin = plugin
        self.can_discard = plugin  # SGLang itself chooses at its start whether a release keeps the weights
        self._hidden = json.loads((model / "config.json").read_text())["hidden_size"]
        self._touched = 0
        switch = {"rl_memory": True} if plugin else {"enable_memory_saver": True, "enable_weights_cpu_backup": True}
        self.engine = start_sglang(
            model,
            tp_size=tp,
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

    def scored(self, prompts: list[list[int]], tokens: int) -> list[list[Token]]:
        return sglang_scored(self.engine, prompts, tokens)

    def sleep(self, level: int) -> None:
        if self.plugin:
            self.note_steps(f"sleep {level}", self.engine.sleep(level=level))
        else:
            self.engine.release_memory_occupation(tags=["kv_cache", "weights"])

    def wake(self, tags: list[str] | None = None) -> None:
        if self.plugin:
            self.note_steps(f"wake {tags}", self.engine.wake_up(tags=tags))
        else:
            self.engine.resume_memory_occupation(tags=tags or ["weights", "kv_cache"])

    def touch(self) -> None:
        import torch

        weight = torch.full((self._hidden,), 1.0 + 0.125 * (self._touched % 2), dtype=torch.bfloat16)
        self._touched += 1
        session = hasattr(self.engine, "begin_weight_update")  # new in 0.5.21, and needed since
        if session:
            _require(self.engine.begin_weight_update())
        _require(self.engine.update_weights_from_tensor([(self.PROBE, weight)]))
        if session:
            _require(self.engine.end_weight_update())

    def close(self) -> None:
        self.engine.shutdown()


def _require(answer: tuple[bool, str]) -> None:
    """
    Raises:
        RuntimeError: SGLang's answer says that the call has failed.
    """
    if not answer[0]:
        raise RuntimeError(answer[1])


def _negate_one_element(model: Any) -> None:
    parameter = next(model.parameters())
    parameter.data.view(-1)[0].neg_()


ENGINES: dict[str, Any] = {"vllm": VllmSubject, "sglang": SglangSubject}


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


def host_held_mib() -> float:
    """Resident memory of this process and its children."""
    import psutil

    root = psutil.Process()
    return sum(process.memory_info().rss for process in [root, *root.children(recursive=True)]) / 2**20


def run_subject(arguments: argparse.Namespace) -> None:
    kind = ENGINES[arguments.engine]
    idle = wait_for_idle_gpus()
    with tempfile.TemporaryDirectory() as scratch:
        model = write_model(Path(scratch, arguments.model), SHAPES[arguments.model], dtype="bfloat16")
        start = time.perf_counter()
        engine = kind(model, arguments.subject == "plugin", arguments.memory, arguments.tp)
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
