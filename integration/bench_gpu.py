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
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from integration import records
from integration.engines.base import gpu_used_bytes
from integration.models import SHAPES, write_model
from integration.records import Records
from integration.subjects import gpu_name, run_bounded

PROMPTS = [[5 + i, 6 + i, 7 + i, 8 + i] for i in range(64)]
ASLEEP_S = 0.5  # a trainer's turn; the driver scrubs freed memory meanwhile, and whoever wakes at once waits for it
SUBJECTS = ("plugin", "native")
ENDS = 20  # cycles at each end of a long run that are compared
IDLE_MIB = 1024.0  # more than a GPU takes for itself, less than any engine
IDLE_TIMEOUT_S = 60.0  # the memory of a killed process goes some time after it, the page-locked slowly


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
            for _ in range(2):  # touching twice is as if never
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
        for _ in range(cycles):  # last, since nothing may be asked of weights that were discarded
            self.timed("sleep_l2_s", lambda: engine.sleep(2))
            time.sleep(ASLEEP_S)
            self.timed("wake_l2_s", engine.wake_all)
            time.sleep(ASLEEP_S)  # for the rollout

    def _drift(self, cycles: int) -> None:
        """Many cycles: what they add to the memory in use, and to the time of a sleep and a wake."""
        used = gpu_used_mib()
        sleeps, wakes = [], []
        for _ in range(cycles):
            sleeps.append(seconds_of(lambda: self._engine.sleep(1)))
            wakes.append(seconds_of(self._engine.wake_all))
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


class VllmSubject:
    """vLLM's offline engine, by itself or with the plugin."""

    distributions = ("vllm",)

    def __init__(self, model: Path, plugin: bool, memory: float) -> None:
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # `touch` is sent to the worker
        import vllm

        self._vllm = vllm
        self._plugin = plugin
        self.can_discard = True
        switch = {"additional_config": {"rl_memory": {}}} if plugin else {"enable_sleep_mode": True}
        self._llm = vllm.LLM(
            str(model),
            load_format="dummy",
            gpu_memory_utilization=memory,
            max_model_len=4096,
            max_num_seqs=64,
            enable_prefix_caching=False,
            **switch,
        )

    def generate(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        sampling = self._vllm.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [list(o.outputs[0].token_ids) for o in self._llm.generate(requests, sampling, use_tqdm=False)]

    def sleep(self, level: int) -> None:
        _print_steps(f"sleep {level}", self._llm.sleep(level=level))

    def wake(self, tags: list[str] | None = None) -> None:
        if self._plugin:
            _print_steps(f"wake {tags}", self._llm.wake_up_with_report(tags))
        else:
            self._llm.wake_up(tags=tags)

    def wake_rest(self) -> None:
        """What is left after the weights; vLLM 0.26 itself fails if that is not named."""
        self.wake(None if self._plugin else ["kv_cache"])

    def wake_all(self) -> None:
        self.wake()

    def touch(self) -> None:
        """Change a little of the weights, so that a backup of them is out of date; twice is as if never."""
        self._llm.apply_model(_negate_one_element)

    def settle(self) -> None:
        if self._plugin:
            wait_for_host_memory(self._llm)

    def left(self) -> dict[str, Any]:
        return left_by_cause(self._llm) if self._plugin else {}

    def close(self) -> None:
        """vLLM alone ends its process only if `multiprocessing` was imported before the first temporary directory."""
        self._llm.llm_engine.engine_core.shutdown()


class SglangSubject:
    """SGLang's offline engine, by itself or with the plugin."""

    distributions = ("sglang",)
    PROBE = "model.norm.weight"

    def __init__(self, model: Path, plugin: bool, memory: float) -> None:
        import sglang
        import torch

        self._torch = torch
        self._plugin = plugin
        self.can_discard = plugin  # SGLang itself chooses at its start whether a release keeps the weights
        self._hidden = json.loads((model / "config.json").read_text())["hidden_size"]
        self._touched = 0
        if plugin:
            switch: dict[str, Any] = {"rl_memory": True}
        else:
            switch = {"enable_memory_saver": True, "enable_weights_cpu_backup": True}
        self._engine = sglang.Engine(
            model_path=str(model),
            load_format="dummy",
            dtype="bfloat16",
            attention_backend="triton",
            sampling_backend="pytorch",
            grammar_backend="none",
            disable_prefill_cuda_graph=True,
            disable_radix_cache=True,
            skip_tokenizer_init=True,
            mem_fraction_static=memory,
            context_length=4096,
            max_running_requests=64,
            log_level="warning",
            **switch,
        )
        self.touch()

    def generate(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        answers = self._engine.generate(input_ids=prompts, sampling_params=[sampling] * len(prompts))
        return [list(answer["output_ids"]) for answer in answers]

    def sleep(self, level: int) -> None:
        if self._plugin:
            _print_steps(f"sleep {level}", self._engine.sleep(level=level))
        else:
            self._engine.release_memory_occupation(tags=["kv_cache", "weights"])

    def wake(self, tags: list[str] | None = None) -> None:
        if self._plugin:
            _print_steps(f"wake {tags}", self._engine.wake_up(tags=tags))
        else:
            self._engine.resume_memory_occupation(tags=tags or ["weights", "kv_cache"])

    def wake_rest(self) -> None:
        self.wake(None if self._plugin else ["kv_cache"])

    def wake_all(self) -> None:
        self.wake()

    def touch(self) -> None:
        """Change a little of the weights, so that a backup of them is out of date; twice is as if never."""
        weight = self._torch.full((self._hidden,), 1.0 + 0.125 * (self._touched % 2), dtype=self._torch.bfloat16)
        self._touched += 1
        self._engine.update_weights_from_tensor([(self.PROBE, weight)])

    def settle(self) -> None:
        if self._plugin:
            wait_for_host_memory(self._engine)

    def left(self) -> dict[str, Any]:
        return left_by_cause(self._engine) if self._plugin else {}

    def close(self) -> None:
        self._engine.shutdown()


def left_by_cause(engine: Any) -> dict[str, Any]:
    """MiB that the plugin's engine says to have left on the GPU."""
    return {
        "causes": {cause: round(nbytes / 2**20) for cause, nbytes in engine.memory_status()[0].ranks[0].left.items()}
    }


def wait_for_host_memory(engine: Any) -> None:
    """Wait until the host memory is there that is made in the background of the start."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        engine.wake_up()  # does nothing but look
        rank = engine.memory_status()[0].ranks[0]
        if rank.host_arena_bytes >= rank.tags["weights"].bytes:
            return
        time.sleep(1)


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
    """MiB in use on a GPU that nobody uses.

    Raises:
        SystemExit: somebody goes on using it.
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
    import torch

    common = {
        "engine": arguments.engine,
        "engine_version": version(engine.distributions[0]),
        "torch": torch.__version__,
        "gpu": gpu_name(),
        "model": arguments.model,
        "subject": arguments.subject,
        "commit": arguments.commit,
        "command": "python -m integration.bench_gpu " + " ".join(sys.argv[1:]),
    }
    bench = Bench(engine, idle_mib, Records(arguments.out, common))
    bench.add("startup_s", startup)
    bench.run(*cycles_of(arguments))


def cycles_of(arguments: argparse.Namespace) -> tuple[int, int]:
    """How many cycles the subject goes through, and how many more to see what they add."""
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
    try:
        if arguments.warm_start:
            run_bounded([*command, "--start-only"], arguments.timeout)
        run_bounded(command, arguments.timeout)
    except subprocess.SubprocessError as error:
        print(f"{subject}: {error}", file=sys.stderr)
        return False
    return True


if __name__ == "__main__":
    main()
