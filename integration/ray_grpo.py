"""GRPO under Ray: two engines and a trainer, each an actor. An engine is killed on the way, and replaced.

    python -m integration.ray_grpo --quick

The task and the loss are those of `integration.grpo`. The trainer and the first engine share a bundle of one placement
group; the second engine has the other bundle. Each step samples answers on both engines, and `FleetHandoff` puts them
to sleep for the training and gives them the new weights. In one roll-out the process of the second engine's actor is
killed: its prompts go to the first engine, which serves alone until the second one is replaced.

Writes a JSON record. The exit code is 1 if a check fails, such as the rise of the reward.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import ray
import torch
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from rich.console import Console

from integration import grpo
from integration.grpo_demo import ENDS, RISE, SCALES, SEED, Scale
from integration.models import new_model, write_model
from integration.subjects import described
from rl_memory_plugins.ray import EngineActorHandle, EngineDescription, EngineFleet, status, table
from rl_memory_plugins.trainer import ModelSource, PausableMemory, tensor_checksum

VICTIM = 1  # the number of the engine that is killed
KILL_AT = 5  # the step whose roll-out loses the engine


class Trainer:
    """The actor of the trainer: it controls the fleet.

    Args:
        engines: The engines of the fleet.
        folder: The model.
    """

    def __init__(self, engines: list[EngineActorHandle], folder: Path, scale: Scale) -> None:
        self._fleet = EngineFleet(engines)
        self._scale = scale
        self._generator = torch.Generator().manual_seed(SEED)
        self._policy = grpo.Policy(new_model(folder, SEED), "cpu")
        self._memory = PausableMemory(self._policy.model, self._policy.optimizer)
        self._source = ModelSource(self._policy.model)
        self._handoff = self._fleet.handoff(
            self._source,
            weights=[self._memory.part("parameters")],
            others=[self._memory.part("gradients", "optimizer")],
        )
        self._served_meanwhile = 0
        self.steps: list[dict[str, Any]] = []
        self.checks: dict[str, bool] = {}

    def run(self) -> dict[str, Any]:
        """Train. Returns the steps and the checks."""
        self._handoff.sync("0")  # the engines have dummy weights
        for number in range(1, self._scale.steps + 1):
            self._step(number)
        rewards = [step["reward"] for step in self.steps]
        first, last = statistics.mean(rewards[:ENDS]), statistics.mean(rewards[-ENDS:])
        self.check(f"the mean reward of {ENDS} steps rises by {RISE}", last > first + RISE)
        self._compare()
        return {"steps": self.steps, "checks": self.checks, "answers_while_replacing": self._served_meanwhile}

    def check(self, name: str, passed: bool) -> None:
        """Record a check; one failure anywhere fails it."""
        self.checks[name] = self.checks.get(name, True) and passed

    def _step(self, number: int) -> None:
        start = time.perf_counter()
        victim = self._fleet.engines[VICTIM]
        if number == KILL_AT:
            threading.Timer(0.3, os.kill, (victim.about().pid, 9)).start()
        prompts, answers, logprobs = self._roll_out(str(number - 1))
        if number == KILL_AT:
            while victim in self._fleet.up():  # the roll-out may have been quicker
                time.sleep(0.1)
            self._show("killed")
            self._replace(str(number - 1))
        with self._handoff.training(str(number)) as report:
            own = self._policy.train(prompts, answers)
        states = [(one.state, one.weight_version) for one in status(self._fleet)]
        self.check("both engines serve the version that was sent", states == [("serves", str(number))] * 2)
        gap = float((own - torch.tensor(logprobs)).abs().mean())
        self.check("engines and trainer agree on the log-probabilities", gap < 0.05)
        reward = statistics.mean(grpo.reward(p, a) for p, group in zip(prompts, answers, strict=True) for a in group)
        seconds = time.perf_counter() - start
        self.steps.append({"step": number, "reward": reward, "seconds": {"total": seconds, **report.seconds}})
        print(f"step {number:2}: reward {reward:.3f}, gap {gap:.1e}, {seconds:.2f} s", flush=True)

    def _roll_out(self, version: str) -> tuple[list[list[int]], list[list[list[int]]], list[list[list[float]]]]:
        """The prompts; by prompt its answers; by prompt and answer the engine's log-probability of each token."""
        each = self._scale.answers
        prompts = grpo.make_prompts(self._scale.prompts, self._generator)
        seeds = torch.randint(1 << 31, (len(prompts) * each,), generator=self._generator).tolist()
        sampling = [
            {"temperature": 1.0, "seed": seed, "max_tokens": grpo.ANSWER_TOKENS, "ignore_eos": True, "logprobs": True}
            for seed in seeds
        ]
        found = self._fleet.generate([prompt for prompt in prompts for _ in range(each)], sampling)
        self.check(
            "every answer names the weights that were sent last",
            all(answer.weight_version == (version, version) for answer in found),
        )
        groups = [found[start : start + each] for start in range(0, len(found), each)]
        return prompts, *(
            [[getattr(one, name) for one in group] for group in groups] for name in ("token_ids", "logprobs")
        )

    def _replace(self, version: str) -> None:
        """Replace the engine, and roll out on the other one meanwhile."""
        replaced: list[int] = []
        replacing = threading.Thread(target=lambda: replaced.extend(self._fleet.replace(self._source)))
        replacing.start()
        while replacing.is_alive():
            self._served_meanwhile += sum(map(len, self._roll_out(version)[1]))
        replacing.join()
        self.check("the engine that was killed is replaced", replaced == [VICTIM])
        self.check("the other engine serves meanwhile", self._served_meanwhile > 0)
        self._show("replaced")

    def _compare(self) -> None:
        self._memory.wake(["parameters"])
        own = {name: tensor_checksum(p.detach()) for name, p in self._policy.model.named_parameters()}
        self._memory.sleep(["parameters"])
        found = [engine.checksums()["tensors"] for engine in self._fleet.engines]
        self.check("the checksums of both engines equal the trainer's", found == [own, own])

    def _show(self, what: str) -> None:
        print(f"engine {VICTIM} is {what}:", flush=True)
        Console(width=110).print(table(status(self._fleet)))


def arguments_of(folder: Path, scale: Scale) -> dict[str, Any]:
    """The arguments of vLLM's engine."""
    return {
        "model": str(folder),
        "load_format": "dummy",
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 64,
        "max_num_seqs": scale.prompts * scale.answers,
        "kv_cache_memory_bytes": scale.kv_bytes,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model and fewer steps")
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--out", type=Path, default=Path("demo-out"))
    given = parser.parse_args()
    scale = SCALES["quick" if given.quick else "cpu"]
    scale = scale._replace(steps=given.steps or scale.steps, shape=scale.shape._replace(vocabulary=grpo.VOCABULARY))
    variables = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # vLLM would bind both engines to the same core
    }
    os.environ.setdefault("RAY_worker_niceness", "0")  # by default 15: the engines starve beside other processes
    ray.init(num_cpus=4, include_dashboard=False, runtime_env={"env_vars": variables})
    with tempfile.TemporaryDirectory(prefix="rl-memory-ray-") as temporary:
        folder = write_model(Path(temporary, "model"), scale.shape)
        group = placement_group([{"CPU": 2}, {"CPU": 1}])
        ray.get(group.ready())
        description = EngineDescription("vllm", arguments_of(folder, scale))
        with EngineFleet.start(description, 2, placement=group) as fleet:
            place = PlacementGroupSchedulingStrategy(group, 0)
            trainer = (
                ray.remote(Trainer).options(num_cpus=1, scheduling_strategy=place).remote(fleet.engines, folder, scale)
            )
            found = ray.get(trainer.run.remote())
    given.out.mkdir(parents=True, exist_ok=True)
    size = "quick" if given.quick else "cpu"
    about = described("ray_grpo", "vllm", size, "fleet", os.environ.get("GIT_COMMIT", "unknown"), gpu="none")
    (given.out / "grpo-ray-vllm-cpu.json").write_text(json.dumps({**about, "ray": ray.__version__, **found}, indent=1))
    for check, passed in found["checks"].items():
        print(f"{'passed' if passed else 'FAILED'}: {check}")
    ray.shutdown()
    return 0 if all(found["checks"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
