"""OpenRLHF's own command with the adapter, on a CPU: DeepSpeed trains, and vLLM generates.

    python -m integration.trainers.openrlhf_ppo --steps 4 --out openrlhf-cpu.json
    python -m integration.trainers.openrlhf_ppo --steps 20 --ranks 2

Model, tokenizer and prompts are made here, and nothing is fetched. The task is that of `integration.grpo`: the reward
is the share of an answer's tokens from the class of its prompt, so it can rise from 0.25 to 1. OpenRLHF evaluates after
every second step. OpenRLHF asks `torch.cuda` for devices, and its own sync needs a GPU; `openrlhf_on_cpu` stands in for
the first, and the adapter makes all syncs. Records, with a value for every step under `by_step`:

    reward                 the mean over all answers of a step
    logprob_difference     the estimate of the KL divergence between rollout and trainer, OpenRLHF's `vllm_kl`
    sync_s                 the wake of the weights and the sync
    step_s                 the whole step

`--ranks` is the number of trainer processes, and of engines. With two ranks and `--zero 3` DeepSpeed yields NaNs on
CPUs in some runs, before the first sync and without the adapter.

Exit code 1 if a check fails: of the records, of the level of each sleep, and of the version of each answer.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from integration import grpo
from integration.engines.base import REPOSITORY, Launch
from integration.engines.vllm import Vllm
from integration.models import SHAPES, write_model
from integration.records import Records, read
from integration.subjects import add_commit, engine_version, run_bounded
from integration.trainers import openrlhf_agent as agent
from integration.trainers.checks import problems_of

SEED = 11
SUBJECT = "adapter"
PROMPTS, ANSWERS = 8, 8  # in a step; to each prompt
EVALUATION = 2  # steps from one to the next
TIMEOUT_S = 560
GAP = 0.02
METRICS = {
    "reward": ("rollout/reward_mean", "share"),
    "logprob_difference": ("vllm_kl", "nat"),
    "sync_s": ("timing/broadcast", "s"),
    "step_s": ("timing/step_total", "s"),
}


def write_tokenizer(model: Path) -> None:
    """A tokenizer of Qwen2's kind, whose tokens are signs. OpenRLHF looks for it beside the weights."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    special = ["<|endoftext|>", "<|im_end|>"]
    vocabulary = {token: number for number, token in enumerate([*special, *agent.SIGNS])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(model / "tokenizer.json"))
    names = {"pad_token": special[0], "unk_token": special[0], "eos_token": special[1]}
    (model / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Qwen2Tokenizer", **names}))


def write_prompts(file: Path, count: int) -> None:
    import torch

    made = grpo.make_prompts(count, torch.Generator().manual_seed(SEED))
    lines = [{"prompt": "".join(agent.SIGNS[token - agent.FIRST] for token in prompt)} for prompt in made]
    file.write_text("\n".join(map(json.dumps, lines)))


def command(arguments: argparse.Namespace, folder: Path) -> list[str]:
    """OpenRLHF's command with the adapter."""
    options = {
        "actor.num_nodes": 1,
        "actor.num_gpus_per_node": arguments.ranks,
        "actor.model_name_or_path": folder / "model",
        "actor.adam.lr": 0.2 / SHAPES[arguments.shape].hidden,
        "actor.lr_scheduler": "constant",
        "vllm.num_engines": arguments.ranks,
        "vllm.tensor_parallel_size": 1,
        "vllm.gpu_memory_utilization": 0.5,
        "ds.zero_stage": arguments.zero,
        "ds.attn_implementation": "sdpa",
        "data.prompt_dataset": folder / "prompts.jsonl",
        "data.input_key": "prompt",
        "data.max_len": 64,
        "rollout.batch_size": PROMPTS,
        "rollout.n_samples_per_prompt": ANSWERS,
        "rollout.micro_batch_size": ANSWERS,
        "rollout.max_new_tokens": grpo.ANSWER_TOKENS,
        "train.batch_size": PROMPTS * ANSWERS,
        "train.micro_batch_size": ANSWERS,
        "train.agent_func_path": agent.__file__,
        "eval.dataset": folder / "evaluation.jsonl",
        "eval.steps": EVALUATION,
        "eval.n_samples_per_prompt": 1,
        "algo.advantage.estimator": "group_norm",
        "algo.advantage.is_correction_level": "token",  # asks for the log-probabilities of the rollout
        "algo.kl.init_coef": 0,
        "ckpt.best_metric_key": "none",
        "ckpt.output_dir": folder / "trained",
        "ckpt.path": folder / "checkpoints",
    }
    switches = ["train.colocate_all", "vllm.enable_sleep", "vllm.enforce_eager"]
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return [
        sys.executable,
        "-m",
        "rl_memory_plugins.integrations.openrlhf",
        *words,
        *(f"--{name}" for name in switches),
    ]


def environment(arguments: argparse.Namespace, folder: Path) -> dict[str, str]:
    variables = {name: value for name, value in os.environ.items() if name != "RL_MEMORY"}
    paths = [
        str(REPOSITORY),
        str(Path(__file__).parent / "openrlhf_on_cpu"),
        *variables.get("PYTHONPATH", "").split(":"),
    ]
    return variables | {
        **Vllm().environment(Launch(folder, tp=1)),
        "PYTHONPATH": ":".join(dict.fromkeys(filter(None, paths))),
        "PATH": f"{Path(sys.executable).parent}:{variables['PATH']}",  # DeepSpeed compiles with ninja
        "OMP_NUM_THREADS": "1",
        "RAY_OVERRIDE_RESOURCES": json.dumps({"GPU": arguments.ranks, "CPU": 8}),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OPENRLHF_WATCH": str(folder / "watched"),
    }


def run(arguments: argparse.Namespace, folder: Path) -> list[str]:
    """Run OpenRLHF. Returns what its engines have recorded that is not as it should be."""
    log = folder / "log"
    tee = ["bash", "-o", "pipefail", "-c", '"$@" 2>&1 | tee "$0"', str(log)]
    bad = []
    try:
        run_bounded([*tee, *command(arguments, folder)], TIMEOUT_S, environment(arguments, folder))
    except subprocess.SubprocessError as error:
        bad.append(str(error))
    logged = re.findall(r"Global step \d+: (\{.*\})", log.read_text())
    steps = [ast.literal_eval(re.sub(r"\bnan\b", "1e999", found)) for found in logged]  # a NaN must fail the checks
    records = Records(arguments.out, {"subject": SUBJECT, **about(arguments)}, by_step=True)
    for metric, (name, unit) in METRICS.items():
        values = [step[name] for step in steps]
        if values:
            records.add(metric, values, unit)
    engines = sorted(folder.glob("watched.*"))
    if len(engines) != arguments.ranks:
        bad.append(f"{len(engines)} of {arguments.ranks} engines have answered")
    for engine in engines:
        bad += objections([json.loads(line) for line in engine.read_text().splitlines()], arguments.steps)
    return bad


def objections(watched: list[dict[str, Any]], steps: int) -> list[str]:
    """What is not as it should be in the record of one engine."""
    levels, versions = [], []
    for step in range(1, steps + 1):
        levels.append(1 if step == 1 else 2)  # the first rollout sleeps before the first sync
        versions.append(str(step - 1) if step > 1 else "default")
        if step % EVALUATION == 0:
            levels.append(1)
            versions.append(str(step))
    levels.append(1)  # OpenRLHF looks for further prompts
    seen = [one["version"] for one in watched if "version" in one]
    bad = []
    if list(dict.fromkeys(seen)) != list(dict.fromkeys(versions)):
        bad.append(f"the versions of the answers are {list(dict.fromkeys(seen))}")
    slept = [one["sleep"] for one in watched if "sleep" in one]
    if slept != levels:
        bad.append(f"the levels of the sleeps are {slept}, not {levels}")
    return bad


def about(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "trainer": f"openrlhf {version('openrlhf')}, deepspeed {version('deepspeed')}, ZeRO {arguments.zero}",
        "engine": f"{arguments.ranks} vllm {engine_version('vllm')}",
        "torch": version("torch"),
        "transformers": version("transformers"),
        "device": "cpu",
        "model": f"{arguments.shape}, {grpo.VOCABULARY} tokens",
        "commit": arguments.commit,
        "command": f"python -m integration.trainers.openrlhf_ppo --steps {arguments.steps} --shape {arguments.shape} "
        f"--ranks {arguments.ranks} --zero {arguments.zero}",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--ranks", type=int, default=1, help="of the trainer, each with an engine")
    parser.add_argument("--zero", type=int, choices=(1, 2, 3), default=2, help="DeepSpeed's stage")
    add_commit(parser)
    parser.add_argument("--out", type=Path, default=Path("openrlhf.json"))
    arguments = parser.parse_args()
    arguments.out.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="rl-memory-openrlhf-") as scratch:
        folder = Path(scratch)
        shape = SHAPES[arguments.shape]._replace(vocabulary=grpo.VOCABULARY)
        write_tokenizer(write_model(folder / "model", shape, dtype="bfloat16", seed=SEED))
        write_prompts(folder / "prompts.jsonl", PROMPTS * arguments.steps)
        write_prompts(folder / "evaluation.jsonl", PROMPTS)
        bad = run(arguments, folder)
    found = {(one["subject"], one["metric"]): one["by_step"] for one in read(arguments.out)}
    bad += problems_of(SUBJECT, found, arguments.steps, GAP)
    print("\n".join(f"FAILED: {one}" for one in bad) or "passed")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
