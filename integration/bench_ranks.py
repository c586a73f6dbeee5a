"""What tensor-parallel ranks leave on their GPUs while they sleep, and whether many cycles change their answers.

    python -m integration.bench_ranks --engine vllm --model 7b --tp 2 --cycles 200 --out results.json

The script needs the engine and as many NVIDIA GPUs as ranks, idle. The subjects run one after the other, each in a
process of its own:

    plugin      with the plugin, and custom all-reduce on
    nccl        with the plugin and `--disable-custom-all-reduce`
    native      the engine alone, with its own sleep

The record `tokens_identical` compares the answers after the cycles with those before, one prompt at a time; if they
differ, the exit code is 1. `difference` compares the log-probabilities of 64 prompts at once, whose batches differ from
run to run; `difference_awake` is the same without a sleep between them. All subjects have the same weights, with a
seed. The last line compares the answers of `plugin` with those of `nccl`: with two ranks both add the same two numbers,
so another sum shows an all-reduce that reads wrong memory.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from integration import records
from integration.models import SHAPES
from integration.offline import Token, most_different, sglang_answers, sglang_scored, vllm_answers, vllm_scored
from integration.records import Records
from integration.subjects import add_commit, described, succeeds

SUBJECTS = ("plugin", "nccl", "native")
PROMPTS = [[5 + i, 6 + i, 7 + i, 8 + i] for i in range(64)]
ALONE = 4  # the prompts of which each is answered alone
TOKENS = 32
MOST = 0.5  # the largest difference of log-probabilities, in nats, that rounding may explain
ASLEEP_S = 0.5
EVERY = 20  # cycles between two comparisons of the answers


def start(arguments: argparse.Namespace, model: Path) -> Any:
    options: dict[str, Any] = {"disable_custom_all_reduce": True} if arguments.subject == "nccl" else {}
    native = arguments.subject == "native"
    given = {name: True for name in arguments.options}
    if arguments.engine == "sglang":
        import sglang

        switch = {"enable_memory_saver": True, "enable_weights_cpu_backup": True} if native else {"rl_memory": given}
        return sglang.Engine(
            model_path=str(model),
            tp_size=arguments.tp,
            dtype="bfloat16",
            attention_backend="triton",
            sampling_backend="pytorch",
            grammar_backend="none",
            skip_tokenizer_init=True,
            disable_prefill_cuda_graph=True,
            disable_radix_cache=True,
            mem_fraction_static=arguments.memory,
            context_length=4096,
            max_running_requests=64,
            log_level="warning",
            **switch,
            **options,
        )
    import vllm

    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    switch = {"enable_sleep_mode": True} if native else {"additional_config": {"rl_memory": given}}
    return vllm.LLM(
        str(model),
        tensor_parallel_size=arguments.tp,
        gpu_memory_utilization=arguments.memory,
        max_model_len=4096,
        max_num_seqs=64,
        enable_prefix_caching=False,
        # FlashInfer would build its fused all-reduce at the start, which takes the place of vLLM's own.
        compilation_config={"pass_config": {"fuse_allreduce_rms": False}},
        **{name: True for name in arguments.flags},
        **switch,
        **options,
    )


class Ranks:
    """One engine, and the calls of its subject."""

    def __init__(self, arguments: argparse.Namespace, model: Path) -> None:
        self._sglang = arguments.engine == "sglang"
        self._native = arguments.subject == "native"
        self.engine = start(arguments, model)

    def answers(self) -> list[list[int]]:
        answer = sglang_answers if self._sglang else vllm_answers
        return [each for prompt in PROMPTS[:ALONE] for each in answer(self.engine, [prompt], TOKENS)]

    def scored(self) -> list[list[Token]]:
        return (sglang_scored if self._sglang else vllm_scored)(self.engine, PROMPTS, TOKENS)

    def sleep(self) -> None:
        if self._sglang and self._native:
            self.engine.release_memory_occupation()
        else:
            self.engine.sleep(level=1)

    def wake(self) -> None:
        if self._sglang and self._native:
            self.engine.resume_memory_occupation()
        else:
            self.engine.wake_up()

    def by_cause(self) -> list[dict[str, Any]]:
        """Of each rank: what stays on the GPU, in MiB by cause, and the rank's notes."""
        if self._native:
            return []
        ranks = self.engine.memory_status()[0].ranks
        return [
            {"left_mib": {cause: round(n / 2**20) for cause, n in rank.left.items()}, "notes": list(rank.notes)}
            for rank in ranks
        ]

    def close(self) -> None:
        if self._sglang:
            self.engine.shutdown()
        else:
            self.engine.llm_engine.engine_core.shutdown()


def used_mib() -> list[float]:
    """The memory in use on each GPU, as the driver counts it."""
    import pynvml

    pynvml.nvmlInit()
    try:
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        return [pynvml.nvmlDeviceGetMemoryInfo(handle).used / 2**20 for handle in handles]
    finally:
        pynvml.nvmlShutdown()


def run_subject(arguments: argparse.Namespace) -> None:
    idle = used_mib()[: arguments.tp]
    common = described("bench_ranks", arguments.engine, arguments.model, arguments.subject, arguments.commit)
    ranks = Ranks(arguments, arguments.folder)
    try:
        bench = Records(
            arguments.out,
            {**common, "tp": arguments.tp, "flags": arguments.flags, "options": arguments.options},
            by_step=True,
        )
        ranks.scored()  # the first batch compiles kernels, and others than later ones may serve it
        first, scored = ranks.answers(), ranks.scored()
        bench.add("difference_awake", [most_different(scored, ranks.scored()) for _ in range(3)], "nats")
        digest = hashlib.sha256(json.dumps(first).encode()).hexdigest()[:16]
        bench.add("different_answers", [float(len(set(map(tuple, first))))], "answers", {"tokens": digest})
        same = True
        for cycle in range(arguments.cycles):
            started = time.perf_counter()
            ranks.sleep()
            bench.add("sleep_l1_s", [time.perf_counter() - started], "s")
            if cycle in (0, arguments.cycles - 1):
                time.sleep(ASLEEP_S)
                left = [used - before for used, before in zip(used_mib(), idle, strict=False)]
                name = "left_mib_first" if cycle == 0 else "left_mib_last"
                bench.add(name, left, "MiB on each GPU", {"ranks": ranks.by_cause()})
            started = time.perf_counter()
            ranks.wake()
            bench.add("wake_l1_s", [time.perf_counter() - started], "s")
            if cycle % EVERY == 0 or cycle == arguments.cycles - 1:
                same = same and ranks.answers() == first
                bench.add("difference", [most_different(scored, ranks.scored())], "nats")
        bench.add("tokens_identical", [float(same)], "bool")
    finally:
        ranks.close()


def compare(out: Path) -> bool:
    """Whether no cycle changed an answer. Prints whether the two all-reduces give the same answers."""
    found = {(record["subject"], record["metric"]): record for record in records.read(out)}
    tokens = {subject: record["tokens"] for (subject, metric), record in found.items() if metric == "different_answers"}
    right = all(record["min"] == 1 for (_, metric), record in found.items() if metric == "tokens_identical")
    right = right and all(record["max"] <= MOST for (_, metric), record in found.items() if "difference" in metric)
    if {"plugin", "nccl"} <= tokens.keys():
        print("plugin answers as nccl:", tokens["plugin"] == tokens["nccl"])
    return right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("vllm", "sglang"), default="vllm")
    parser.add_argument("--model", choices=sorted(SHAPES), default="7b")
    parser.add_argument("--subject", choices=SUBJECTS, action="append", help="by default all, one after the other")
    parser.add_argument("--tp", type=int, default=2, help="tensor-parallel ranks")
    parser.add_argument("--cycles", type=int, default=200)
    parser.add_argument("--memory", type=float, default=0.6, help="share of each GPU's memory that the engine takes")
    parser.add_argument(
        "--flags", nargs="*", default=[], help="arguments of vLLM to set, e.g. enable_nccl_comm_suspend"
    )
    parser.add_argument("--options", nargs="*", default=[], help="options of rl_memory to set, e.g. nccl_suspend")
    add_commit(parser)
    parser.add_argument("--timeout", type=float, default=400, help="seconds that each subject may take")
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the records")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # of the model, in a subject's process
    arguments = parser.parse_args()
    if arguments.folder is not None:
        [arguments.subject] = arguments.subject
        run_subject(arguments)
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, arguments.model)
        # In a process of its own, whose context on the GPU is gone when the subjects start.
        weights = ["--shape", arguments.model, "--dtype", "bfloat16", "--seed", "3", "--device", "cuda"]
        subprocess.run([sys.executable, "-m", "integration.models", str(folder), *weights], check=True)
        given = ["--engine", arguments.engine, "--model", arguments.model, "--tp", str(arguments.tp)]
        given += ["--cycles", str(arguments.cycles), "--memory", str(arguments.memory), "--commit", arguments.commit]
        given += ["--out", str(arguments.out), "--folder", str(folder), "--flags", *arguments.flags]
        given += ["--options", *arguments.options]
        command = [sys.executable, "-m", "integration.bench_ranks", *given]
        subjects = arguments.subject or SUBJECTS
        failed = [one for one in subjects if not succeeds([*command, "--subject", one], arguments.timeout)]
    for record in records.read(arguments.out):
        print(f"{record['subject']:7} {record['metric']:20} {record['median']:10.3f} {record['unit']}")
    if failed or not compare(arguments.out):
        raise SystemExit(f"did not end well: {', '.join(failed) or 'answers differ'}")


if __name__ == "__main__":
    main()
