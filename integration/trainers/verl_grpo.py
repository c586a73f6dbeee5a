"""verl's GRPO with FSDP2 and vLLM or SGLang on the same GPUs, without this package, with it, and with its adapter.

    python -m integration.trainers.verl_grpo --device cpu --steps 3 --shape tiny --out verl-cpu.json
    python -m integration.trainers.verl_grpo --device cuda --steps 20 --shape 1.5b --out verl.json
    python -m integration.trainers.verl_grpo --device cuda --steps 20 --shape 1.5b --ranks 2 --out verl-tp2.json
    python -m integration.trainers.verl_grpo --engine sglang --subjects adapter --out verl-sglang-cpu.json

    native     verl as it is: level-2 sleeps of vLLM, and verl's own buckets over CUDA IPC. The engines cannot sleep on
               a CPU, so this subject needs a GPU.
    plugin     the same, and the package enabled in the engine: by `engine_kwargs.vllm.additional_config`, or by
               `RL_MEMORY` with SGLang
    adapter    the same with `actor_rollout_ref.model.external_lib=rl_memory_plugins.integrations.verl`

Model, tokenizer and prompts are made here, and nothing is fetched. The task is that of `integration.grpo`: the reward
is the share of an answer's tokens from the class of its prompt, so it can rise from 0.25 to 1. Each subject is a local
Ray cluster of its own. Records, with a value for every step under `by_step`:

    reward                 the mean over all answers of a step
    logprob_difference     mean of |log-probability of the rollout - of the trainer|
    sync_s                 `update_weights` of verl's rollout, without the wakes before and after it
    wake_s                 both wakes of a step
    sleep_s                the sleep of a step
    step_s                 the whole step
    peak_gpu_mib           the most memory in use on the first GPU, whoever used it
    peak_host_mib          the most memory in use on the host, less the memory in use before

`--ranks` is the number of trainer processes and of the engine's tensor-parallel ranks. On a CPU verl runs on the
platform of `verl_on_cpu`, and its own sync goes through shared memory.

Exit code 1 if a check fails.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from integration import grpo
from integration.engines import ENGINES
from integration.engines.base import REPOSITORY, Launch
from integration.models import SHAPES, write_model
from integration.records import Records, read
from integration.subjects import add_commit, engine_version, gpu_name, run_bounded
from integration.timeline import Timeline
from integration.trainers.checks import problems_of

SEED = 11
SUBJECTS = {"cpu": ("plugin", "adapter"), "cuda": ("native", "plugin", "adapter")}
SUBJECTS_ON = {("sglang", "cpu"): ("adapter",)}  # SGLang's own sync shares memory of GPUs
PROMPTS, ANSWERS = {"cpu": 4, "cuda": 32}, {"cpu": 4, "cuda": 16}  # in a step; to each prompt
DTYPES = {"cpu": "float32", "cuda": "bfloat16"}
MICRO_BATCH = 128  # answers
ENGINE_SHARE = 0.4  # of the GPU's memory
TIMEOUT_S = 560
GAP = 0.1  # the largest mean difference of log-probabilities
ON_CPU = {
    "vllm": {"vllm.kv_cache_memory_bytes": 64 << 20},
    "sglang": {
        "sglang.device": "cpu",
        "sglang.attention_backend": "torch_native",
        "sglang.sampling_backend": "pytorch",
        "sglang.grammar_backend": "none",
        "sglang.disable_overlap_schedule": True,
        "sglang.max_total_tokens": 4096,
    },
}
ADAPTER = "rl_memory_plugins.integrations.verl"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """verl's reward function: that of `integration.grpo`."""
    answer = [int(word[1:]) for word in solution_str.split() if word[1:].isdigit()]
    return grpo.reward([int(ground_truth)], answer) if answer else 0.0


def write_prompts(file: Path, count: int) -> None:
    import pandas
    import torch

    made = grpo.make_prompts(count, torch.Generator().manual_seed(SEED))
    rows = [
        {
            "data_source": "classes",
            "prompt": [{"role": "user", "content": " ".join(f"w{token}" for token in prompt)}],
            "reward_model": {"style": "rule", "ground_truth": str(prompt[0])},
            "extra_info": {"index": index},
        }
        for index, prompt in enumerate(made)
    ]
    pandas.DataFrame(rows).to_parquet(file)


def move_tokenizer(model: Path, folder: Path) -> None:
    """Beside the model's configuration `transformers` would take the tokenizer of the model's kind."""
    from tokenizers import Tokenizer

    folder.mkdir()
    for file in model.glob("tokenizer*"):
        shutil.move(file, folder / file.name)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens(["\n"])  # verl asks each Qwen for it
    tokenizer.save(str(folder / "tokenizer.json"))


def overrides(subject: str, arguments: argparse.Namespace, folder: Path) -> list[str]:
    """verl's configuration."""
    rollout, actor, model = (f"actor_rollout_ref.{part}" for part in ("rollout", "actor", "model"))
    prompts, answers = PROMPTS[arguments.device], ANSWERS[arguments.device]
    micro_batch = min(MICRO_BATCH, prompts * answers // arguments.ranks)
    options = {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": folder / "prompts.parquet",
        "data.val_files": folder / "prompts.parquet",
        "data.train_batch_size": prompts,
        "data.max_prompt_length": 16,
        "data.max_response_length": grpo.ANSWER_TOKENS,
        "data.shuffle": False,
        "data.dataloader_num_workers": 0,
        f"{model}.path": folder / "model",
        f"{model}.tokenizer_path": folder / "tokenizer",
        f"{model}.custom_chat_template": f'"{TEMPLATE}"',
        f"{model}.use_remove_padding": False,
        f"{model}.enable_gradient_checkpointing": False,
        f"+{model}.override_config.attn_implementation": "sdpa",
        f"{actor}.strategy": "fsdp2",
        f"{actor}.use_torch_compile": False,
        f"{actor}.optim.lr": 0.2 / SHAPES[arguments.shape].hidden,  # a wider model takes smaller steps
        f"{actor}.optim.lr_warmup_steps": grpo.WARM_UP_STEPS,
        f"{actor}.optim.betas": "[0.9,0.95]",
        f"{actor}.optim.weight_decay": 0.0,
        f"{actor}.ppo_mini_batch_size": prompts,
        f"{actor}.ppo_micro_batch_size_per_gpu": micro_batch,
        f"{rollout}.name": arguments.engine,
        f"{rollout}.n": answers,
        f"{rollout}.ignore_eos": True,
        f"{rollout}.tensor_model_parallel_size": arguments.ranks,
        f"{rollout}.gpu_memory_utilization": ENGINE_SHARE,
        f"{rollout}.max_model_len": 64,
        f"{rollout}.log_prob_micro_batch_size_per_gpu": micro_batch,
        f"{rollout}.agent.num_workers": 2,
        "reward.custom_reward_function.path": __file__,
        "reward.num_workers": 2,
        "trainer.n_gpus_per_node": arguments.ranks,
        "trainer.total_training_steps": arguments.steps,
        "trainer.total_epochs": 1,
        "trainer.val_before_train": False,
        "trainer.save_freq": -1,
        "trainer.test_freq": -1,
        "trainer.resume_mode": "disable",
        "trainer.logger": "[console,file]",
        "trainer.default_local_dir": folder / subject,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        "ray_kwargs.ray_init.num_cpus": 16,  # verl counts its processes by them
        "+ray_kwargs.ray_init.include_dashboard": False,
        "hydra.run.dir": folder / subject / "hydra",
    }
    if arguments.device == "cpu":
        options |= {
            "trainer.device": "cpu",
            f"{actor}.fsdp_config.dtype": "float32",
            f"{rollout}.dtype": "float32",
            f"{rollout}.enforce_eager": True,
            f"{rollout}.checkpoint_engine.update_weights_bucket_megabytes": 64,
            **{f"+{rollout}.engine_kwargs.{name}": value for name, value in ON_CPU[arguments.engine].items()},
            "+ray_kwargs.ray_init.num_gpus": arguments.ranks,
            "+ray_kwargs.ray_init.object_store_memory": 200 << 20,
        }
    elif arguments.ranks > 1:  # FlashInfer compiles its fused all-reduce at the start, and it needs NVLink multicast
        options[f"+{rollout}.engine_kwargs.vllm.compilation_config.pass_config.fuse_allreduce_rms"] = False
    if subject == "plugin" and arguments.engine == "vllm":  # `environment` enables SGLang's
        options[f"+{rollout}.engine_kwargs.vllm.additional_config"] = "{rl_memory:{}}"
    if subject == "adapter":
        options[f"{model}.external_lib"] = ADAPTER
    return [f"{name}={value}" for name, value in options.items()]


def environment(subject: str, arguments: argparse.Namespace, folder: Path) -> dict[str, str]:
    watch = "integration.trainers.verl_watch"
    variables = {name: value for name, value in os.environ.items() if name != "RL_MEMORY"}
    paths = [str(REPOSITORY), *variables.get("PYTHONPATH", "").split(os.pathsep)]
    if arguments.device == "cpu":
        engine = ENGINES[arguments.engine]().environment(Launch(folder, tp=arguments.ranks))
        paths.append(engine.pop("PYTHONPATH", ""))
        variables |= engine
        watch = f"integration.trainers.verl_on_cpu,{watch}"
    if subject == "plugin" and arguments.engine == "sglang":
        variables["RL_MEMORY"] = "implicit_update_session=true"
    return variables | {
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(filter(None, paths))),
        "HF_HUB_OFFLINE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
        "VERL_USE_EXTERNAL_MODULES": watch,
        "VERL_WATCH": str(folder / f"{subject}.watched"),
        "VERL_FILE_LOGGER_PATH": str(folder / f"{subject}.jsonl"),
    }


def run_subject(subject: str, arguments: argparse.Namespace, folder: Path) -> None:
    records = Records(arguments.out, {"subject": subject, **about(arguments)}, by_step=True)
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *overrides(subject, arguments, folder)]
    before = host_bytes()
    on_gpu = arguments.device == "cuda"
    with Timeline({"host": host_bytes} | ({"gpu": gpu_bytes} if on_gpu else {})) as timeline:
        try:
            run_bounded(command, TIMEOUT_S, environment(subject, arguments, folder))
        except subprocess.SubprocessError as error:  # the other subjects run; `problems` names the missing steps
            print(f"{subject}: {error}", flush=True)
    kill_left(folder / f"{subject}.watched")
    logged = [json.loads(line)["data"] for line in lines(folder / f"{subject}.jsonl")]
    for metric, name, unit in (("reward", "critic/score/mean", "share"), ("step_s", "timing_s/step", "s")):
        add(records, metric, [one[name] for one in logged if name in one], unit)
    watched: dict[str, list[float]] = {}
    for line in lines(folder / f"{subject}.watched"):
        [(metric, value)] = json.loads(line).items()
        watched.setdefault(metric, []).append(value)
    wakes = watched.get("wake_s", [])
    # The first sleep and the first sync come before the first step.
    add(records, "sync_s", watched.get("sync_s", [])[1:], "s")
    add(records, "wake_s", [first + second for first, second in zip(wakes[2::2], wakes[3::2], strict=False)], "s")
    add(records, "sleep_s", watched.get("sleep_s", [])[1:], "s")
    add(records, "logprob_difference", watched.get("logprob_difference", []), "nat")
    records.add("peak_host_mib", [(timeline.peak("host") - before) / 2**20], "MiB")
    if on_gpu:
        records.add("peak_gpu_mib", [timeline.peak("gpu") / 2**20], "MiB")


def kill_left(watched: Path) -> None:
    """Kill what is left of a subject's cluster, which has process groups of its own. Other clusters stay."""
    import psutil

    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("VERL_WATCH") == str(watched):
                process.kill()


def add(records: Records, metric: str, values: list[float], unit: str) -> None:
    if values:
        records.add(metric, values, unit)


def lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


def host_bytes() -> int:
    import psutil

    return int(psutil.virtual_memory().used)


def gpu_bytes() -> int:
    import pynvml

    pynvml.nvmlInit()
    return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used)


def about(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "trainer": f"verl {version('verl')}",
        "engine": f"{arguments.engine} {engine_version(arguments.engine)}, tensor parallel {arguments.ranks}",
        "torch": version("torch"),
        "transformers": version("transformers"),
        "device": f"{arguments.ranks} {gpu_name()}" if arguments.device == "cuda" else "cpu",
        "model": f"{arguments.shape}, {grpo.VOCABULARY} tokens",
        "commit": arguments.commit,
        "command": f"python -m integration.trainers.verl_grpo --device {arguments.device} --steps {arguments.steps} "
        f"--shape {arguments.shape} --engine {arguments.engine} --ranks {arguments.ranks}",
    }


def problems(records: list[dict[str, Any]], arguments: argparse.Namespace) -> list[str]:
    """What is not as it should be."""
    found = {(record["subject"], record["metric"]): record.get("by_step", []) for record in records}
    return [one for subject in arguments.subjects for one in problems_of(subject, found, arguments.steps, GAP)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=SUBJECTS, default="cpu")
    parser.add_argument("--engine", choices=sorted(ENGINES), default="vllm")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--ranks", type=int, default=1, help="of the trainer and of the engine")
    parser.add_argument("--subjects", nargs="+", choices=SUBJECTS["cuda"], default=None)
    add_commit(parser)
    parser.add_argument("--out", type=Path, default=Path("verl.json"))
    arguments = parser.parse_args()
    kind = arguments.engine, arguments.device
    arguments.subjects = arguments.subjects or SUBJECTS_ON.get(kind) or SUBJECTS[arguments.device]
    arguments.out.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="rl-memory-verl-") as scratch:
        folder = Path(scratch)
        shape = SHAPES[arguments.shape]._replace(vocabulary=grpo.VOCABULARY)
        model = write_model(folder / "model", shape, dtype=DTYPES[arguments.device], seed=SEED)
        move_tokenizer(model, folder / "tokenizer")
        write_prompts(folder / "prompts.parquet", PROMPTS[arguments.device] * arguments.steps)
        for subject in arguments.subjects:
            print(f"-- {subject}", flush=True)
            run_subject(subject, arguments, folder)
    bad = problems(read(arguments.out), arguments)
    print("\n".join(f"FAILED: {one}" for one in bad) or "passed")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
